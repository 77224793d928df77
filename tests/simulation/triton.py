"""A Triton in virtual time, with what docs/design/triton.md saw it do: the Triton of
adapter/control/ports.py. Its processes are in processes.py.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from adapter.core.triton_input import Unclassified
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    LoadFailed,
    MemoryFigures,
    ModelNotFound,
    OutOfMemory,
    StubDied,
)
from tests.simulation.loop import Draws, turns
from tests.simulation.memory import MIB, Truth
from tests.simulation.models import Spec, steps_of
from tests.simulation.processes import Process, Processes

CALL_SECONDS, _UNLOAD_SECONDS = 10.0, 350.0
LOAD_THREADS = 4
_POLL_FIRST_SECONDS, _POLL_LAST_SECONDS = 0.01, 0.1
_LEAK_BYTES = 2 * MIB


@dataclass(slots=True, eq=False)
class Held:
    """Is what Triton has under one name."""

    name: str
    spec: Spec
    process: Process
    state: str = "LOADING"
    in_flight: int = 0
    of_callers: int = 0  # of those in flight
    unloading_since: float = 0.0
    never_ends: bool = False  # its load
    gpu: int = 0
    # set when the load was answered, or the model is gone
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Life:
    """One process of tritonserver, from its start to its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.over = asyncio.Event()
        self.threads = asyncio.Semaphore(LOAD_THREADS)
        self.models: dict[str, Held] = {}


class SimTriton:
    """Loads, unloads and answers as Triton does."""

    def __init__(
        self,
        truth: Truth,
        draws: Draws,
        *,
        spec_at: Callable[[str], Spec | None],  # the files under a name in the repository
        fault: Callable[[str, str], str | None],  # takes the one that is set for such an act
        note: Callable[..., None],
        unload_begins: Callable[[Held], None],
        loads_again: Callable[[Held], None],
    ) -> None:
        self.truth = truth
        self._draws = draws
        self._spec_at = spec_at
        self._fault = fault
        self._note = note
        self._unload_begins = unload_begins
        self._loads_again = loads_again
        self.processes = Processes(truth, draws)
        self.load_seconds = 60.0  # time limit of the adapter's calls
        self.is_gpu = False  # whether models take memory of GPUs
        self.reports = draws.of("memory tracker").random() < 0.5
        self.live = False
        self.lives = 0
        self.version = "2.51.0"
        self.life: Life | None = None
        self.up = asyncio.Event()
        self.hung_until = 0.0
        self.gpu_at: Callable[[str], int] = lambda _: 0  # for which the name's files are
        self.exits: Callable[[Iterable[Held]], None] = lambda _: None
        self._count = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- its process ------------------------------------------------------------------------

    def start(self) -> None:
        self._count += 1
        self.life = Life(self._count)
        self.hung_until = 0.0

    def answers(self) -> None:
        """It answers the probes again."""
        self.live = True
        self.lives = self.lives + 1
        self.up.set()

    def end(self) -> None:
        """It ends, with all models and processes."""
        life = self.life
        if life is not None:
            self.exits(life.models.values())
        self.life = None
        self.live = False
        self.up.clear()
        if life is not None:
            self.processes.end_all()
            for held in life.models.values():
                held.ended.set()
            for holder in [h for h in self.truth.held if h not in {"baseline", "strangers"}]:
                self.truth.set(holder, 0)
            self.truth.restarted()
            life.over.set()

    def held(self, name: str) -> Held | None:
        return self.life.models.get(name) if self.life else None

    async def _asked(self, verb: str, name: str = "") -> Life:
        """Return the life that the call has reached, some time later."""
        random = self._draws.of("triton", verb, name)
        await turns(random)
        if random.random() < 0.3:
            await asyncio.sleep(random.choice((0.001, 0.005, 0.05)))
        if (life := self.life) is None:
            raise BackendUnavailable("failed to connect to all addresses", delivered=False)
        if (hung := self.hung_until - _now()) > 0:
            await self._either(life.over, min(hung, CALL_SECONDS))
            if not life.over.is_set() and hung > CALL_SECONDS:
                raise BackendTimeout(f"Triton did not answer within {CALL_SECONDS:g} s")
        if life.over.is_set():
            raise BackendUnavailable("Socket closed", delivered=True)
        return life

    async def _either(self, event: asyncio.Event, seconds: float | None) -> bool:
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _go(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Triton goes on with it, whatever its caller does."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- loads ------------------------------------------------------------------------------

    async def load(self, name: str, model_id: str) -> None:
        life = await self._asked("load", name)
        load = self._go(self._load(life, name))
        over = self._go(life.over.wait())
        is_lost = self._fault("answer", model_id)
        try:
            first = asyncio.FIRST_COMPLETED
            limit = 1.0 if is_lost else self.load_seconds
            await asyncio.wait([load, over], timeout=limit, return_when=first)
        finally:
            over.cancel()
        if load.done():
            if (error := load.result()) is not None:
                raise error
            return
        if is_lost or life.over.is_set():
            raise BackendUnavailable("Socket closed", delivered=True)
        raise BackendTimeout(f"Triton did not answer within {self.load_seconds:g} s")

    async def _load(self, life: Life, name: str) -> AdapterError | None:
        async with life.threads:
            if life.over.is_set():
                return BackendUnavailable("Socket closed", delivered=True)
            if (spec := self._spec_at(name)) is None:
                return LoadFailed("failed to poll from model repository")
            old = life.models.get(name)
            if old is not None and old.state == "READY" and old.spec == spec:
                return None
            entries = [self._entry(life, each) for each in [*steps_of(name, spec), name]]
            error = await self._initialized(life, entries)
            if error is not None and not life.over.is_set():
                for held in entries:
                    self._drop(life, held)
            return error

    async def _initialized(self, life: Life, entries: list[Held]) -> AdapterError | None:
        try:
            for held in entries:
                if (error := await self._initialize(life, held)) is not None:
                    return error
        finally:
            for held in entries:
                held.ended.set()
        return None

    def _entry(self, life: Life, name: str) -> Held:
        """Begin to load what is under this name, in place of what was."""
        old = life.models.get(name)
        if old is not None and old.state == "UNLOADING":
            self._loads_again(old)
        if old is not None and old.state == "READY":
            self.processes.end(old.process)
        spec = self._spec_at(name)
        held = life.models[name] = Held(name, spec, self.processes.start(name, spec))
        held.gpu = self.truth.gpu_of[held.process.key] = self.gpu_at(name)
        return held

    def _with_steps(self, life: Life, held: Held) -> list[Held]:
        steps = [life.models.get(each) for each in steps_of(held.name, held.spec)]
        return [held, *(each for each in steps if each is not None)]

    async def _initialize(self, life: Life, held: Held) -> AdapterError | None:
        spec, random = held.spec, self._draws.of("initialize", held.name)
        fault = self._fault("load", spec.model_id)
        seconds = spec.seconds * random.uniform(0.5, 2.0)
        if fault == "slow":
            seconds += self.load_seconds * random.choice((0.5, 1.5))
        parts = random.choice((1, 1, 2, 3))
        for part in range(parts):
            if fault is not None and fault != "slow" and part == parts - 1:
                return await self._failed(life, held, fault)
            await self._either(held.process.over, seconds / parts)
            if life.over.is_set():
                return BackendUnavailable("Socket closed", delivered=True)
            if held.process.over.is_set():
                return await self._stub_ended(life, held)
            count = spec.takes * (part + 1) // parts - spec.takes * part // parts
            if not self.truth.has_room(held.process.key, count):
                return await self._out_of_memory(life, held, count, random)
            self.truth.add(held.process.key, count)
        held.state = "READY"
        return None

    async def _failed(self, life: Life, held: Held, fault: str) -> AdapterError | None:
        name = held.name
        if fault == "exit":
            self._note("triton ends in a load", name=name)
            self.end()
            return BackendUnavailable("Socket closed", delivered=True)
        held.never_ends = fault in {"hang", "stub dies"}
        if fault == "hang":
            await self._any(life.over, held.process.over)
            if not life.over.is_set():
                return await self._stub_ended(life, held)
        elif fault == "stub dies" and held.spec.is_python:
            self._note("a process dies in a load", name=name)
            self.processes.end(held.process)
            await life.over.wait()
        if life.over.is_set():
            return BackendUnavailable("Socket closed", delivered=True)
        self._drop(life, held)
        self.truth.add("baseline", _LEAK_BYTES)
        return LoadFailed("Internal: no weights", model_id=held.spec.model_id)

    async def _any(self, *events: asyncio.Event, seconds: float | None = None) -> None:
        waits, first = [self._go(each.wait()) for each in events], asyncio.FIRST_COMPLETED
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=first)
        finally:
            for each in waits:
                each.cancel()

    async def _stub_ended(self, life: Life, held: Held) -> AdapterError:
        await self._either(life.over, 1.0)
        self._drop(life, held)
        text = f"Stub process '{held.name}_0_0' is not healthy."
        return LoadFailed(text, model_id=held.spec.model_id, suspected=text)

    async def _out_of_memory(
        self, life: Life, held: Held, count: int, random: Random
    ) -> AdapterError:
        free = self.truth.sizes[held.gpu] - self.truth.used_on(held.gpu)
        self._note("out of memory", name=held.name, bytes=count, free=free)
        if held.spec.is_python and random.random() < 0.3:
            self.processes.end(held.process)
            return await self._stub_ended(life, held)
        self._drop(life, held)
        return OutOfMemory(
            f"CUDA out of memory. Tried to allocate {count} bytes",
            model_id=held.spec.model_id,
            figures=MemoryFigures(needed_bytes=count, free_bytes=free),
            was_tried=True,
        )

    def _drop(self, life: Life, held: Held) -> None:
        self.processes.end(held.process)
        if life.models.get(held.name) is held:
            del life.models[held.name]

    # -- unloads ----------------------------------------------------------------------------

    async def gpu_bytes(self, name: str) -> dict[int, int]:
        """Half of all worlds have a Triton with a memory tracker, which sees no python model."""
        await self._asked("statistics", name)
        held = self.held(name)
        if held is None or held.spec.is_python or not self.reports:
            return {}
        return {held.gpu: self.truth.held.get(held.process.key, 0)}

    async def unclassified(self, _: str) -> Unclassified:
        return Unclassified(frozenset(), frozenset())

    async def unload(self, name: str, model_id: str) -> None:
        life = await self._asked("unload", name)
        held = life.models.get(name)
        if held is None:
            return
        if held.state == "LOADING":
            await self._any(held.ended, life.over, seconds=_UNLOAD_SECONDS)
            if not held.ended.is_set() and not life.over.is_set():
                raise BackendTimeout(f"Triton did not answer within {_UNLOAD_SECONDS:g} s")
            if life.over.is_set():
                raise BackendUnavailable("Socket closed", delivered=True)
        if held.state == "READY":
            self._unload_begins(held)
            entries = [h for h in self._with_steps(life, held) if h.state == "READY"]
            for each in entries:
                each.state = "UNLOADING"
                each.unloading_since = _now()
            self._go(self._unload_all(life, entries))

    async def _unload_all(self, life: Life, entries: list[Held]) -> None:
        for held in entries:
            await self._unload(life, held)

    async def _unload(self, life: Life, held: Held) -> None:
        random = self._draws.of("unload", held.name)
        fault = self._fault("unload", held.spec.model_id)
        while held.in_flight and not life.over.is_set():
            held.idle.clear()
            await self._any(held.idle, life.over)
        slow = random.uniform(15, 50) if fault == "slow" else 0.0
        seconds = random.choice((0.02, 0.2, 0.8)) + slow
        if not held.process.is_real or not held.process.over.is_set():
            await self._either(held.process.over, seconds)
        if life.over.is_set():
            return
        if life.models.get(held.name) is not held:  # its name was loaded again meanwhile
            self.processes.end(held.process)
            return
        if held.process.over.is_set():
            return  # UNLOADING until its name is loaded again
        del life.models[held.name]
        if fault == "survives" and held.process.is_real:
            self._note("a process survives the unload", name=held.name)
            return
        # the memory of a host's process is free when it has ended
        is_late = fault == "late" and (not held.process.is_real or self.is_gpu)
        late = random.uniform(0.5, 4.0) if is_late else 0.0
        self.processes.end(held.process, late=late)

    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]:
        deadline, pause = _now() + seconds, _POLL_FIRST_SECONDS
        while left := {n for n in names if n in (await self._asked("index")).models}:
            if _now() + pause > deadline:
                return left
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST_SECONDS)
        return set()

    # -- the index --------------------------------------------------------------------------

    async def ready(self) -> set[str]:
        return await self._list_names("READY")

    async def being_loaded(self) -> set[str]:
        return await self._list_names("LOADING")

    async def present(self) -> set[str]:
        return await self._list_names("READY", "LOADING", "UNLOADING")

    async def _list_names(self, *states: str) -> set[str]:
        """Return what was so when it was asked, which may be otherwise when the answer arrives."""
        life = await self._asked("index")
        found = {name for name, held in life.models.items() if held.state in states}
        random = self._draws.of("index")
        await turns(random)
        if random.random() < 0.1:
            await self._either(life.over, random.choice((0.05, 0.5)))
        if life.over.is_set():
            raise BackendUnavailable("Socket closed", delivered=True)
        return found

    # -- inferences -------------------------------------------------------------------------

    async def warm_up(self, name: str, model_id: str, seconds: float) -> str | None:
        await asyncio.shield(self._go(self._infer(name, model_id, is_ours=True)))
        return None

    async def infer(self, name: str, model_id: str) -> Spec:
        """Return what has answered. Goes on when its caller leaves."""
        return await asyncio.shield(self._go(self._infer(name, model_id)))

    async def _infer(self, name: str, model_id: str, *, is_ours: bool = False) -> Spec:
        life = await self._asked("infer", name)
        held = life.models.get(name)
        if held is None or held.state != "READY":
            raise ModelNotFound(f"Request for unknown model: '{name}' is not found")
        random = self._draws.of("infer", name)
        held.in_flight += 1
        held.of_callers += not is_ours
        try:
            await self._either(life.over, random.choice((0.0, 0.01, 0.01, 0.1, 0.5, 6.0)))
            if life.over.is_set():
                raise BackendUnavailable("Socket closed", delivered=True)
            for each in self._with_steps(life, held):
                if each.process.is_real and each.process.over.is_set():
                    await self._either(life.over, 1.0)
                    text = f"Stub process '{each.name}_0_0' is not healthy."
                    raise StubDied(text, model_id=model_id)
            self._grow(held, random)
            if not is_ours and (fault := self._fault("infer", held.spec.model_id)) is not None:
                raise self._make_error(fault, model_id)
            return held.spec.package
        finally:
            held.in_flight -= 1
            held.of_callers -= not is_ours
            if not held.in_flight:
                held.idle.set()

    def _make_error(self, fault: str, model_id: str) -> AdapterError:
        if fault == "echo":
            text = "input 'CUDA out of memory. Tried to allocate 1 bytes' is unknown"
            figures = MemoryFigures(needed_bytes=1)
            return OutOfMemory(text, model_id=model_id, figures=figures, matched="out of memory")
        return InferenceFailed("division by zero", model_id=model_id)

    def _grow(self, held: Held, random: Random) -> None:
        grown = self.truth.held.get(held.process.key, 0) - held.spec.takes
        if grown >= held.spec.grows or random.random() < 0.5:
            return
        count = min(held.spec.grows - grown, held.spec.grows // 2 + 1)
        if self.truth.has_room(held.process.key, count):
            self.truth.add(held.process.key, count)
            return
        self._note("out of memory in an inference", name=held.name)
        raise OutOfMemory(
            f"CUDA out of memory. Tried to allocate {count} bytes",
            model_id=held.spec.model_id,
            figures=MemoryFigures(needed_bytes=count),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
