"""One run: a machine with a Triton, adapters one after the other, their callers, and the faults."""

import asyncio
import gc
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from adapter.errors import AdapterError
from adapter.runtime import background
from tests.simulation.callers import Callers
from tests.simulation.control import Control, KnownModel, Machine
from tests.simulation.disk import SimDisk
from tests.simulation.endpoint import Endpoint
from tests.simulation.endpoint_callers import EndpointCallers
from tests.simulation.kills import ADAPTER, Adapter, Guarded, Killed
from tests.simulation.loop import Draws, Standstill, ignore_unawaited, virtual
from tests.simulation.memory import Reader, Truth
from tests.simulation.models import Spec, Violated
from tests.simulation.oracle import Oracle
from tests.simulation.outages import Outages
from tests.simulation.plan import Plan, Settings
from tests.simulation.processes import SimServer
from tests.simulation.story import Outcome, Story
from tests.simulation.triton import LOAD_THREADS, Held, Life, SimTriton
from tests.simulation.v2_callers import V2Callers

_START_SECONDS = (0.5, 2.0)
_ROUNDS = 100  # of cancelling, until the last has given up
_QUIET_SECONDS = 1500.0  # within which all comes to rest once nothing fails any more


class World(Outages):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.draws = Draws(plan.seed)
        self._loop = asyncio.get_running_loop()
        self.story = Story(self._loop.time)
        self.truth = Truth(plan.device_bytes, plan.baseline, plan.more_gpus)
        self.specs = {spec.url: spec for spec in plan.models.values()}
        self.specs |= {f"/models/{name}": spec for name, spec in plan.models.items()}
        self.newest = dict(plan.models)
        for spec in plan.catalog.specs() if plan.catalog else ():
            self.specs[spec.url] = spec
            self.newest.setdefault(spec.model_id, spec)
        self._set_faults: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        self.faults: Counter[str] = Counter()
        self.disk = SimDisk(self.specs, self.draws, self.take_fault)
        self.oracle = Oracle(self)
        self.triton = SimTriton(
            self.truth,
            self.draws,
            spec_at=self.disk.spec_at,
            fault=self.take_fault,
            note=self._noted,
            unload_begins=self.judged(self.oracle.unload_begins),
            loads_again=self.judged(self.oracle.loads_again),
        )
        self.reader = Reader(plan.reader, self.truth, self.draws)
        self.triton.gpu_at = self.disk.gpu_at
        self.triton.is_gpu = plan.reader != "host"
        self.is_embedded = plan.is_embedded
        self.disk.admitted = self.judged(self.oracle.admitted)
        self.triton.exits = self.oracle.note_exit
        self.endpoint: Endpoint | None = None  # of the adapter that runs
        self._site = Endpoint(self, plan.catalog) if plan.catalog else None
        if self._site is not None:
            self.disk.cached = self.judged(self._site.spec_at)
            self.disk.read = self.judged(self._site.read_by_triton)
            self.story.hidden = str(self._site.root)
        self.story.on_log_line = self.judged(self._note_log_line)
        self.violation: Violated | None = None
        self._violated = asyncio.Event()
        self.control: Control | None = None
        self._begun: list[tuple[Adapter, Control]] = []
        self._carried: dict[str, Spec] = {}
        self._served_by: Life | None = None
        self._loop.set_exception_handler(self._unseen)
        self._tasks: set[asyncio.Task[Any]] = set()

    def _note_log_line(self, event: str, fields: dict[str, object]) -> None:
        """An adapter that lives has written this line."""
        if (what := _LOGGED.get(event)) is not None:
            self.oracle.happened(what, str(fields["model_id"]))
        if event == "model.loaded":
            self.oracle.note_loaded(str(fields["model_id"]))
        # a return is given up for other reasons, too
        has_ended = "Triton has ended again" in str(fields.get("reason"))
        if event == "model.given_up" or has_ended:
            self.oracle.given_up(str(fields["model_id"]))
        if self._site is not None:
            self._site.oracle.note_log_line(event, fields)

    # -- what the oracle asks ---------------------------------------------------------------

    @property
    def now(self) -> float:
        return self._loop.time()

    @property
    def is_up(self) -> bool:
        return self.triton.life is not None and self.triton.live

    def all_held(self) -> list[Held]:
        return [*self.triton.life.models.values()] if self.triton.life else []

    def held_of(self, model_id: str) -> list[Held]:
        return [held for held in self.all_held() if held.spec.model_id == model_id]

    def arriving(self) -> list[Held]:
        return [held for held in self.all_held() if held.state == "LOADING"]

    def stuck_names(self) -> set[str]:
        """Return what the adapter has given up, until Triton has done with it."""
        return {name for model in self.known_models("STUCK") for name in model.names}

    def known_models(self, *states: str) -> list[KnownModel]:
        """Return the models that the adapter has in one of these states; without any, all."""
        known = self.control.known_models() if self.control is not None else []
        return [model for model in known if not states or model.state in states]

    def strayed_bytes(self) -> int:
        """Return the bytes of strangers, of processes that have outlived their model, and of loads
        that never end.
        """
        known = {each.process.key for each in self.all_held() if not each.never_ends}
        known.add("baseline")
        return sum(count for holder, count in self.truth.held.items() if holder not in known)

    def bytes_of(self, held: Held) -> int:
        return self.truth.held.get(held.process.key, 0)

    def processes_of(self, model_id: str) -> list[object]:
        folders = self.disk.folders.values()
        owned = [each for each in folders if each.model_id.partition("#")[0] == model_id]
        return self.triton.processes.of(model_id, *(n for e in owned for n in e.placement.names))

    def new_version(self, name: str) -> None:
        """Somebody puts other files in place of the model's."""
        old = self.newest[name]
        new = replace(old, version=old.version + 1, takes=int(old.takes * 0.9))
        self.newest[name] = self.specs[new.url] = self.specs[f"/models/{name}"] = new

    # -- faults -----------------------------------------------------------------------------

    def take_fault(self, verb: str, model_id: str) -> str | None:
        """Return the fault that is set for the next such act, which happens now."""
        waiting = self._set_faults.get((verb, model_id))
        if not waiting:
            return None
        fault = waiting.pop(0)
        self._noted(f"{verb} of {model_id}: {fault}")
        self.oracle.happened(verb, model_id)
        self.oracle.happened("load hangs" if fault == "hang" else fault, model_id)
        self.faults[f"{verb}: {fault}"] += 1
        return fault

    def _noted(self, event: str, **fields: object) -> None:
        self.story.note(event, **fields)
        if event.startswith("out of memory"):
            held = self.triton.held(str(fields["name"]))
            self.oracle.happened("out of memory", held.spec.model_id if held else "")
        if event == "a process dies in a load":
            held = self.triton.held(str(fields["name"]))
            self.oracle.happened("stub dies", held.spec.model_id)

    def judged(self, judge: Callable[..., Any]) -> Callable[..., Any]:
        """Return it with what it finds wrong told to the run, not to who calls it."""

        def judged(*args: object) -> Any:
            try:
                return judge(*args)
            except Violated as found:
                self.violate(found)
                return None

        return judged

    async def _keep_triton(self) -> None:
        """Start Triton again whenever it has exited, and tell the adapter."""
        random = self.draws.of("supervisor")
        while True:
            self.triton.start()
            life = self.triton.life
            await asyncio.sleep(random.uniform(*_START_SECONDS))
            if self.triton.life is life:
                self.triton.answers()
            await life.over.wait()
            self.oracle.happened("end")
            self.story.note("triton ended")
            await asyncio.sleep(random.choice((0.3, 1.0, 5.0)))

    # -- tasks ------------------------------------------------------------------------------

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task of the world, or of a caller. An error of it ends the run."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def begin_call(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin in the context of the adapter what a caller awaits."""
        return self._adapters.run(asyncio.ensure_future, work)

    def begin_of_adapter(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._adapters.run(self.begin, work)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or isinstance(error, Killed):
            return
        found = error if isinstance(error, Violated) else Violated("0 simulator", repr(error))
        if not isinstance(error, Violated):
            found.__cause__ = error
        self.violate(found)

    def _unseen(self, _: asyncio.AbstractEventLoop, about: dict[str, Any]) -> None:
        error = about.get("exception")
        if not isinstance(error, Killed | AdapterError):
            self.story.bugs.append(f"{about['message']}: {error!r}")

    def violate(self, found: Violated) -> None:
        if self.violation is None:
            self.violation = found
            self.story.note(f"oracle: {found}")
            self._violated.set()

    # -- a shift ----------------------------------------------------------------------------

    def _new_adapter(self, number: int, settings: Settings) -> tuple[Adapter, Control]:
        adapter = Adapter()
        self._adapters = copy_context()
        self._adapters.run(ADAPTER.set, adapter)
        self.triton.load_seconds = settings.load_seconds
        server = None
        if self.is_embedded:
            server = SimServer(self.triton, self.draws, self._restart)
            server = Guarded(server, adapter)
        self.endpoint = None if settings.is_v2 else self._site
        terms = artifacts = None
        if self.endpoint is not None:
            terms = self.plan.catalog.terms[number]
            artifacts = self._adapters.run(self.endpoint.new_cache, terms)
        machine = Machine(
            triton=Guarded(self.triton, adapter),
            disk=Guarded(self.disk, adapter),
            memory=Guarded(self.reader, adapter),
            server=server,
            processes=server,
            artifacts=artifacts,
        )
        control = self._adapters.run(Control, machine, settings, terms)
        if self.endpoint is not None:
            self.endpoint.new_adapter(control)
        return adapter, control

    def _restart(self, reason: str) -> None:
        self.story.note("the adapter restarts triton", reason=reason)
        self.oracle.happened("restart")
        self.triton.end()

    async def _shift(self, number: int, settings: Settings) -> None:
        self.story.note(f"adapter {number} starts")
        adapter, control = self._new_adapter(number, settings)
        self.oracle.new_adapter(settings)
        await self.triton.up.wait()
        if self.endpoint is not None:
            await self.begin_call(self.endpoint.cache.open())
        await self._opened(control)
        self.oracle.happened("opened")
        self.control = control
        if self.triton.life is self._served_by:
            self.oracle.serving.update(self._carried)
        self._begun.append((adapter, control))
        callers = [(V2Callers if settings.is_v2 else Callers)(self, control)]
        if self.endpoint is not None:
            callers.append(EndpointCallers(self, control, self.endpoint))
        begun = self.now
        for entry in (each for each in self.plan.entries if each.shift == number):
            await self._wait_until(begun + entry.at)
            if not any(each.play(entry) for each in callers):
                self.play_fault(entry)
        if settings.is_killed and self.draws.of("kill", number).random() < 0.5:
            self._kill(adapter, control)
        else:
            await self._quiet(control, callers)
            await self._stop(adapter, control, settings)
        control.end()
        for each in callers:
            each.leave()

    async def _opened(self, control: Control) -> None:
        """Try the start until Triton answers, as the adapter does."""
        while True:
            try:
                await self.begin_call(control.open())
            except AdapterError:
                await asyncio.sleep(0.5)
            else:
                return

    def _carry(self) -> None:
        """Remember what the next adapter has to adopt, if Triton goes on meanwhile."""
        self._carried = dict(self.oracle.serving)
        self._served_by = self.triton.life

    async def _wait_until(self, moment: float) -> None:
        if moment > self.now:
            await asyncio.sleep(moment - self.now)

    async def _quiet(self, control: Control, callers: list[Callers]) -> None:
        """Let the faults stop, wait until all has come to rest, and look at everything."""
        self.stop_faults()
        self.story.note("faults stop")
        end = self.now + _QUIET_SECONDS
        if not self.is_embedded and sum(h.never_ends for h in self.all_held()) >= LOAD_THREADS:
            end += len(self.newest) * self.oracle.settings.load_seconds  # nothing loads any more
        await self._rested(control, callers, end, 5.0)
        if self.violation is None and (left := sum(each.count for each in callers)):
            raise Violated("2 in time", f"{left} calls are never answered")
        await asyncio.sleep(5.0)
        # the adapter may have looked for other versions
        await self._rested(control, callers, end, 0.5)
        self.oracle.rest(control)
        if self.endpoint is not None:
            self.endpoint.oracle.rest(self.oracle.endless_loads())
            await callers[-1].all_answer()
            await self._rested(control, callers, self.now + _QUIET_SECONDS, 1.0)
            self.endpoint.oracle.rest(self.oracle.endless_loads())

    async def _rested(
        self, control: Control, callers: list[Callers], end: float, pause: float
    ) -> None:
        while self.now < end:
            await asyncio.sleep(pause)
            if self.is_up and self._is_at_rest(control, callers):
                return

    def _is_at_rest(self, control: Control, callers: list[Callers]) -> bool:
        if self.endpoint is not None and not self.endpoint.oracle.is_at_rest():
            return False
        is_called = any(each.count for each in callers)
        is_reserved = self.has_reservations(control)
        if is_called or is_reserved or control.state.pending_operations:
            return False
        if not all(held.never_ends for held in self.arriving()):
            return False
        loading = {held.name for held in self.arriving()}
        if any(loading.isdisjoint(model.names) for model in self.known_models("STUCK")):
            return False
        states = {model.state for model in self.known_models()}
        return states <= {"READY", "DEAD", "STUCK"} and self.truth.held.get("strangers", 0) == 0

    def has_reservations(self, control: Control) -> bool:
        """Return whether more is reserved than for loads that are stuck, which some count so."""
        stuck = [model.record for model in self.known_models("STUCK")]
        return any(
            shown.reserved_bytes
            > sum(control.state.held(record).get(device, 0) for record in stuck)
            for device, shown in control.state.devices().items()
        )

    async def _stop(self, adapter: Adapter, control: Control, settings: Settings) -> None:
        self._carry()
        self.oracle.happened("stop")
        if settings.is_killed:
            self._kill(adapter, control)
            return
        self.story.note("adapter stops")
        self.control = None
        await self.begin_call(control.stop())
        if self.endpoint is not None:
            await self.begin_call(self.endpoint.cache.close())
        adapter.is_running = False
        if self.is_embedded:
            self.triton.end()

    def _kill(self, adapter: Adapter, control: Control) -> None:
        self._carry()
        self.story.note("adapter killed")
        adapter.is_running = False
        self.control = None
        control.end()
        if self.endpoint is not None:
            self.begin_of_adapter(self.endpoint.killed())
        if self.is_embedded:  # which ends with it
            self.triton.end()

    async def play(self) -> None:
        keeping = self.begin(self._keep_triton())
        ended = asyncio.ensure_future(self._violated.wait())
        work = self.begin(self._shifts())
        await asyncio.wait([work, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in (keeping, ended, work):
            task.cancel()

    async def close(self) -> None:
        """End all that still goes on, adapters too; whatever they do has no effect any more."""
        if self.violation is not None:
            ignore_unawaited()
        if self._site is not None:
            self._site.close()
        for adapter, control in self._begun:
            adapter.is_running = False
            control.end()
        for _ in range(_ROUNDS):
            if not (others := asyncio.all_tasks() - {asyncio.current_task()}):
                return
            for task in others:
                background.end(task)  # whoever began it
            await asyncio.sleep(1.0)

    async def _shifts(self) -> None:
        for number, settings in enumerate(self.plan.shifts):
            await self._shift(number, settings)
            await asyncio.sleep(self.draws.of("night").choice((1.0, 3600.0)))


def played(plan: Plan) -> Outcome:
    """Play the run in virtual time."""
    worlds: list[World] = []
    log = logging.getLogger("adapter")
    before = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    gc.collect()
    gc.disable()
    try:
        with virtual(Draws(plan.seed)) as run:
            run(_played(plan, worlds))
    except Standstill as error:
        [world] = worlds
        world.violation = world.violation or Violated(
            "2 in time", f"the day goes on and on: {error}"
        )
    finally:
        gc.enable()
        log.level, log.propagate = before
        for each in worlds:
            log.removeHandler(each.story)
    [world] = worlds
    operations = sum(n for event, n in world.story.counts.items() if event in _OPERATIONS)
    return Outcome(plan, world.story, world.violation, operations, world.faults)


async def _played(plan: Plan, worlds: list[World]) -> None:
    world = World(plan)
    worlds.append(world)
    logging.getLogger("adapter").addHandler(world.story)
    try:
        await world.play()
    finally:
        await world.close()


# What the oracle hears of the log: also of what is done for a caller who has left.
_LOGGED = {
    "model.loading": "load begun",
    "model.unload_failed": "unload failed",
    "model.load_stuck": "given up",
    "model.load_ended": "load cut",
}
_OPERATIONS = ("model.loading", "model.unloading", "call")
