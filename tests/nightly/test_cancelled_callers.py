"""What callers who cancel take of memory, beside the same callers straight to Triton."""

import pytest

from tests.nightly.cancelling import measure

pytestmark = pytest.mark.triton

_SECONDS = 20.0
_MIB = 2**20


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["REST", "gRPC"])
def test_cancelled_calls_cost_others_nothing(kind):
    """The requests wait in Triton's queue, as they do without the adapter."""
    behind = measure(kind, is_straight=False, seconds=_SECONDS)
    straight = measure(kind, is_straight=True, seconds=_SECONDS)
    assert behind.others.keys() == {"REST 200", "gRPC OK"}
    assert not behind.has_triton_ended
    adapter_before, adapter_after = behind.adapter_bytes
    assert adapter_after - adapter_before < 100 * _MIB
    if not straight.has_triton_ended:
        each = [after - before for before, after in (behind.triton_bytes, straight.triton_bytes)]
        assert each[0] / behind.cancelled < 1.5 * each[1] / straight.cancelled
