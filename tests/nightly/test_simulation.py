"""Simulated days, and every fault that was put back: docs/simulation.md."""

import time

import pytest

from tests.simulation.faults import FAULTS, MISSED
from tests.simulation.faults.__main__ import found
from tests.simulation.plan import drawn
from tests.simulation.world import played

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]

_FAULT_SECONDS = 60.0


def test_nothing_is_wrong_in_new_days(seconds: float, seed: int) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert played(drawn(seed)).violation is None, f"make simulate SEED={seed}"
        seed += 1


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in MISSED])
def test_a_fault_that_is_put_back_is_found(name: str) -> None:
    violation, _, _ = found(FAULTS[name], _FAULT_SECONDS)
    assert violation is not None, FAULTS[name].breaks
