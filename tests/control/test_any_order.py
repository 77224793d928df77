"""Whatever comes at once, in any order, and whatever bug there is in a port: in the end no book has
anything left of an operation. What ports fail with by their contract is played by tests/simulation.
"""

import asyncio
from contextlib import suppress
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId, Placement, TritonName
from adapter.core.state import ModelState
from adapter.errors import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidModel,
    LoadFailed,
    ModelNotFound,
    OutOfMemory,
    SourceMissing,
    StubDied,
)
from tests.fakes.house import House
from tests.fakes.steps import Steps

MIB = 2**20
NAMES = "abcd"
# Nobody waits for long.
HASTY = TimeLimits(
    *(5, 1, 0.02, 0.1, 0.1),
    stub_gone=0.1,
    stub_unseen=0.3,
    linger=0.02,
    killed=0.02,
)
_MOST_SECONDS = 30

_LOST = [
    lambda: BackendUnavailable("lost", delivered=True),
    lambda: BackendTimeout("late"),
]
_LOAD = [
    lambda: OutOfMemory("out of memory"),
    lambda: LoadFailed("killed", suspected="killed"),
    lambda: LoadFailed("no weights"),
]
_DISK = [lambda: BackendError("the disk refuses")]
_PACKAGE = [lambda: InvalidModel("no config"), lambda: SourceMissing("nothing there")]
# what each port may raise by its contract
FAULTS = {
    "load": _LOST + _LOAD,
    "unload": _LOST,
    "wait_gone": _LOST,
    "ready": _LOST,
    "present": _LOST,
    "prepare": _DISK + _PACKAGE,
    "place": _DISK,
    "confirm": _DISK,
    "remove": _DISK,
    "save": _DISK,
    "running_models": [lambda: OSError("no descriptor")],
    "processes_of": [lambda: BackendUnavailable("cannot be seen", delivered=False)],
}
BUGS = [lambda: OSError("bug"), lambda: RuntimeError("bug"), lambda: KeyError("bug")]


class AnySteps(Steps):
    """Each step takes some turns of the loop, and fails now and then."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.is_calm = True
        self._random = random

    async def take(self, verb: str, name: str = "") -> None:
        if self.is_calm:
            return
        for _ in range(self._random.choice([0, 1, 1, 2, 5, 20])):
            await asyncio.sleep(0)
        faults = FAULTS.get(verb, []) + BUGS
        if faults and self._random.random() < 0.12:
            fault = self._random.choice(faults)
            raise fault()


class Crowd:
    """Callers, Triton, and what looks after both, all at once."""

    def __init__(self, random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random
        self.steps = AnySteps(random)
        with monkeypatch.context() as patched:
            patched.setattr("tests.fakes.house.Steps", lambda: self.steps)
            self.house = House(
                random.choice([None, 1000 * MIB]),
                HASTY,
                embedded=random.random() < 0.6,
                loads_again=random.random() < 0.3,
                memory_limit=random.choice([None, 900 * MIB]),
            )
        self.house.memory.tells_apart = random.random() < 0.5
        self.house.memory.lag = random.choice([0, 0, 0.05])
        self.house.packages.placements["/a"] = Placement(
            (TritonName("a2"), TritonName("a")), (TritonName("a.s"),)
        )
        self.house.triton.along["a"] = {"a.s"}
        for name in NAMES:
            self.house.sizes[name] = random.choice([0, 50, 300, 600]) * MIB
            if random.random() < 0.4:
                self.house.packages.declared[f"/{name}"] = random.choice([50, 600]) * MIB
        for look in ("running_models", "processes_of", "living", "kill"):
            self._slow_down(look)

    def _slow_down(self, look: str) -> None:
        answer = getattr(self.house.server, look)

        async def later(*args: object) -> object:
            await self.steps.take(look)
            return await answer(*args)

        setattr(self.house.server, look, later)

    # -- what may happen --------------------------------------------------------------------

    async def load(self) -> None:
        await self.house.load(self.random.choice(NAMES))

    async def unload(self) -> None:
        await self.house.unload(self.random.choice(NAMES))

    async def infer(self) -> None:
        lease = self.house.control.lease(ModelId(name := self.random.choice(NAMES)))
        lease.begin()
        for _ in range(self.random.choice([0, 3, 30])):
            await asyncio.sleep(0)
        if self.random.random() < 0.2:
            self.house.server.live[name] = False
        errors = [None, None, StubDied("died"), ModelNotFound("gone"), InferenceFailed("no")]
        lease.end(self.random.choice(errors))

    async def restart(self) -> None:
        triton, server = self.house.triton, self.house.server
        triton.live, server.pid = False, None
        triton.models.clear()
        await asyncio.sleep(0)
        triton.lives += 1
        triton.live, server.pid = True, triton.lives
        server.live.clear()
        await self.house.control.triton_restarted()

    async def reconcile(self) -> None:
        await self.house.control.reconcile()

    async def look_at_memory(self) -> None:
        await self.house.control.memory.tick({ModelId(self.random.choice(NAMES))})

    async def lose_or_find_memory(self) -> None:
        self.house.memory.limit_bytes = self.random.choice([None, 1000 * MIB])

    # -- how it goes ------------------------------------------------------------------------

    async def one(self) -> None:
        acts = [
            *(self.load, self.load, self.load, self.unload, self.unload, self.infer),
            *(self.look_at_memory, self.reconcile, self.restart, self.lose_or_find_memory),
        ]
        (act,) = self.random.choices(acts, weights=[6, 6, 6, 6, 6, 6, 2, 1, 1, 1])
        with suppress(Exception):
            await act()

    async def play(self) -> None:
        await self.house.open()
        self.steps.is_calm = False
        callers = []
        for _ in range(30):
            callers.append(self.house.begin(self.one()))
            if self.random.random() < 0.05:
                callers[-1].cancel()  # whoever asked may leave
            for _ in range(self.random.choice([0, 0, 1, 3, 10])):
                await asyncio.sleep(0)
            if self.random.random() < 0.1:
                await asyncio.sleep(0.01)
        _, left = await asyncio.wait(callers, timeout=_MOST_SECONDS)
        assert not left
        await self.house.ended()
        await asyncio.gather(*self.house.control.memory._measurements, return_exceptions=True)
        self.steps.is_calm = True

    def check_rest(self) -> None:
        control = self.house.control
        # one whose return was broken off waits until Triton is looked at again, and holds nothing
        known = control.registry.records()
        records = [record for record in known if record.state is not ModelState.RETURNING]
        assert control.operations.in_flight == 0
        assert {r.state for r in records} <= {ModelState.READY, ModelState.DEAD}
        assert all(r.in_flight == 0 for r in records)
        assert not control.memory.is_busy
        book = control.memory.ledger.snapshot()
        stuck, held = len(control.registry.stuck), sum(self.house.held(r.id) for r in records)
        assert book.reserved_bytes == 0
        assert len(records) <= book.models <= len(records) + stuck
        # Triton may hold memory for what it is stuck with
        assert book.held_bytes >= held if stuck else book.held_bytes == held

    async def check_all_goes_on(self) -> None:
        """Once nothing fails any more each model can be loaded, and nothing is left of it. But for
        folders that the disk refused to remove: those the next start sweeps away.
        """
        self.house.memory.limit_bytes = 1000 * MIB
        await self.restart()
        await self.house.quiet()
        for record in self.house.control.registry.records():
            await self.house.unload(record.id)
        for name in NAMES:
            await self.house.load(name)
            await self.house.unload(name)
        assert self.house.control.registry.records() == []
        assert self.house.triton.models == set()
        self.check_rest()
        await self.house.close()


def play_all(monkeypatch: pytest.MonkeyPatch, random: Random) -> Crowd:
    async def whole() -> Crowd:
        crowd = Crowd(random, monkeypatch)
        await crowd.play()
        crowd.check_rest()
        await crowd.check_all_goes_on()
        return crowd

    return asyncio.run(whole())


# A seed and not hypothesis' own randomness: threads and timers make each play its own.
any_order = settings(
    max_examples=10,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@any_order
@given(seed=st.integers(0, 2**32))
def test_after_a_bug_at_any_step_nothing_is_left_behind(monkeypatch, seed):
    play_all(monkeypatch, Random(seed))
