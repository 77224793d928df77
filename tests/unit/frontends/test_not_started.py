"""Which errors say that another machine may be asked: those of which Triton had nothing."""

import pytest

from adapter import errors
from adapter.errors import AdapterError, BackendUnavailable, was_not_started
from adapter.frontends.status import AWS, HTTP, MODEL_ERROR, aws_status, lookup
from tests.cases import rows
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


def by_name(kinds: set[type[AdapterError]]) -> list[type[AdapterError]]:
    return sorted(kinds, key=lambda kind: kind.__name__)


@rows("kind", by_name(tree(AdapterError) - NOT_STARTED))
def test_error_after_triton_does_not_say_so(kind):
    assert not was_not_started(an(kind))


@pytest.mark.parametrize("kind", by_name(NOT_STARTED))
def test_error_before_triton_says_so_as_503(kind):
    assert was_not_started(an(kind))
    assert (lookup(HTTP, an(kind))[0], lookup(AWS, an(kind))[0]) == (503, 503)


@pytest.mark.parametrize("kind", OF_TRITON)
def test_undelivered_call_was_not_started(kind):
    assert was_not_started(kind("text", delivered=False))


def test_request_broken_by_triton_is_model_error():
    assert aws_status(BackendUnavailable("text", delivered=True)) == MODEL_ERROR
    assert aws_status(BackendUnavailable("text", delivered=False)) == (503, "ServiceUnavailable")
    full = errors.Overloaded("a queue of Triton's is full", delivered=True)
    assert aws_status(full) == (503, "ServiceUnavailable")
