"""Which errors say that another machine may be asked: those of which Triton had nothing."""

import pytest

from adapter import errors
from adapter.errors import AdapterError, BackendUnavailable, was_not_started
from adapter.frontends.status import AWS, HTTP, MODEL_ERROR, aws_status, lookup
from tests.unit.frontends.test_status import an, tree

NOT_STARTED = {
    errors.NoRoom,
    errors.NotStarted,
    errors.StoreUnavailable,
    errors.TooManyConnections,
    errors.TooManyStreams,
    errors.TooManyWaiting,
}
OF_TRITON = (errors.BackendUnavailable, errors.Overloaded)


def test_only_errors_before_triton_say_so_as_503():
    said = {kind for kind in tree(AdapterError) if was_not_started(an(kind))}
    assert said == NOT_STARTED
    statuses = {lookup(table, an(kind))[0] for kind in said for table in (HTTP, AWS)}
    assert statuses == {503}


@pytest.mark.parametrize("kind", OF_TRITON)
def test_undelivered_call_was_not_started(kind):
    assert was_not_started(kind("text", delivered=False))


def test_request_broken_by_triton_is_model_error():
    assert aws_status(BackendUnavailable("text", delivered=True)) == MODEL_ERROR
    assert aws_status(BackendUnavailable("text", delivered=False)) == (503, "ServiceUnavailable")
    full = errors.Overloaded("a queue of Triton's is full", delivered=True)
    assert aws_status(full) == (503, "ServiceUnavailable")
