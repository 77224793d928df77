"""The simulation itself: seeds repeat runs, the oracle finds a fault, and a failure is shrunk."""

import asyncio
import os
import subprocess
import sys
from functools import cache

import pytest

from adapter.runtime import clock
from adapter.runtime.threads import Threads
from tests.simulation.disk import SimDisk
from tests.simulation.loop import Draws, Standstill, virtual
from tests.simulation.plan import drawn
from tests.simulation.shrink import shrunk
from tests.simulation.world import Outcome, played


def digest_in_a_process(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", f"--seed={seed}"]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return said.stdout.split()[-1]


@cache
def day(seed: int) -> Outcome:
    return played(drawn(seed))


def test_seed_alone_decides_the_events():
    digests = {digest_in_a_process(1, hash_seed) for hash_seed in ("1", "2")}
    assert digests == {day(1).story.digest}
    assert day(1).story.digest != day(2).story.digest


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_wrong_in_these_days(seed):
    assert day(seed).violation is None


def test_failure_is_shrunk_to_entries_that_it_needs(monkeypatch):
    """A folder that stays needs a load and an unload."""

    async def remove_nothing(self: SimDisk, name: str) -> None:
        """Leave the folder where it is."""

    monkeypatch.setattr(SimDisk, "remove", remove_nothing)
    days = (played(drawn(seed)) for seed in range(200))
    outcome = next(day for day in days if day.violation)
    found = shrunk(outcome)
    assert found.violation.rule == outcome.violation.rule
    assert len(found.plan.entries) <= 4
    monkeypatch.undo()
    assert played(found.plan).violation is None


def test_cut_day_ends_in_virtual_time():
    async def day() -> None:
        begun = clock.monotonic()
        try:
            for _ in range(300_000):
                await asyncio.sleep(0)
        finally:
            await Threads("test", 1).run_to_end(bool)
            await asyncio.sleep(5.0)
            took.append(clock.monotonic() - begun)

    took: list[float] = []
    with pytest.raises(Standstill), virtual(Draws(0)) as run:
        run(day())
    assert took == [pytest.approx(5.0, abs=1.0)]
