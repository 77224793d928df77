"""Ask the new rules of memory beside today's, at each of today's decisions in a simulated day.

A `Shadow` keeps a ledger of adapter.next.core for one adapter. It is fed with what happens in the
day: readings, loads and unloads that begin, end, fail or hang, and exits of Triton. Whenever
today's control decides about a load, the shadow decides as well. The world follows today's
decision, and so does the shadow's ledger: single decisions are compared, never their consequences.

Three kinds of decisions are compared:

    load     admit, wait, evict, 507, or 400 ModelTooLarge
    limit    end or undo a load that passes a limit which only the adapter enforces
    failure  what a failure of Triton was: 507, or what it seems

Where the answers differ, the world says what is true: whether the model would fit, now or after
memory was freed. Differences with the same answers, the same reason of the new one and the same
truth are one class. A load that waits is decided again and again, so each class counts the loads
beside the decisions.

This goes when today's control goes.
"""

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import adapter.control.memory as present_memory
import adapter.control.residency.eviction as present_eviction
from adapter.core import measuring
from adapter.core.admission import Answer as PresentAnswer
from adapter.core.memory import HOST, Bytes, Device, MemoryReading
from adapter.core.model import Package, TritonName
from adapter.core.oom import Strength, Verdict
from adapter.core.registry import ModelRecord
from adapter.core.residency.terms import Terms as LoadTerms
from adapter.core.residency.victims import FOR_NOW
from adapter.errors import (
    AdapterError,
    CapacityError,
    InsufficientMemory,
    ModelFailed,
    ModelTooLarge,
    OutOfMemory,
)
from adapter.next.core import times
from adapter.next.core.admission import (
    Answer,
    Candidate,
    Decision,
    LoadRequest,
    Purpose,
    decide,
    decide_place,
)
from adapter.next.core.evidence import (
    FailedInferences,
    Judgement,
    Outcome,
    Scene,
    judge_inference,
    judge_load,
)
from adapter.next.core.ledger import DeviceBook, Ledger, Overrun, limit_of
from adapter.next.core.sizes import UNSEEN, Need, Sizes
from adapter.runtime import clock
from tests.simulation.catalog import Terms
from tests.simulation.control import Machine, PresentControl
from tests.simulation.memory import MIB
from tests.simulation.models import SIZE_FACTOR
from tests.simulation.plan import Settings

if TYPE_CHECKING:
    from adapter.control.residency.eviction import Eviction

# Two events at one simulated moment have an order all the same.
_TICK_SECONDS = 1e-7
# The first reading that counts for a failed inference, before it.
_RECENT_SECONDS = 2.5
# ModelMesh keeps a tenth of the device free for loads (adapter/frontends/grpc/modelmesh_sizes.py).
_STRIP_SHARE = 10
_READINGS = 512
_EXAMPLES = 4
_NEW_ANSWERS = {
    Answer.ADMIT: "admit",
    Answer.TRY: "admit",
    Answer.WAIT: "wait",
    Answer.EVICT: "evict",
    Answer.INSUFFICIENT: "507",
    Answer.TOO_LARGE: "too large",
}
_NEW_OUTCOMES = {
    Outcome.OUT_OF_MEMORY: "507",
    Outcome.TOO_LARGE: "too large",
    Outcome.FAILED: "failure",
}
_TRUTHS = (
    "fits",
    "fits into the headroom",
    "fits once leaving memory is gone",
    "fits once models are evicted",
    "fits an emptied device",
    "never fits",
)


# -- what is counted ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Names a class of differences."""

    kind: str  # load, limit or failure
    today: str
    new: str
    reason: str  # of the new answer
    truth: str


@dataclass(slots=True)
class Members:
    """Counts the differences of a class, with a few examples."""

    decisions: int = 0
    loads: set[tuple[object, ...]] = field(default_factory=set)
    situations: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)


class Comparisons:
    """Counts decisions, and the classes of those that differ."""

    def __init__(self) -> None:
        self.decisions: Counter[str] = Counter()  # by kind, equal ones included
        self.loads: set[tuple[object, ...]] = set()
        self.classes: dict[Difference, Members] = {}

    def add(
        self,
        difference: Difference,
        load: tuple[object, ...],  # seed, adapter, name and number of the load
        situation: Sequence[str],
        figures: str,
    ) -> None:
        """Count a decision; its class too if the answers differ."""
        self.decisions[difference.kind] += 1
        self.loads.add(load)
        if difference.today == difference.new:
            return
        members = self.classes.setdefault(difference, Members())
        members.decisions += 1
        if load in members.loads:
            return
        members.loads.add(load)
        members.situations.update(situation)
        if len(members.examples) < _EXAMPLES:
            where = f"seed {load[0]}, {clock.monotonic():.3f} s, {load[2]}"
            members.examples.append(f"{where}: {figures}; {', '.join(situation)}")

    def lines(self) -> Iterator[str]:
        """Return a table of the classes, the largest first, with an example of each."""
        decisions = ", ".join(f"{count} {kind}" for kind, count in self.decisions.items())
        different = sum(members.decisions for members in self.classes.values())
        yield f"{self.decisions.total()} decisions ({decisions}) about {len(self.loads)} loads"
        yield f"{different} differ, in {len(self.classes)} classes"
        ordered = sorted(self.classes.items(), key=lambda item: -len(item[1].loads))
        for difference, members in ordered:
            yield (
                f"{len(members.loads):6} loads {members.decisions:7} decisions"
                f" | {difference.kind} | today {difference.today} | new {difference.new}"
                f" ({difference.reason}) | {difference.truth}"
            )
            common = members.situations.most_common(8)
            yield "        " + ", ".join(f"{name} {count}" for name, count in common)
            for example in members.examples:
                yield f"        {example}"


# -- what is asked ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Asked:
    """Holds what today's control is about to decide on."""

    shadow: "Shadow"
    record: ModelRecord
    package: Package
    terms: LoadTerms
    can_evict: bool
    devices: list[Device]  # to choose from; empty if the package leaves no choice


@dataclass(slots=True)
class _Refused:
    """Holds a refusal of today's control that an eviction may still prevent."""

    error: AdapterError
    asked: _Asked
    decision: Decision
    candidates: list[ModelRecord]


class _Patches:
    """Keeps what the patched functions of today's modules hand to each other."""

    def __init__(self) -> None:
        self.asked: _Asked | None = None
        self.chosen: list[Any] | None = None


_patches = _Patches()


@contextmanager
def shadowed() -> Iterator[None]:
    """Compare each decision of today's modules as long as the block runs."""
    choose_place = present_memory.choose_place
    choose_where = present_eviction.choose_where

    def choose_place_beside(model_id: Any, options: Any, terms: Any) -> Any:
        asked = _patches.asked
        _patches.asked = None
        try:
            answer = choose_place(model_id, options, terms)
        except AdapterError as error:
            if asked is not None:
                asked.shadow.compare_refusal(asked, error)
            raise
        if asked is not None:
            asked.shadow.compare_answer(asked, *answer)
        return answer

    def choose_where_beside(*args: Any) -> Any:
        chosen = choose_where(*args)
        _patches.chosen = chosen
        return chosen

    present_memory.choose_place = choose_place_beside
    present_eviction.choose_where = choose_where_beside
    try:
        yield
    finally:
        present_memory.choose_place = choose_place
        present_eviction.choose_where = choose_where


class ObservedReader:
    """Shows each reading to the shadow as well."""

    def __init__(self, reader: Any, observe: Callable[[MemoryReading | None], None]) -> None:
        self._reader = reader
        self._observe = observe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def read(self) -> MemoryReading | None:
        """Take a reading."""
        reading: MemoryReading | None = await self._reader.read()
        self._observe(reading)
        return reading


class Shadow:
    """Keeps the books of one adapter by the new rules, and compares decisions."""

    def __init__(self, comparisons: Comparisons, seed: int, number: int) -> None:
        self.comparisons = comparisons
        self.ledger = Ledger({})
        self._seed = seed
        self._number = number  # of the adapter
        self._time = 0.0
        self._loads: Counter[TritonName] = Counter()  # attempts
        self._started: dict[str, float] = {}  # by model id, when its load began to wait
        self._called: dict[str, float] = {}  # by model id, when the last call for it began
        self._situation: list[str] = []  # conditions under which today's control answered
        self._specs: dict[TritonName, Any] = {}  # of loads
        self._records: dict[TritonName, ModelRecord] = {}
        self._reported: dict[TritonName, Bytes] = {}
        self._overruns: dict[TritonName, Overrun | None] = {}  # of settled loads
        self._is_memory: dict[TritonName, bool] = {}  # of failed loads, by the new judgement
        self._evicted_for: set[str] = set()
        self._readings: deque[tuple[float, MemoryReading]] = deque(maxlen=_READINGS)
        self._failures = FailedInferences()
        self._killed = 0  # processes that were killed for memory before the last load
        self._refused: _Refused | None = None
        self._eviction: Eviction | None = None

    def watch(self, control: PresentControl, machine: Machine, settings: Settings) -> None:
        """Hook into a control that was just built, before it is opened."""
        self._machine = machine
        self._settings = settings
        self._control = control.models
        self._memory = control.models.memory
        stores = control.stores
        if stores is not None:
            self._eviction = stores.eviction
            self._wait_seconds = stores.options.model_wait_seconds
            self._waits = stores.waits
            self._watch_evictions(stores)
        self._watch_admission()
        self._watch_loads()
        self._watch_unloads()
        self._watch_limits()
        self._watch_failures()

    # -- time and readings ----------------------------------------------------------------------

    def now(self) -> float:
        """Return the time, later than at the last call."""
        self._time = max(clock.monotonic(), self._time + _TICK_SECONDS)
        return self._time

    def observe(self, reading: MemoryReading | None) -> None:
        """Take a reading into the ledger; None if there was none."""
        ledger = self.ledger
        if reading is not None:
            self._readings.append((clock.monotonic(), reading))
            self._open(reading)
            available = {}
            if HOST in reading.devices:
                figures = reading.devices[HOST]
                available[HOST] = figures.limit_bytes - figures.used_bytes
            ledger.observe(reading.used, self.now(), reading.lag_seconds, available)
        elif not ledger.devices and self._settings.memory_limit and self._is_blind:
            limit_bytes = self._settings.memory_limit
            book = DeviceBook(limit_bytes, self._settings.reserve)
            book.settled_bytes = ledger.booked(UNSEEN)  # adopted before
            ledger.devices[UNSEEN] = book
        ledger.advance(self.now())
        self._compare_growth()
        self._settle()

    @property
    def _is_blind(self) -> bool:
        return bool(self._machine.memory.kind == "off")

    def _open(self, reading: MemoryReading) -> None:
        for device, figures in reading.devices.items():
            if device not in self.ledger.devices:
                limit_bytes = limit_of(self._settings.memory_limit, figures.limit_bytes)
                book = DeviceBook(limit_bytes, self._settings.reserve, number=figures.index)
                self.ledger.devices[device] = book

    def _settle(self) -> None:
        for name in [*self.ledger.loads]:
            if self.ledger.can_settle(name):
                self._settle_one(name)

    def _settle_one(self, name: TritonName) -> None:
        settlement = self.ledger.settle(name, self._reported.pop(name, {}))
        self._overruns[name] = settlement.overrun

    # -- loads ----------------------------------------------------------------------------------

    def _watch_admission(self) -> None:
        memory = self._memory
        admit = memory.admit
        options = memory.placer.options

        async def admit_beside(record: ModelRecord, package: Package, *args: Any) -> Any:
            self._started.setdefault(str(record.id), self.now())
            try:
                return await admit(record, package, *args)
            finally:
                if not record.is_on_demand:
                    self._started.pop(str(record.id), None)

        def options_beside(
            record: ModelRecord,
            package: Package,
            terms: LoadTerms,
            inputs: Any,
            *args: Any,
            **kw: Any,
        ) -> Any:
            found = options(record, package, terms, inputs, *args, **kw)
            devices = [each.gpu.device for each, _ in found if each.gpu is not None]
            _patches.asked = _Asked(self, record, package, terms, inputs.can_evict, devices)
            return found

        memory.admit = admit_beside
        memory.placer.options = options_beside

    def _watch_loads(self) -> None:
        memory = self._memory
        loader = self._control._loader
        loaded = memory.loaded
        not_loaded = memory.not_loaded
        stuck = memory.stuck
        freed = memory.freed
        adopt = memory.adopt
        try_once = loader._try

        async def loaded_beside(record: ModelRecord, package: Package, usage: Any = ()) -> None:
            self._end_load(record, usage)
            await loaded(record, package, usage)

        async def not_loaded_beside(record: ModelRecord, *, is_stuck: bool) -> None:
            if not is_stuck:
                self._fail(record.name)
            await not_loaded(record, is_stuck=is_stuck)

        def stuck_beside(record: ModelRecord, held: Bytes) -> None:
            self._strand(record.name, held)
            stuck(record, held)

        def freed_beside(record: ModelRecord) -> None:
            self.ledger.free_stuck(record.name, self.now())
            freed(record)

        def adopt_beside(record: ModelRecord, held: Bytes) -> None:
            self._forget(record.name)
            self._records[record.name] = record
            self.ledger.adopt(record.name, record.package_key, held)
            adopt(record, held)

        async def try_beside(record: ModelRecord, estimate: Any) -> Any:
            self._killed = self._machine.triton.processes.killed_for_memory
            self._begin_again(record.name)
            return await try_once(record, estimate)

        memory.loaded = loaded_beside
        memory.not_loaded = not_loaded_beside
        memory.stuck = stuck_beside
        memory.freed = freed_beside
        memory.adopt = adopt_beside
        loader._try = try_beside

    def _begin_load(self, asked: _Asked, need: Need) -> None:
        name = asked.record.name
        self._forget(name)
        self._loads[name] += 1
        self._records[name] = asked.record
        self._specs[name] = self._machine.disk.specs[asked.package.content_key]
        self._started.pop(str(asked.record.id), None)
        self._evicted_for.discard(str(asked.record.id))
        self._is_memory.pop(name, None)
        self._overruns.pop(name, None)
        self.ledger.begin_load(name, need)

    def _begin_again(self, name: TritonName) -> None:
        """Begin once more what today's control tries again without another decision."""
        load = self.ledger.loads.get(name)
        if load is None or name not in self._is_memory:
            return
        # the last failure alone counts
        del self._is_memory[name]
        self.ledger.fail_load(name, self.now(), is_memory=False)
        self.ledger.begin_load(name, load.need)

    def _end_load(self, record: ModelRecord, usage: Any) -> None:
        name = record.name
        if name not in self.ledger.loads:
            return
        devices = self._memory.ledger.snapshot().devices
        reported = measuring.on_devices(usage, devices) if usage else None
        self._reported[name] = reported or {}
        self.ledger.end_load(name, self.now())
        self._settle()

    def _fail(self, name: TritonName) -> None:
        if name in self.ledger.loads:
            is_memory = self._is_memory.pop(name, False)
            self.ledger.fail_load(name, self.now(), is_memory=is_memory)
        elif name in self.ledger.models:
            self.ledger.begin_unload(name)
            self.ledger.end_unload(name, self.now())

    def _strand(self, name: TritonName, held: Bytes) -> None:
        if name in self.ledger.loads or name in self.ledger.unloads:
            self.ledger.strand(name)
        elif name in self.ledger.models:
            self.ledger.begin_unload(name)
            self.ledger.strand(name)
        elif name not in self.ledger.stuck:
            self.ledger.stuck[name] = held

    def _forget(self, name: TritonName) -> None:
        """Remove what the ledger has under a name that is used again."""
        self.ledger.free_stuck(name, self.now())
        self.ledger.end_unload(name, self.now())
        self._fail(name)

    # -- unloads and exits ----------------------------------------------------------------------

    def _watch_unloads(self) -> None:
        memory = self._memory
        unloading = memory.unloading
        begin_unload = memory.begin_unload
        unloaded = memory.unloaded
        restarted = self._control.triton_restarted

        @asynccontextmanager
        async def unloading_beside(record: ModelRecord) -> AsyncIterator[None]:
            async with unloading(record):
                try:
                    yield
                finally:
                    self._end_failed_unload(record)

        async def begin_unload_beside(record: ModelRecord) -> Any:
            reading = await begin_unload(record)
            self._begin_unload(record.name)
            return reading

        def unloaded_beside(record: ModelRecord) -> Bytes:
            if record.name in self.ledger.unloads:
                self.ledger.end_unload(record.name, self.now())
            elif record.name in self.ledger.models or record.name in self.ledger.loads:
                self._fail(record.name)
            return unloaded(record)

        async def restarted_beside() -> None:
            self._start_life()
            await restarted()

        memory.unloading = unloading_beside
        memory.begin_unload = begin_unload_beside
        memory.unloaded = unloaded_beside
        self._control.triton_restarted = restarted_beside

    def _begin_unload(self, name: TritonName) -> None:
        if name in self.ledger.loads:
            self._settle_one(name)
        if name in self.ledger.models:
            self._failures.clear(self.ledger.models[name].package_key)
            self.ledger.begin_unload(name)

    def _end_failed_unload(self, record: ModelRecord) -> None:
        """Book a model again whose unload has failed."""
        leaving = self.ledger.unloads.pop(record.name, None)
        if leaving is not None:
            self.ledger.adopt(record.name, record.package_key, leaving.booked)

    def _start_life(self) -> None:
        """Begin another life of Triton. One that only has not answered for a while has all its
        models.
        """
        life = self._machine.triton.life
        remaining = self.ledger.models.keys() & life.models.keys() if life else ()
        if remaining:
            return
        for name, load in [*self.ledger.loads.items()]:
            if load.ended_at is not None:
                self.ledger.fail_load(name, self.now(), is_memory=False)
        self.ledger.start_life()

    # -- decisions about loads ------------------------------------------------------------------

    def _watch_evictions(self, stores: Any) -> None:
        eviction = stores.eviction
        evict_for = eviction.evict_for
        begin = stores.waits.begin

        async def evict_for_beside(error: CapacityError) -> bool:
            refused = self._refused
            self._refused = None
            if refused is None or refused.error is not error:
                return bool(await evict_for(error))
            _patches.chosen = None
            work = evict_for(error)
            # the coroutine chooses before it awaits anything
            try:
                waits_for = work.send(None)
            except StopIteration as end:
                self._compare_eviction(refused)
                return bool(end.value)
            self._compare_eviction(refused)
            return bool(await _Resumed(work, waits_for))

        def begin_beside(model_id: Any, *args: Any, **kwargs: Any) -> Any:
            self._called[str(model_id)] = self.now()
            if stores.waits.get(model_id) is None:
                self._started.pop(str(model_id), None)
            return begin(model_id, *args, **kwargs)

        eviction.evict_for = evict_for_beside
        stores.waits.begin = begin_beside

    def compare_answer(self, asked: _Asked, answer: PresentAnswer, estimate: Any) -> None:
        """Compare when today's control admits a load, or lets it wait."""
        decision = self._decide(asked)
        if answer is not PresentAnswer.ADMIT:
            self._compare(asked, "wait", decision)
            return
        device = None if estimate.gpu is None else estimate.gpu.device
        self._compare(asked, "admit", decision, device)
        self._begin_load(asked, self._need_of(asked, device))

    def compare_refusal(self, asked: _Asked, error: AdapterError) -> None:
        """Compare when today's control refuses a load, unless it may evict others for it."""
        decision = self._decide(asked)
        may_evict = isinstance(error, InsufficientMemory) and asked.can_evict
        if may_evict and not asked.terms.ran_out:
            candidates = [record for record, _ in self._list_candidates(asked)]
            self._refused = _Refused(error, asked, decision, candidates)
            return
        if isinstance(error, ModelTooLarge):
            self._compare(asked, "too large", decision)
        else:
            self._compare(asked, self._name_refusal(asked), decision)

    def _name_refusal(self, asked: _Asked) -> str:
        """Return what becomes of a load that today's control refuses: one for calls waits."""
        is_waiting = (
            asked.terms.is_on_demand
            and self._eviction is not None
            and self._eviction.may_come(asked.record.id)
        )
        return "wait" if is_waiting else "507"

    def _compare_eviction(self, refused: _Refused) -> None:
        asked = refused.asked
        chosen = _patches.chosen
        _patches.chosen = None
        if not chosen:
            self._situation = ["eviction declined"]
            self._compare(asked, self._name_refusal(asked), refused.decision)
            return
        self._evicted_for.add(str(asked.record.id))
        if refused.decision.answer is not Answer.EVICT:
            self._compare(asked, "evict", refused.decision)
            return
        records = {str(record.id): record for record in refused.candidates}
        names = {records[victim.model_id].name for victim in chosen if victim.model_id in records}
        self._compare_victims(asked, names, refused.decision)

    def _compare_victims(self, asked: _Asked, present: set[TritonName], decision: Decision) -> None:
        new = set(decision.victims)
        answer = "evict"
        if new != present:
            answer = "evict fewer" if new < present else "evict others"
            answer = "evict more" if new > present else answer
        truth = "equal"
        if new != present:
            enough = [
                name
                for name, victims in (("today's", present), ("new", new))
                if self._is_enough(asked, victims, decision.device)
            ]
            truth = f"enough: {' and '.join(enough) or 'none'}"
        names = f"{sorted(present)} or {sorted(new)}"
        self._add(asked, decision, answers=("evict", answer), truth=truth, names=names)

    def _need_of(self, asked: _Asked, device: Device | None) -> Need:
        limit_bytes = None
        if asked.terms.is_planned and self.ledger.devices:
            books = self.ledger.devices.values()
            limit_bytes = max(book.limit_bytes for book in books) // _STRIP_SHARE
        return self.ledger.need_of(asked.package, device=device, guess_limit_bytes=limit_bytes)

    def _decide(self, asked: _Asked) -> Decision:
        self._refused = None
        self._situation = []
        now = self.now()
        self.ledger.advance(now)
        self._settle()
        request = self._make_request(asked)
        if asked.devices:
            needs = {device: self._need_of(asked, device) for device in asked.devices}
            decision = decide_place(self.ledger, needs, request, now)
        else:
            decision = decide(self.ledger, self._need_of(asked, None), request, now)
        model_id = str(asked.record.id)
        is_refused = decision.answer is Answer.INSUFFICIENT and not self._is_for_nobody(asked)
        if is_refused and model_id in self._evicted_for:
            self._evicted_for.discard(model_id)
            self.ledger.record_futile_eviction(asked.package.content_key, now)
        return decision

    def _make_request(self, asked: _Asked) -> LoadRequest:
        model_id = str(asked.record.id)
        started_at = self._started.get(model_id, self._time)
        purpose = Purpose.EXPLICIT
        deadline = 0.0
        if asked.terms.is_on_demand:
            purpose = Purpose.ON_DEMAND
            is_awaited = self._eviction is not None and self._waits.is_awaited(asked.record.id)
            if is_awaited:
                deadline = self._called.get(model_id, started_at) + self._wait_seconds
        elif asked.terms.is_planned:
            purpose = Purpose.PLANNED
            deadline = started_at + times.PATIENCE_SECONDS
        candidates = self._list_candidates(asked)
        return LoadRequest(
            purpose,
            started_at,
            deadline,
            tuple(Candidate(record.name, is_busy) for record, is_busy in candidates),
            asked.terms.is_planned and self._memory.mesh.is_evicting,
        )

    def _list_candidates(self, asked: _Asked) -> list[tuple[ModelRecord, bool]]:
        """Return whom may be evicted, in today's order, and whether it is busy."""
        eviction = self._eviction
        if eviction is None or not asked.terms.evicts:
            return []
        wait = self._waits.get(asked.record.id)
        callers = wait.callers if wait else ()
        now = clock.monotonic()
        found = []
        for record in eviction.loaded():
            reason = eviction.retention_reason(record)
            if record.files is not None and (reason is None or reason in FOR_NOW):
                one = eviction._candidate(record, record.files, callers, now, is_renewed=False)
                worth = eviction._policy.worth(one)
                order = (one.is_of_others, one.is_spared, worth, one.used_at)
                found.append((order, record, reason is not None))
        found.sort(key=lambda item: item[0])
        return [(record, is_busy) for _, record, is_busy in found]

    def _compare(
        self, asked: _Asked, today: str, decision: Decision, chosen: Device | None = None
    ) -> None:
        new = _NEW_ANSWERS[decision.answer]
        device = chosen
        if today != "admit" and new == "admit":
            device = decision.device
        truth = self._find_truth(asked, device)
        self._add(asked, decision, answers=(today, new), truth=truth)

    def _add(
        self,
        asked: _Asked,
        decision: Decision,
        *,
        answers: tuple[str, str],  # today's and the new one
        truth: str,
        names: str = "",  # of victims
    ) -> None:
        today, new = answers
        reason = decision.reason.name
        if today != new and new == "507" and self._is_for_nobody(asked):
            reason += ", nobody waits"
        if today != new and self._declares_more(asked):
            truth += "; it declares more than it takes"
        difference = Difference("load", today, new, reason, truth)
        started_at = self._started.get(str(asked.record.id), self._time)
        load = (self._seed, self._number, asked.record.name, started_at)
        situation = []
        figures = names
        if today != new:
            situation = self._list_situation(asked, decision)
            figures += self._show(asked, decision)
        self.comparisons.add(difference, load, situation, figures)

    def _list_situation(self, asked: _Asked, decision: Decision) -> list[str]:
        need = decision.need
        ledger = self.ledger
        devices = [decision.device] if decision.device else [*need.bytes]
        purpose = "planned" if asked.terms.is_planned else "explicit"
        readings = [ledger.devices[device].used_bytes for device in devices]
        states = {
            "no reading": all(reading is None for reading in readings),
            "empty": all(ledger.is_empty(device) for device in devices),
            "leaving": bool(ledger.unloads or ledger.returning),
            "loading": bool(ledger.loads),
            "stuck": bool(ledger.stuck),
            "busy": any(is_busy for _, is_busy in self._list_candidates(asked)),
            "not attributed": any(ledger.not_attributed(each) > MIB for each in devices),
            "ran out elsewhere": bool(asked.terms.ran_out),
            "nobody waits": self._is_for_nobody(asked),
            "may evict": asked.can_evict,
        }
        return [
            "on demand" if asked.terms.is_on_demand else purpose,
            f"{'known' if need.is_known else 'guessed'} ({need.basis.name})",
            f"reader {self._machine.memory.kind}",
            *self._situation,
            *(name for name, is_so in states.items() if is_so),
        ]

    def _is_for_nobody(self, asked: _Asked) -> bool:
        """Return whether no call waits for an on-demand load any more."""
        return asked.terms.is_on_demand and self._make_request(asked).deadline <= self._time

    def _declares_more(self, asked: _Asked) -> bool:
        spec = self._machine.disk.specs[asked.package.content_key]
        return spec.declared is not None and spec.declared > spec.takes

    def _show(self, asked: _Asked, decision: Decision) -> str:
        """Return the figures of both sides, in MiB."""
        parts = []
        spec = self._machine.disk.specs[asked.package.content_key]
        devices = [decision.device] if decision.device else [*decision.need.bytes]
        present = self._memory.ledger.snapshot()
        if not devices:
            parts.append(f"takes {spec.takes / MIB:.0f}, no device")
        for device in devices:
            need_bytes = decision.need.bytes.get(device, 0)
            parts.append(f"{device}: takes {spec.takes / MIB:.0f}, {self._show_book(device)}")
            parts.append(f"need {need_bytes / MIB:.0f}")
            today = present.devices.get(device)
            if today is not None:
                free = today.free_bytes(self.ledger.devices[device].used_bytes) / MIB
                parts.append(
                    f"today: free {free:.0f}, held {today.held_bytes / MIB:.0f}, reserved"
                    f" {today.reserved_bytes / MIB:.0f}, baseline {today.baseline_bytes / MIB:.0f}"
                )
        return "; ".join(parts)

    def _show_book(self, device: Device) -> str:
        ledger = self.ledger
        book = ledger.devices[device]
        figures = {
            "limit": book.limit_bytes,
            "headroom": book.headroom_bytes,
            "free": ledger.free(device),
            "used": book.used_bytes,
            "settled": book.settled_bytes,
            "reserved": ledger.reserved(device),
            "leaving": ledger.leaving(device),
            "booked": ledger.booked(device),
            "empty": book.empty_bytes,
        }
        known = {name: count for name, count in figures.items() if count is not None}
        return ", ".join(f"{name} {count / MIB:.0f}" for name, count in known.items())

    # -- what is true ---------------------------------------------------------------------------

    def _find_truth(self, asked: _Asked, device: Device | None) -> str:
        """Return how much would have to be freed for the model: on the device, or on the best."""
        spec = self._machine.disk.specs[asked.package.content_key]
        gpus = range(len(self._machine.triton.truth.sizes))
        books = self.ledger.devices
        if device is not None and device in books and books[device].number is not None:
            gpus = [books[device].number]
        elif not asked.devices:
            gpus = [0]
        return _TRUTHS[min(self._rank_truth(asked, spec.takes, gpu) for gpu in gpus)]

    def _rank_truth(self, asked: _Asked, takes: int, gpu: int) -> int:
        truth = self._machine.triton.truth
        limit_bytes = limit_of(self._settings.memory_limit, truth.sizes[gpu])
        used = truth.used_on(gpu) + self._arriving(gpu)
        leaving = self._leaving(gpu)
        evictable = sum(self._held_bytes(record, gpu) for record, _ in self._list_candidates(asked))
        others = truth.held.get("strangers", 0) if gpu == 0 else 0
        least = others + (truth.held["baseline"] if gpu == 0 else 0)
        if used + takes <= limit_bytes - self._settings.reserve:
            return 0
        if used + takes <= limit_bytes:
            return 1
        if used - leaving + takes <= limit_bytes:
            return 2
        if used - leaving - evictable + takes <= limit_bytes:
            return 3
        return 4 if least + takes <= limit_bytes else 5

    def _arriving(self, gpu: int) -> int:
        """Return what loads in progress will still take."""
        missing = 0
        for name, load in self.ledger.loads.items():
            spec = self._specs.get(name)
            record = self._records[name]
            if spec is None or load.ended_at is not None or (record.gpu or 0) != gpu:
                continue
            missing += max(0, spec.takes - self._held_bytes(record, gpu))
        return missing

    def _leaving(self, gpu: int) -> int:
        triton = self._machine.triton
        held = triton.life.models.values() if triton.life else ()
        leaving = [each for each in held if each.state == "UNLOADING" and each.gpu == gpu]
        count = sum(triton.truth.held.get(each.process.key, 0) for each in leaving)
        for holder, size in triton.truth.held.items():
            if holder.startswith("late ") and triton.truth.gpu_of.get(holder, 0) == gpu:
                count += size
        return count

    def _held_bytes(self, record: ModelRecord, gpu: int) -> int:
        triton = self._machine.triton
        models = triton.life.models if triton.life else {}
        names = {str(name) for name in record.placement.names} | {str(record.name)}
        held = [models[name] for name in names if name in models]
        return sum(triton.truth.held.get(each.process.key, 0) for each in held if each.gpu == gpu)

    def _is_enough(self, asked: _Asked, victims: set[TritonName], device: Device | None) -> bool:
        spec = self._machine.disk.specs[asked.package.content_key]
        gpu = 0
        if device is not None:
            gpu = self.ledger.devices[device].number or 0
        truth = self._machine.triton.truth
        limit_bytes = limit_of(self._settings.memory_limit, truth.sizes[gpu])
        records = [record for record, _ in self._list_candidates(asked) if record.name in victims]
        freed = sum(self._held_bytes(record, gpu) for record in records)
        used = truth.used_on(gpu) + self._arriving(gpu) - self._leaving(gpu) - freed
        return bool(used + spec.takes <= limit_bytes)

    # -- decisions about limits -----------------------------------------------------------------

    def _watch_limits(self) -> None:
        limits = self._memory.limits
        excess = limits.excess
        overrun = limits.overrun

        def excess_beside(record: ModelRecord, *args: Any) -> Any:
            found = excess(record, *args)
            new = self._overruns.pop(record.name, None) or self._find_overrun(record.name)
            self._compare_limit(record.name, "after", _name_error(found), new)
            return found

        def overrun_beside(record: ModelRecord, *args: Any) -> Any:
            found = overrun(record, *args)
            new = self._find_overrun(record.name)
            self._compare_limit(record.name, "during", _name_error(found), new)
            return found

        limits.excess = excess_beside
        limits.overrun = overrun_beside

    def _compare_growth(self) -> None:
        """Compare during loads where today's control looks at no limit: on GPUs."""
        for device in self.ledger.devices:
            overrun = None if device == HOST else self.ledger.find_overrun(device)
            if overrun is not None and self.ledger.loads[overrun.name].ended_at is None:
                self._compare_limit(overrun.name, "during", "keep", overrun)

    def _find_overrun(self, name: TritonName) -> Overrun | None:
        load = self.ledger.loads.get(name)
        for device in load.reserved if load is not None else ():
            overrun = self.ledger.find_overrun(device)
            if overrun is not None and overrun.name == name:
                return overrun
        return None

    def _compare_limit(
        self, name: TritonName, moment: str, today: str, overrun: Overrun | None
    ) -> None:
        new = "keep"
        if overrun is not None:
            new = "too large" if overrun.is_permanent else "507"
        truth = self._machine.triton.truth
        excesses = [
            truth.used_on(gpu) - limit_of(self._settings.memory_limit, size)
            for gpu, size in enumerate(truth.sizes)
        ]
        is_exceeded = max(excesses) > 0
        difference = Difference(
            "limit",
            today,
            new,
            f"{moment} the load",
            "the limit is exceeded" if is_exceeded else "it is not exceeded",
        )
        load = (self._seed, self._number, name, self._loads[name])
        situation = [f"reader {self._machine.memory.kind}"]
        if self._settings.memory_limit is not None:
            situation.append("limit set")
        figures = f"{max(excesses) / MIB:.0f} MiB over, headroom {self._settings.reserve / MIB:.0f}"
        self.comparisons.add(difference, load, situation, figures)

    # -- decisions about failures ---------------------------------------------------------------

    def _watch_failures(self) -> None:
        readings = self._memory.readings
        judged = readings.judged

        async def judged_beside(
            error: AdapterError, name: TritonName, *, since: float | None = None, **kw: Any
        ) -> AdapterError:
            found = await judged(error, name, since=since, **kw)
            is_suspected = isinstance(error, ModelFailed) and error.suspected is not None
            if isinstance(error, CapacityError) or is_suspected:
                self._compare_failure(error, name, since, found)
            return found

        readings.judged = judged_beside

    def _compare_failure(
        self, error: AdapterError, name: TritonName, since: float | None, found: AdapterError
    ) -> None:
        judgement = self._judge(error, name, since)
        if since is not None and name in self.ledger.loads:
            self._is_memory[name] = judgement.outcome is Outcome.OUT_OF_MEMORY
        text = str(error)
        if text.startswith("CUDA"):
            truth = "really out of memory"
        elif text.startswith("input"):
            truth = "a caller's words"
        elif self._machine.triton.processes.killed_for_memory > self._killed:
            truth = "a process was killed for memory"
        else:
            truth = "a process ended"
        difference = Difference(
            "failure",
            _name_error(found, "failure"),
            _NEW_OUTCOMES[judgement.outcome],
            f"{'inference' if since is None else 'load'}: {judgement.evidence.name}",
            truth,
        )
        load = (self._seed, self._number, name, self._loads[name], clock.monotonic())
        used = {
            device: f"{(book.limit_bytes - (book.used_bytes or 0)) / MIB:.0f}"
            for device, book in self.ledger.devices.items()
        }
        figures = f"{text[:70]!r}, left {used}"
        self.comparisons.add(difference, load, [f"reader {self._machine.memory.kind}"], figures)

    def _judge(self, error: AdapterError, name: TritonName, since: float | None) -> Judgement:
        ledger = self.ledger
        devices: list[Device] = []
        key = ""
        if name in ledger.loads:
            devices = [*ledger.loads[name].reserved]
            key = ledger.loads[name].need.package_key
        elif name in ledger.models:
            devices = [*ledger.models[name].booked]
            key = ledger.models[name].package_key
        first = clock.monotonic() - _RECENT_SECONDS
        if since is not None:
            first = max((at for at, _ in self._readings if at <= since), default=since)
        scene = Scene(
            {device: book.limit_bytes for device, book in ledger.devices.items()},
            [reading for at, reading in self._readings if at >= first],
            devices,
        )
        if isinstance(error, OutOfMemory):
            requested = error.figures.needed_bytes
            verdict = Verdict(Strength.STRONG, error.matched, error.pattern, requested)
        else:
            verdict = Verdict(Strength.WEAK, error.suspected, None, None, error.of_shm)
        if since is not None:
            return judge_load(verdict, str(error), scene)
        is_strong = verdict.strength is Strength.STRONG
        failures = self._failures.add(key) if is_strong else 0
        return judge_inference(
            verdict,
            str(error),
            scene,
            failures=failures,
            is_only_model=len(ledger.models) + len(ledger.loads) <= 1,
        )

    def note_answer(self, name: str) -> None:
        """Note that a model has answered an inference."""
        model = self.ledger.models.get(TritonName(name))
        if model is not None:
            self._failures.clear(model.package_key)


class _Resumed:
    """Awaits a coroutine that has run up to its first pause."""

    def __init__(self, work: Any, waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for

    def __await__(self) -> Iterator[Any]:
        waits_for = self._waits_for
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001 - whatever ends the wait ends the work
                step = self._work.throw
                argument: Any = error
            else:
                step = self._work.send
                argument = value
            try:
                waits_for = step(argument)
            except StopIteration as end:
                return end.value


def _name_error(error: AdapterError | None, otherwise: str = "keep") -> str:
    if isinstance(error, ModelTooLarge):
        return "too large"
    return "507" if isinstance(error, CapacityError) else otherwise


class ShadowedDay:
    """Builds the controls of one day, each with a shadow; sizes are kept from one to the next."""

    def __init__(self, comparisons: Comparisons, seed: int) -> None:
        self._comparisons = comparisons
        self._seed = seed
        self._sizes: object = None
        self._shadow: Shadow | None = None
        self._count = 0
        self._infer: Any = None

    def build(self, machine: Machine, settings: Settings, terms: Terms | None) -> PresentControl:
        """Build today's control with a shadow."""
        if self._shadow is not None:
            self._sizes = self._shadow.ledger.sizes.as_dict()
        self._count += 1
        shadow = Shadow(self._comparisons, self._seed, self._count)
        shadow.ledger.sizes = Sizes(SIZE_FACTOR)
        shadow.ledger.sizes.restore(self._sizes)
        self._shadow = shadow
        reader = ObservedReader(machine.memory, shadow.observe)
        observed = Machine(
            machine.triton,
            machine.disk,
            reader,
            machine.server,
            machine.processes,
            machine.artifacts,
        )
        control = PresentControl(observed, settings, terms)
        shadow.watch(control, observed, settings)
        self._watch_answers(machine.triton)
        return control

    def _watch_answers(self, triton: Any) -> None:
        """Tell the shadow of the adapter that runs of each inference that Triton answers."""
        if self._infer is not None:
            return
        target = triton._target
        infer = target.infer
        self._infer = infer

        async def infer_beside(name: str, model_id: str) -> Any:
            answer = await infer(name, model_id)
            if self._shadow is not None:
                self._shadow.note_answer(name)
            return answer

        target.infer = infer_beside
