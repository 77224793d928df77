"""The simulation itself: seeds repeat runs, the world stays behind its seams, failures shrink."""

import ast
import asyncio
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from adapter.runtime import clock
from adapter.runtime.threads import Threads
from tests.simulation.faults import FAULTS
from tests.simulation.loop import Draws, Standstill, VirtualLoop, virtual
from tests.simulation.plan import drawn
from tests.simulation.shrink import shrunk
from tests.simulation.world import Outcome, played

HERE = Path(__file__).parent
# What the world may know of the adapter: the door, values, errors, and the clock.
SEAMS = ("adapter.control.door", "adapter.core.", "adapter.errors", "adapter.runtime.")
# Parts that are real beside control, by the file that plays them.
REAL = {
    "cache.py": ("adapter.packages.unpack", "adapter.store.cache_folder"),
    "catalog.py": ("adapter.packages.unpack",),
    "control.py": ("adapter.",),
    "endpoint.py": ("adapter.packages.unpack", "adapter.store.cache"),
    "mesh.py": ("adapter._proto", "adapter.frontends.grpc.", "adapter.telemetry.metrics"),
    "residents.py": ("adapter.packages.unpack",),
    "store.py": ("adapter.settings.locations", "adapter.store.ports"),
    "story.py": ("adapter.telemetry.log",),
}


def digest_in_a_process(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", f"--seed={seed}"]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return said.stdout.split()[-1]


@cache
def day(seed: int) -> Outcome:
    return played(drawn(seed))


def test_seed_gives_same_events_in_every_process():
    digests = {digest_in_a_process(1, hash_seed) for hash_seed in ("1", "2")}
    assert len(digests) == 1


def test_seeds_give_different_events():
    assert day(1).story.digest != day(2).story.digest


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_wrong_in_these_days(seed):
    assert day(seed).violation is None


def test_failure_is_shrunk_to_entries_that_it_needs():
    """A folder that stays needs a load and an unload."""
    fault = FAULTS["an unload leaves the folders"]
    days = (played(drawn(seed), fault.build) for seed in range(200))
    outcome = next(day for day in days if day.violation)
    found = shrunk(outcome, lambda plan: played(plan, fault.build))
    assert found.violation.rule == outcome.violation.rule
    assert len(found.plan.entries) <= 4
    assert played(found.plan).violation is None


def test_world_knows_door_and_ports_alone():
    for path in HERE.glob("*.py"):
        allowed = (*SEAMS, *REAL.get(path.name, ()))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("adapter"):
                assert f"{node.module}.".startswith(allowed), f"{path.name}: {node.module}"


def test_no_timer_is_left_behind_by_virtual_time():
    """It would end this process by a signal, some tests later."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(Draws(0))) as runner:
        runner.run(asyncio.sleep(1))
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_cut_turn_leaves_no_warning_of_unawaited_work():
    async def turn() -> None:
        await asyncio.gather(asyncio.sleep(1), signal.raise_signal(signal.SIGPROF))

    with virtual(Draws(0)) as run, pytest.raises(Standstill):
        run(turn())


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
