"""Judge the adapter by what is true in the world, after each answer and at quiet moments.

The rules are those of docs/simulation.md. The oracle knows the faults that were played: an error
without a cause among them is a violation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    GivenUp,
    InferenceFailed,
    InsufficientMemory,
    InvalidModel,
    LoadFailed,
    ModelNotFound,
    ModelNotReady,
    ModelTooLarge,
    OutOfMemory,
    SourceMissing,
    StubDied,
    UnloadedMeanwhile,
)
from tests.simulation.memory import MIB
from tests.simulation.models import SIZE_FACTOR, Call, Spec, Violated
from tests.simulation.plan import Settings
from tests.simulation.rest import OOM, RECENT_SECONDS, SLACK_BYTES, Rest
from tests.simulation.triton import Held

_LEAST_BYTES = 64 * MIB  # free before a load of unknown size begins
_NOTICED_SECONDS = 0.5
_STALLED_SECONDS = 25.0
_SLOW_SECONDS = 60.0
_DEATH_SECONDS = 65.0  # within which the death of a process that loads is noticed
_CHARGES = 3  # exits of Triton with a model at work, after which it may be given up
_ALONE_SECONDS = 5.0  # for which a load of unknown size waits for another
_STILL_SECONDS = 1.4  # after which one that takes nothing more is not waited for

# After these what there is of a load, or another load of the model, goes on.
_GO_ON = (AlreadyLoaded, UnloadedMeanwhile, BackendTimeout, BackendUnavailable)


class Oracle(Rest):
    """Checks the rules for calls, and keeps what they are judged by."""

    def __init__(self, world: object) -> None:
        self._world = world
        self.serving: dict[str, Spec] = {}  # models that must answer, and their files
        self.present: dict[str, Spec] = {}  # models that may have bytes in the ledger
        self.loading: defaultdict[str, int] = defaultdict(int)  # callers who wait
        self.unloading: defaultdict[str, int] = defaultdict(int)
        self._believed: set[str] = set()
        self._lost: dict[str, Spec] = {}
        self._measured: set[str] = set()  # urls
        # what others took whose loads ran beside one that readings do not tell apart, by url
        self._shared: dict[str, int] = {}
        self.loaded_alone: set[str] = set()  # models beside whose load nothing else changed memory
        self.kept: dict[str, int] = {}  # bytes of no model when a model was loaded, by model
        self._taken_for_ours = 0  # by strangers, which a load beside them may be charged with
        self._at: dict[tuple[str, str], float] = {}
        self._ends = self._strangers = 0
        self._first_end = 0.0  # of Triton in this shift
        self._exits_at_work = Counter[str]()  # of Triton, by model
        self._hangs = Counter[str]()  # of an external Triton, by the models that it was loading
        self._shift_begun = 0.0
        self.settings: Settings | None = None

    # -- what has happened ------------------------------------------------------------------

    def happened(self, what: str, model_id: str = "") -> None:
        self._at[what, model_id] = self._now()
        self._at[what, ""] = self._now()
        now_there = self._world.truth.held.get("strangers", 0)
        self._strangers = max(self._strangers, now_there)
        self._taken_for_ours = max(self._taken_for_ours, now_there)
        if what == "end":
            self._ends += 1
            self._first_end = self._now() if self._ends == 1 else self._first_end
            self._lost |= self.serving
            self.serving.clear()
        elif what == "hang" and not self._world.is_embedded:
            self._hangs.update({held.spec.model_id for held in self._world.arriving()})
        elif what == "caller left":
            self._measured |= {spec.url for spec in self._world.specs.values()}
        elif what == "infer done":
            self._believed -= {held.spec.package.url for held in self._world.held_of(model_id)}
        elif what in {"stub ended", "unload asked"}:
            self.serving.pop(model_id, None)
            self._lost.pop(model_id, None)

    def since(self, moment: float, *whats: str, model_id: str = "") -> bool:
        return any(self._at.get((what, model_id), -1.0) >= moment for what in whats)

    def _now(self) -> float:
        return self._world.now

    def new_adapter(self, settings: Settings) -> None:
        self.settings = settings
        self.serving.clear()
        self.loading.clear()
        self.unloading.clear()
        self._lost.clear()
        self._believed.clear()
        self._ends = self._strangers = 0
        self._hangs.clear()
        self._exits_at_work.clear()
        self._shift_begun = self._now()

    def note_loaded(self, model_id: str) -> None:
        """Find out whether a load that has just ended well was the only thing that took memory."""
        known = self._world.known_models()
        names = {name for model in known if model.id == model_id for name in model.names}
        begun = self._at.get(("admitted", model_id), -1.0) - _STILL_SECONDS
        others = {
            holder
            for holder, at in self._world.truth.changed_at.items()
            if at >= begun and holder.partition("#")[0] not in names
        }
        is_beside = any(held.spec.model_id != model_id for held in self._world.arriving())
        is_beside |= any(
            what == "admitted" and other not in {"", model_id} and at >= begun
            for (what, other), at in self._at.items()
        )
        owned = sum(min(self._world.bytes_of(e), e.spec.takes) for e in self._world.all_held())
        self.kept[model_id] = self._world.truth.used - self._world.plan.baseline - owned
        if others or is_beside:
            self.loaded_alone.discard(model_id)
        else:
            self.loaded_alone.add(model_id)

    # -- rule 1, 2: answers -----------------------------------------------------------------

    def loaded(self, call: Call, spec: Spec) -> None:
        """A load has been answered well."""
        self._measured.add(spec.url)
        self._check_time(call, self.settings.load_seconds + RECENT_SECONDS)
        upset = ("unload asked", "stub ended", "end")
        if any(self.since(call.begun, each, model_id=call.model_id) for each in upset[:2]):
            return
        if self.since(call.begun, "end") or not self._world.is_up:
            return
        recent = call.begun - RECENT_SECONDS
        if not self._world.is_embedded and self.since(recent, "end") and self.since(recent, "hang"):
            return  # a Triton that hangs cannot tell that it is another
        before = call.begun - self.settings.load_seconds
        whats = ("unload asked", "caller left")  # such an unload still comes, after the load
        if all(self.since(before, each, model_id=call.model_id) for each in whats):
            return
        has_failed = self.since(before, "unload failed", model_id=call.model_id)
        if has_failed and self.since(before - RECENT_SECONDS, "hang"):
            return  # a Triton that hung unloads it when it goes on
        held = [each for each in self._world.held_of(call.model_id) if each.state == "READY"]
        if any(each.process.is_real and each.process.over.is_set() for each in held):
            return  # the next request notices that it has died
        self.serving[call.model_id] = spec
        if not any(each.spec.package == spec for each in held):
            raise Violated("1 right model", f"{call.model_id} was loaded, and Triton has it not")

    def answered(self, call: Call, spec: Spec, expected: Spec | None) -> None:
        """An inference has been answered out of these files."""
        if spec.model_id != call.model_id:
            said = f"an inference of {call.model_id} was answered by {spec.model_id}"
            raise Violated("1 right model", said)
        if expected is not None and self.serving.get(call.model_id) == expected != spec:
            said = f"{call.model_id} answered from {spec.url}, not from {expected.url}"
            raise Violated("1 right model", said)

    def unloaded(self, call: Call) -> None:
        """An unload has been answered well: the model is gone, and what it took."""
        self._check_time(call, self.settings.unload_seconds + RECENT_SECONDS)
        if self.since(call.begun, "load asked", model_id=call.model_id) or self._is_wanted(call):
            return
        self.present.pop(call.model_id, None)
        if self.since(self._shift_begun, "given up", model_id=call.model_id):
            return  # Triton lets go of a stuck model later
        held = self._world.held_of(call.model_id)
        if held and not any(each.state == "LOADING" for each in held):  # a step may be loaded
            said = f"{call.model_id} was unloaded, and Triton has {held[0].name}"
            raise Violated("2 unloads", said)
        if self._world.is_embedded and (left := self._world.processes_of(call.model_id)):
            said = f"{call.model_id} was unloaded, and {len(left)} of its processes run"
            raise Violated("2 unloads", said)

    def _is_wanted(self, call: Call) -> bool:
        """Return whether somebody loads the model, or a caller has left its load."""
        return self.loading[call.model_id] > 0 or self.since(
            call.begun - self.settings.load_seconds, "caller left", model_id=call.model_id
        )

    def _check_time(self, call: Call, seconds: float) -> None:
        took = self._now() - call.begun - call.extra
        if self.since(call.begun, "unload asked", model_id=call.model_id):
            took -= RECENT_SECONDS  # a load of others goes on until then
        if self.since(call.begun, "lost"):
            took -= self.settings.load_seconds
        if took > seconds:
            said = f"{call.verb} of {call.model_id} took {took:.1f} s, of {seconds:.0f} s"
            raise Violated("2 in time", said)

    def leased(self, call: Call) -> None:
        """A lease was given: not of a model whose death was told to a caller before."""
        told = self._at.get(("death told", call.model_id), -1.0)
        if told < 0.0 or not self._world.is_embedded or self.since(told, "end"):
            return
        if not self.since(told - RECENT_SECONDS, "load asked", model_id=call.model_id):
            raise Violated("2 dead", f"{call.model_id} has died, and is given another request")

    def unload_begins(self, held: Held) -> None:
        """Triton is told to unload a model, which may still have requests for a while alone."""
        model_id = held.spec.model_id
        asked = self._at.get(("unload asked", model_id), -1.0)
        is_asked = self.unloading[model_id] > 0
        # nobody has the requests of an adapter that was killed
        is_asked &= self._now() - self._shift_begun > RECENT_SECONDS
        if held.of_callers and is_asked and self._now() - asked < self.settings.unload_seconds / 2:
            said = f"{model_id} is unloaded amid {held.of_callers} requests"
            raise Violated("4 in flight", said)

    def loads_again(self, held: Held) -> None:
        """Triton is told to load a name that it unloads: a dead or stalled unload needs that."""
        seconds = self._now() - held.unloading_since
        is_dead = held.process.is_real and held.process.over.is_set()
        is_hung = self.since(held.unloading_since - RECENT_SECONDS, "hang") or self.since(
            held.unloading_since, "unload failed", model_id=held.spec.model_id
        )
        if not (is_dead or is_hung or held.in_flight) and seconds < _STALLED_SECONDS:
            said = f"{held.spec.model_id} is loaded again {seconds:.1f} s into its unload"
            raise Violated("2 unloads", said)

    def not_leased(self, call: Call, error: AdapterError) -> None:
        """Judge that no lease was given: wrong for a model that must answer."""
        if call.model_id in self.serving and self._world.is_up:
            said = f"{call.model_id} is loaded, and a call for it is {error!r}"
            raise Violated("2 not found", said)

    def failed(self, call: Call, error: BaseException, spec: Spec) -> None:
        """A call has ended with an error, which needs a cause."""
        if not isinstance(error, AdapterError):
            raise Violated("2 documented errors", f"{call.verb} of {call.model_id}: {error!r}")
        goes_on = isinstance(error, _GO_ON)
        is_left = self._is_wanted(call) or self._world.held_of(call.model_id)
        if call.verb == "load" and not goes_on and not is_left:
            self.present.pop(call.model_id, None)
        self._measured.add(spec.url)  # a load that has failed may have been
        if call.verb == "unload":
            self.happened("unload failed", call.model_id)
        limits = {"unload": self.settings.unload_seconds}
        self._check_time(call, limits.get(call.verb, self.settings.load_seconds) + RECENT_SECONDS)
        if not self.has_cause(call, error, spec):
            said = f"{call.verb} of {call.model_id} failed without a cause: {error!r}"
            raise Violated("2 causes", said)

    def _load_bound_ago(self) -> float:
        return self._now() - self.settings.load_seconds - RECENT_SECONDS

    def has_cause(self, call: Call, error: AdapterError, spec: Spec) -> bool:
        causes = {
            AlreadyLoaded: self._is_loaded_by_others,
            UnloadedMeanwhile: self._was_unloaded,
            GivenUp: self._is_given_up,
            ModelTooLarge: self._is_too_large,
            InsufficientMemory: self._does_not_fit,
            OutOfMemory: self._ran_out,
            InvalidModel: self._has_bad_files,
            SourceMissing: self._has_bad_files,
            StubDied: self._has_died,
            LoadFailed: lambda *_: self._was_hit(call, "load", "stub ended", "answer", OOM),
            InferenceFailed: lambda *_: self._was_hit(call, "infer", "stub ended", OOM),
            ModelNotFound: self._is_absent,
            ModelNotReady: self._is_returning,
            BackendTimeout: self._is_timeout_due,
            BackendUnavailable: self._was_away,
            BackendError: self._was_refused_by_disk,
        }
        found = next((causes[each] for each in type(error).__mro__ if each in causes), None)
        return found is not None and found(call, spec)

    def _was_unloaded(self, call: Call, _: Spec) -> bool:
        self.happened("load ended", call.model_id)
        begun = call.begun - self.settings.load_seconds
        return self.since(begun, "unload asked", model_id=call.model_id)

    def _does_not_fit(self, call: Call, spec: Spec) -> bool:
        if not self.surely_fits(call, spec):
            return not self._is_room_to_come(call)
        # a guessed size is doubled after a load that ran out of memory
        is_doubled = self.since(self._shift_begun, OOM, model_id=call.model_id)
        # a load that is ended as its GPU is full is not tried on another one
        was_tried = self.since(call.begun, "admitted", model_id=call.model_id)
        return is_doubled or (was_tried and len(self.limits) > 1)

    def _has_bad_files(self, call: Call, _: Spec) -> bool:
        return self.since(self._load_begun(call), "prepare", model_id=call.model_id)

    def _load_begun(self, call: Call) -> float:
        """Return when the call began, or the load in progress that it waited for."""
        if call.verb != "load":
            return call.begun
        return min(call.begun, self._at.get(("load begun", call.model_id), call.begun))

    def _has_died(self, call: Call, _: Spec) -> bool:
        self.happened("death told", call.model_id)
        return self._was_hit(call, "load", "stub ended", OOM)

    def _is_absent(self, call: Call, spec: Spec) -> bool:
        if call.verb == "load":
            return self._was_unloaded(call, spec)
        return call.model_id not in self.serving or not self._world.is_up

    def _is_returning(self, call: Call, spec: Spec) -> bool:
        if call.verb == "load":
            return self._ends > 0
        return self._is_absent(call, spec)

    def _was_away(self, call: Call, _: Spec) -> bool:
        whats = ("end", "hang", "answer", "stop", "restart")
        return not self._world.is_up or self.since(call.begun - RECENT_SECONDS, *whats)

    def _was_refused_by_disk(self, call: Call, _: Spec) -> bool:
        disk = ("prepare", "place", "confirm", "remove")
        return self.since(self._load_begun(call), *disk) or self.since(
            call.begun - RECENT_SECONDS, "hang", "end"
        )

    def _is_loaded_by_others(self, call: Call, _: Spec) -> bool:
        """Whether somebody else may have loaded the model, or loads it, or it comes back."""
        begun = call.begun - self.settings.load_seconds - RECENT_SECONDS
        return (
            call.model_id in self.serving
            or self.loading[call.model_id] > 0
            or self.since(begun, "load asked", "caller left", model_id=call.model_id)
            or self._ends > 0
            or bool(self._world.held_of(call.model_id))
        )

    def _was_hit(self, call: Call, *whats: str) -> bool:
        begun = self._load_begun(call) if call.verb == "load" else 0.0
        return any(self.since(begun, each, model_id=call.model_id) for each in whats)

    def _is_timeout_due(self, call: Call, spec: Spec) -> bool:
        took = self._now() - call.begun
        if self.since(call.begun - RECENT_SECONDS, "hang", "end"):
            return True
        if self._world.is_embedded and self._has_died_since(call):
            return False
        if call.verb == "unload" and self._ends_its_load(call, spec):
            return False
        # the load, or the undo that an unload waits for, may have begun long before
        is_joined = call.verb == "load" or self._is_loading(call.model_id)
        limits = [self.settings.load_seconds] if is_joined else []
        # a load waits for the unloads of its model that were asked before it
        since = call.begun - self.settings.load_seconds
        is_unloaded = self.since(since, "unload asked", model_id=call.model_id)
        limits += [self.settings.unload_seconds] if call.verb != "load" or is_unloaded else []
        limit = min(limits)
        return self.are_loads_slow(limit) and (is_joined or took >= 5.0)

    def _has_died_since(self, call: Call) -> bool:
        """Return whether the load should have failed by now, as its process has died."""
        died = self._at.get(("stub dies", call.model_id), -1.0)
        is_last = not self.since(died, "admitted", model_id=call.model_id)
        return is_last and call.begun <= died < self._now() - _DEATH_SECONDS

    def _is_loading(self, model_id: str) -> bool:
        """Whether Triton still loads the model."""
        held = self._world.held_of(model_id)
        return any(each.state == "LOADING" and not each.ended.is_set() for each in held)

    def _ends_its_load(self, call: Call, spec: Spec) -> bool:
        """Whether nothing keeps the unload of a python model: a load that hangs is ended."""
        upset = ("unload", "answer", "stub dies", "stub ended")
        was_hit = any(self.since(0.0, each, model_id=call.model_id) for each in upset)
        return self._world.is_embedded and spec.is_python and not was_hit

    def are_loads_slow(self, limit: float) -> bool:
        """Whether a load may take longer than `limit` seconds."""
        faults = ("load", "answer", "unload", "stub ended", "restart")
        return self.are_long(limit) or any(self.since(0.0, each) for each in faults)

    def are_long(self, limit: float) -> bool:
        """Whether several loads in a row, and their turns, may take longer than one may."""
        natural = 4 * max(e.seconds * len(e.parts()) for e in self._world.newest.values())
        return natural + RECENT_SECONDS > limit

    # -- rule 2, 3: memory ------------------------------------------------------------------

    def most(self, spec: Spec) -> int:
        """Return the most that the adapter may suppose the model to take."""
        disk = int(spec.takes * 0.75 * SIZE_FACTOR) + 1
        least = max(spec.declared or 0, spec.takes + spec.grows, disk, _LEAST_BYTES)
        return least + self._shared.get(spec.url, 0) + self._taken_for_ours + SLACK_BYTES

    @property
    def limits(self) -> list[int]:
        """Return the limit of each device."""
        sizes = self._world.truth.sizes
        return [min(size, self.settings.memory_limit or size) for size in sizes]

    @property
    def limit(self) -> int:
        """Return the limit of the largest device: what fits beside all others together, fits."""
        return max(self.limits)

    def booked_on(self, gpu: int, specs: Iterable[Spec]) -> int:
        """Return the most that these may have of the device, beside the baseline; they have nothing
        of it where they were loaded to another.
        """
        return sum(self.most(each) for each in specs if not self._is_elsewhere(each, gpu))

    def _is_elsewhere(self, spec: Spec, gpu: int) -> bool:
        held = self._world.held_of(spec.model_id)
        is_settled = bool(held) and all(h.state == "READY" and h.gpu != gpu for h in held)
        known = self._world.known_models()
        names = {model.id.partition("#")[0] for model in known if model.state != "READY"}
        return is_settled and not self.loading[spec.model_id] and spec.model_id not in names

    def _is_given_up(self, call: Call, _: Spec) -> bool:
        return self._ends > 1 or self._ends + self._hangs[call.model_id] > 2

    def given_up(self, model_id: str) -> None:
        """Judge that the adapter loads the model no more, as it may be what ends Triton."""
        charges = self._exits_at_work[model_id] + self._hangs[model_id]
        if charges < _CHARGES:
            text = f"{model_id} was given up, and was at work at {charges} exits of Triton"
            raise Violated("2 blame", text)

    def note_exit(self, models: Iterable[Held]) -> None:
        """Note the models that were at work when Triton exited: they alone may be charged."""
        at_work = {
            held.spec.model_id for held in models if held.state == "LOADING" or held.in_flight
        }
        self._exits_at_work.update(at_work)

    def _is_too_large(self, call: Call, spec: Spec) -> bool:
        versions = [each for each in self._world.specs.values() if each.model_id == call.model_id]
        needed = max(max(each.declared or 0, each.takes) for each in versions)
        needed += self.settings.reserve + SLACK_BYTES
        was_upset = self.since(self._shift_begun, "strangers", "echo")
        others = self._world.truth.held["baseline"] + self._world.strayed_bytes()
        if needed + others <= self.limit and not was_upset:
            text = f"{call.model_id} is too large for good, and would fit alone"
            raise Violated("2 too large", text)
        is_large = self.most(spec) + others > self.limit * 0.9
        # a slow unload that was given up still holds its memory
        is_slow = self.since(call.begun - _SLOW_SECONDS, "unload")
        return is_large or is_slow or self.since(call.begun - RECENT_SECONDS, "strangers", OOM)

    def surely_fits(self, call: Call, spec: Spec) -> bool:
        """Whether it would fit even if the adapter knew everything late, and supposed the worst."""
        truth, endpoint = self._world.truth, self._world.endpoint
        # what a load that never ends has reserved stays booked, whoever asked for it
        arriving = self._world.arriving()
        stuck = [h.spec.package for h in arriving if h.never_ends and self._lives(h)]
        known = {each.model_id for each in stuck} | {call.model_id}
        others = [*self.present.values(), *(endpoint.oracle.present() if endpoint else ())]
        others = [*stuck, *(each for each in others if each.model_id not in known)]
        loading = sum(self.most(each) for each in others if each.model_id not in self.serving)
        moment = call.begun - RECENT_SECONDS
        for gpu, limit in enumerate(self.limits):
            # strangers from before the first model count as the baseline until the last goes
            booked = truth.held["baseline"] + self._strangers + self.booked_on(gpu, others)
            used = truth.most_since(moment, gpu) + loading
            if max(booked, used) + self.most(spec) + self.settings.reserve < limit:
                return True
        return False

    def _lives(self, held: Held) -> bool:
        return not (held.process.is_real and held.process.over.is_set())

    def _is_room_to_come(self, call: Call) -> bool:
        """Whether it was refused beside an unload that is under way, be it the undo of a load,
        without a wait for that. A call may have joined a load that has waited.
        """
        if self._world.reader.kind == "off" or self._now() - self._load_begun(call) > 4.0:
            return False
        ended = self._at.get(("load cut", call.model_id), -1.0)
        refused = ended if ended >= call.begun else self._now()  # the load was undone since then
        return any(
            refused - held.unloading_since > _NOTICED_SECONDS
            and not held.process.over.is_set()
            and not self._was_given_up(held)
            for held in self._world.all_held()
            # the undo of the load itself makes no room for it
            if held.state == "UNLOADING" and held.spec.model_id != call.model_id
        )

    def _was_given_up(self, held: Held) -> bool:
        """Whether Triton may go on with an unload, or an undo, that has failed for the adapter."""
        since, model_id = held.unloading_since, held.spec.model_id
        has_hung = self.since(self._load_bound_ago(), "hang")
        return has_hung or self.since(since, "unload failed", model_id=model_id)

    def _ran_out(self, call: Call, spec: Spec) -> bool:
        if self._was_hit(call, OOM):
            return True
        # a text that means it is believed of each package until an inference of it goes well
        if call.verb == "infer":
            reading = self._world.reader.last
            packages = {h.spec.package.url for h in self._world.held_of(call.model_id)}
            was_believed = packages <= self._believed
            self._believed |= packages
            if was_believed and reading is not None and reading.source == "nvml":
                most = [*self._most_of_each(call.begun - 5.0)]
                return any(n >= limit for n, limit in zip(most, self.limits, strict=True))
            return self.since(0.0, "infer", model_id=call.model_id)
        is_low = any(
            most + self.most(spec) > limit * 0.95 - self.settings.reserve
            for most, limit in zip(self._most_of_each(call.begun - 5.0), self.limits, strict=True)
        )
        return is_low and self._was_hit(call, "load", "stub ended", "answer")

    def _most_of_each(self, moment: float) -> Iterator[int]:
        truth = self._world.truth
        return (truth.most_since(moment, gpu) for gpu in range(len(truth.sizes)))

    def admitted(self, spec: Spec, gpu: int) -> None:
        """A load has got its reservation: others must leave it the room that it declares."""
        self._loads_beside(spec)
        reading, world = self._world.reader.last, self._world
        self._runs_alone(spec)
        if reading is None or reading.lag_seconds or spec.declared is None or not self.serving:
            return
        recent = self._now() - 2.0  # a size may have been learned while strangers left
        since = 0.0 if spec.url in self._measured else recent
        upset = ("unread", "infer done", "end")
        if self.since(since, "strangers") or self.since(recent, *upset):
            return
        coming = [
            each
            for each in world.arriving()
            if each.spec.declared
            and each.gpu == gpu
            and each.spec != spec
            and not each.never_ends
            and not self.unloading[each.spec.model_id]
        ]
        to_come = sum(
            max(0, min(each.spec.declared, each.spec.takes) - world.bytes_of(each))
            for each in coming
        )
        least = min(spec.declared, spec.takes)
        used, limit = [*reading.used.values()][gpu], self.limits[gpu]
        if used + to_come + least > limit + SLACK_BYTES:
            said = f"{spec.model_id} was admitted with {(limit - used - to_come) // MIB} MiB"
            said = f"{said} left, of {least // MIB}"
            ready = [held.spec.model_id for held in world.all_held() if held.state == "READY"]
            if self.loaded_alone.issuperset(ready):
                raise Violated("3 admission", said)

    def _loads_beside(self, spec: Spec) -> None:
        """A size that is learned by a reader that lags may be of what else was loaded then; one of
        a model that declares none of what stood still until then.
        """
        kind = self._world.reader.kind
        is_apart = kind == "host" and spec.is_python
        if kind in {"nvml", "host"} and spec.declared is None and not is_apart:
            held = self._world.all_held()  # a dead model may seem to give back all in between
            others = sum(
                h.spec.takes
                for h in held
                if h.spec != spec and (h.state == "LOADING" or not self._lives(h))
            )
            self._shared[spec.url] = max(self._shared.get(spec.url, 0), others)
        if self._world.reader.kind != "triton":
            return
        specs = self._world.specs.values()
        beside = {each for each in specs if self._is_recent(each)} | {spec}
        beside |= {held.spec.package for held in self._world.arriving()}
        for each in beside:
            others = sum(o.takes + o.grows for o in beside if o != each)
            self._shared[each.url] = max(self._shared.get(each.url, 0), others)

    def _is_recent(self, spec: Spec) -> bool:
        """Whether the model was let in so lately that it may not be measured yet."""
        return self.since(self._now() - RECENT_SECONDS, "admitted", model_id=spec.model_id)

    def _is_alone(self, spec: Spec, newcomer: Spec) -> bool:
        """Return whether nothing but `newcomer` has been loaded or unloaded beside the load of
        `spec`, so that readings measure it.
        """
        since = self._at.get(("admitted", spec.model_id), self._now()) - RECENT_SECONDS
        moves = {"admitted", "load ended", "unload asked", "unload failed"}
        both = {spec.model_id, newcomer.model_id}
        return not any(
            what in moves and model_id not in both and at >= since
            for (what, model_id), at in self._at.items()
        )

    def is_known(self, spec: Spec) -> bool:
        return spec.declared is not None or spec.url in self._measured

    def _runs_alone(self, spec: Spec) -> None:
        """Check that loads of unknown size go one at a time, for 5 s each, where memory is read.

        One that Triton reports waits only for those that it does not.
        """
        is_known, model_id, now = self.is_known(spec), spec.model_id, self._now()
        given_up = now - self.settings.load_seconds  # older loads do not count
        loads = [
            held
            for held in self._world.arriving()
            if held.spec.model_id != model_id
            and held.name not in self._world.stuck_names()
            and self._at.get(("admitted", held.spec.model_id), now) > given_up
        ]
        others = loads
        if self._world.triton.reports and not spec.is_python:
            others = [h for h in loads if h.spec.is_python and not self.is_known(h.spec.package)]
        self.happened("admitted", model_id)
        if is_known or self._world.reader.last is None or not others:
            return
        asked = self._at.get(("load asked", model_id), -1.0)
        # beside any that stands still nobody waits for those that came later
        under_way = {h.spec.model_id for h in loads} | {m for m, n in self.loading.items() if n}
        begun = [self._at.get(("admitted", each), now) for each in under_way - {model_id}]
        admitted = [at for at in begun if at > given_up]
        is_fresh = (
            now - min(admitted, default=now) < _STILL_SECONDS and now - asked < _ALONE_SECONDS
        )
        upset = ("unread", "stub ended", "hang", "caller left")
        if is_fresh and not self.since(asked - RECENT_SECONDS, *upset):
            said = f"{model_id}, of unknown size, is loaded beside {others[0].spec.model_id}"
            are_known = all(self.is_known(held.spec.package) for held in others)
            if not are_known and self._is_alone(others[0].spec, spec):
                raise Violated("3 admission", said)
