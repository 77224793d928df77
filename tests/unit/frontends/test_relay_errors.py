"""The relay's own errors, as its policy words them for clients."""

import pytest

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.frontends.access import Access
from adapter.frontends.grpc.calls import GrpcCalls, MessageLimits
from adapter.frontends.grpc.relay_policy import RelayPolicy
from adapter.relay.policy import Reason, RelayError
from tests.fakes.control import ControlOnFakes

STATUSES = {
    Reason.INVALID: (3, "InvalidRequest"),
    Reason.ENCODING: (12, "InvalidRequest"),
    Reason.TOO_LARGE: (8, "PayloadTooLarge"),
    Reason.INCOMPLETE: (13, "InvalidRequest"),
    Reason.SLOW: (3, "SlowBody"),
    Reason.NOT_STARTED: (14, "NotStarted"),
    Reason.OVERLOADED: (8, "BackendUnavailable"),
    Reason.UNREACHABLE: (14, "BackendUnavailable"),
    Reason.BROKEN: (14, "BackendUnavailable"),
    Reason.LATE: (4, "BackendTimeout"),
    Reason.ODD_ANSWER: (13, "InferenceFailed"),
}
NOTHING_BEGUN = {Reason.NOT_STARTED, Reason.OVERLOADED, Reason.UNREACHABLE}


@pytest.mark.parametrize("reason", Reason)
def test_each_error_has_status_and_retry(reason):
    adapter = ControlOnFakes()
    calls = GrpcCalls(adapter.metrics, Access("grpc"), MessageLimits())
    policy = RelayPolicy(
        adapter.control, adapter.control_state.triton, Faults(Classifier(())), calls
    )
    status, text, trailers = policy.worded(RelayError(reason, "why"))
    assert (status, text) == (STATUSES[reason][0], f"{STATUSES[reason][1]}: why")
    assert ((b"x-triton-adapter-not-started", b"1") in trailers) is (reason in NOTHING_BEGUN)
