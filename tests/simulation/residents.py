"""The oracle of models that calls load: who may be evicted, what calls may be told, and what the
disk cache may have. The rules have the numbers of docs/simulation.md.
"""

from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from adapter.control.door import StoreState
from adapter.errors import (
    AboutMemory,
    AdapterError,
    ArtifactNotFound,
    BackendError,
    BackendTimeout,
    ModelNotReady,
    NoRoom,
    StoreDenied,
    StoreUnavailable,
    StubDied,
    TooManyWaiting,
)
from adapter.packages.unpack import BLOCK_BYTES, disk_bytes
from tests.simulation.cache import files_at, labels_of, used
from tests.simulation.control import KnownModel
from tests.simulation.models import Call, Spec, Violated
from tests.simulation.store import CONFIG, Item

_RECENT_SECONDS = 20.0
_LONG_SECONDS = 120.0  # for a fetch, a load and their waits together
_SOON_SECONDS = 1.5
_UNKNOWN_BYTES = 64 * 2**20  # must be free for a model of unknown size
_ABSENT = ("COMING", "STUCK")
_REFUSED_SECONDS = 6.0  # for which a model is not tried again that cannot be served


class Residents:
    """Checks the rules for models that calls load."""

    def __init__(self, world: object, endpoint: object) -> None:
        self._world = world
        self._endpoint = endpoint
        self.waiting: Counter[str] = Counter()  # callers without a lease, by key
        self.busy: Counter[str] = Counter()  # requests, by name in Triton
        self.used_at: dict[str, float] = {}  # by key
        # keys of models that a platform has loaded by name: those that stay, with the time, and all
        self.kept: dict[str, float] = {}
        self.brought: set[str] = set()
        self._load_begun: dict[str, float] = {}
        self._arriving: set[str] = set()
        self._freed_at = -1.0

    def new_adapter(self) -> None:
        self.waiting = Counter()
        self.busy = Counter()
        self.used_at = {}
        self.kept = {}
        self._load_begun = {}
        self.brought.clear()
        self._arriving.clear()

    @property
    def _oracle(self) -> object:
        return self._world.oracle

    @property
    def _stores(self) -> StoreState:
        return self._endpoint.control.state.stores

    def _models_of_store(self) -> list[KnownModel]:
        records = self._stores.models()
        return [model for model in self._world.known_models() if model.record in records]

    def _known_in_triton(self) -> dict[str, KnownModel]:
        """Return the models by id, without those that come and those that are stuck."""
        known = self._world.known_models()
        return {model.id: model for model in known if model.state not in _ABSENT}

    def _is_unloading(self) -> bool:
        """Return whether an unload is about to free memory."""
        is_late = any(holder.startswith("late ") for holder in self._world.truth.held)
        return is_late or any(held.state == "UNLOADING" for held in self._world.all_held())

    def _since(self, moment: float, *whats: str, key: str = "") -> bool:
        return self._oracle.since(moment, *whats, model_id=key)

    def is_pinned(self, key: str) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in self._endpoint.terms.pin)

    def _is_kept(self, key: str) -> bool:
        """Return whether a platform's load of the model still holds."""
        if (since := self.kept.get(key)) is None:
            return False
        of_it = self._since(since, "stub ended", "unload asked", key=key)
        return not (of_it or self._since(since, "end", "restart"))

    def present(self) -> list[Spec]:
        """Return what may have bytes in the ledger of models that calls have loaded."""
        found = {held.spec.url: held.spec for held in self._world.all_held()}
        for model in self._world.known_models():
            if (spec := self._endpoint.known.get(model.source.url)) is not None:
                found[spec.url] = spec
        return [spec for url, spec in found.items() if url in self._endpoint.items]

    # -- rule 1, 2: answers -----------------------------------------------------------------

    def answered(self, call: Call, spec: Spec, expected: Spec | None) -> None:
        if spec.model_id != call.model_id:
            said = f"an inference of {call.model_id} was answered by {spec.model_id}"
            raise Violated("1 right model", said)
        upset = ("unload asked", "stub ended")
        is_upset = self._since(call.begun, *upset, key=call.model_id)
        if (
            expected is not None
            and expected != spec
            and not (is_upset or self._since(call.begun, "end"))
        ):
            said = f"{call.model_id} answered from {spec.url}, not from {expected.url}"
            raise Violated("1 right model", said)

    def waited(self, call: Call, begun: float) -> None:
        """A caller has got a lease or an error, asked for at `begun`."""
        took, most = self._world.now - begun, self._endpoint.terms.model_wait_seconds
        upset = self._since(begun - _RECENT_SECONDS, "end", "hang", "restart")
        if took > most + _SOON_SECONDS + upset * _RECENT_SECONDS:
            said = f"a call for {call.model_id} waited {took:.1f} s, of {most:.0f} s"
            raise Violated("2 in time", said)

    def refused(self, call: Call, error: BaseException) -> None:
        """A call got no lease: the error needs a cause."""
        if not isinstance(error, AdapterError):
            raise Violated("2 documented errors", f"call of {call.model_id}: {error!r}")
        if not self._has_cause(call, error):
            said = f"call of {call.model_id} failed without a cause: {error!r}"
            raise Violated("2 causes", said)

    def _has_cause(self, call: Call, error: AdapterError) -> bool:
        causes = {
            NoRoom: self._has_no_room,
            ModelNotReady: self._has_waited,
            TooManyWaiting: self._do_many_wait,
            StoreDenied: self._was_denied,
            StoreUnavailable: self._was_store_away,
            ArtifactNotFound: self._lacks,
            BackendTimeout: self._timed_out,
            BackendError: self._was_refused_by_disk,
        }
        found = next((causes[each] for each in type(error).__mro__ if each in causes), None)
        return self._has_cause_in_load(call, error) if found is None else found(call, error)

    def failed(self, call: Call, error: AdapterError) -> None:
        """An inference has failed, whose model was loaded."""
        if not self._oracle.has_cause(call, error, self._world.newest[call.model_id]):
            said = f"inference of {call.model_id} failed without a cause: {error!r}"
            raise Violated("2 causes", said)

    def _has_cause_in_load(self, call: Call, error: AdapterError) -> bool:
        """Whether the latest load of the model, which others may have begun, had that cause."""
        begun = min(call.begun, self._load_begun.get(call.model_id, call.begun)) - _REFUSED_SECONDS
        load = call if call.verb == "unload" else Call("load", call.model_id, begun)
        return self._oracle.has_cause(load, error, self._world.newest[call.model_id])

    def _timed_out(self, call: Call, error: AdapterError) -> bool:
        """The load, or its undo, may have gone on since long before the call."""
        settings = self._oracle.settings
        limit = settings.unload_seconds if call.verb == "unload" else settings.load_seconds
        return self._oracle.are_loads_slow(limit) or self._since(
            call.begun - _LONG_SECONDS, "hang", "end"
        )

    def _has_waited(self, call: Call, error: AdapterError) -> bool:
        """Or it waits for its turn, as it may be what ended Triton."""
        took = self._world.now - call.begun
        is_suspect = "waits for its turn" in str(error) and self._since(0.0, "end")
        return took >= self._endpoint.terms.model_wait_seconds - 0.1 or is_suspect

    def _do_many_wait(self, call: Call, _: AdapterError) -> bool:
        in_all, for_one = self._endpoint.terms.most_waiting
        # the caller itself counts here, and not there
        is_full = self.waiting[call.model_id] > for_one
        return is_full or self.waiting.total() > in_all

    def _was_denied(self, call: Call, _: AdapterError) -> bool:
        return self._since(call.begun - _LONG_SECONDS, "denied", key=call.model_id)

    def _was_store_away(self, call: Call, _: AdapterError) -> bool:
        since = call.begun - _LONG_SECONDS
        whats = ("unavailable", "cut", "truncated", "longer", "put")
        if self._since(since, *whats, key=call.model_id):
            return True
        # a call that the store leaves waiting gets the failure that another key has met
        is_slow = self._since(since, "slow", key=call.model_id)
        return is_slow and self._since(since, "unavailable")

    def _lacks(self, call: Call, _: AdapterError) -> bool:
        since = call.begun - _LONG_SECONDS
        is_lost = call.model_id not in self._endpoint.store.has
        return is_lost or self._since(since, "lacks", "lose", key=call.model_id)

    def _was_refused_by_disk(self, call: Call, error: AdapterError) -> bool:
        is_plain = type(error) is BackendError
        disk = is_plain and self._since(call.begun - _LONG_SECONDS, "publish", key=call.model_id)
        return disk or self._has_cause_in_load(call, error)

    def check_answer(self, key: str, error: AdapterError) -> None:
        """A call for the model has failed though nothing else is wrong any more."""
        # the death of a process may be told by the first call alone
        is_slow = isinstance(error, ModelNotReady | StubDied) or self._since(
            0.0, "end", "restart", "hang"
        )
        is_slow = is_slow or self._since(self._world.now - _LONG_SECONDS, "out of memory")
        if isinstance(error, BackendTimeout):
            is_slow |= self._oracle.are_loads_slow(self._oracle.settings.load_seconds)
        is_stuck = self._world.stuck_names() or self._world.arriving()
        if isinstance(error, NoRoom | AboutMemory):
            no_room = not self._surely_fits(key, bool) or self._is_disk_short(key)
            is_slow = is_slow or no_room
        if not (is_slow or is_stuck):
            raise Violated("5 desired", f"{key} cannot be called any more: {error!r}")

    # -- rule 2: room -----------------------------------------------------------------------

    def _stays(self, key: str) -> bool:
        """Return whether something kept the model lately, or may have."""
        used = self.used_at.get(key, -_LONG_SECONDS)
        is_kept = key in self.brought or self.is_pinned(key) or key in self._wanted()
        is_moving = any(held.state != "READY" for held in self._world.held_of(key))
        return is_kept or is_moving or used > self._world.now - _LONG_SECONDS / 2

    def _has_no_room(self, call: Call, error: AdapterError) -> bool:
        if "on disk" in str(error):
            return self._is_disk_short(call.model_id) or self._since(
                call.begun - _LONG_SECONDS, "publish", key=call.model_id
            )
        is_late = self._has_waited(call, error)  # whatever it waited for
        is_freed = self._freed_at >= call.begun or self._is_unloading()
        if is_late and is_freed:
            return True  # it lacked room, and waits for its turn, or for memory to come back
        return not self._surely_fits(call.model_id, lambda s: is_late or self._stays(s.model_id))

    def _surely_fits(self, key: str, stays: object) -> bool:
        """Whether it fits beside what stays, even if the adapter supposed the worst."""
        world, oracle = self._world, self._oracle
        upset = ("out of memory", "strangers", "unload", "load")
        if self._since(world.now - _LONG_SECONDS, *upset):
            return False
        if world.reader.kind in {"nvml", "triton"} and self._endpoint.terms.load_concurrency > 1:
            return False  # one of several that were loaded at once may count as all of them
        versions = self._endpoint.catalog.versions[key]
        if world.reader.kind == "host" and not all(item.spec.is_python for item in versions):
            return False  # the model may count as what others took beside it
        names = {model.name for model in self._known_in_triton().values()}
        if any(held.name not in names for held in world.all_held()):
            return False  # an earlier adapter has left it, or it is stuck
        others = [spec for spec in self.present() if spec.model_id != key and stays(spec)]
        others += [spec for name, spec in oracle.present.items() if name != key]
        booked = world.truth.held["baseline"] + world.strayed_bytes()
        booked += sum(map(oracle.most, others))
        # what has come while its load is not over, as in a warm-up, counts twice
        booked += sum(oracle.most(each) for each in others if each.model_id in self._arriving)
        arriving = sum(oracle.most(held.spec) for held in world.arriving())
        booked = max(booked, world.truth.most_since(world.now - _RECENT_SECONDS) + arriving)
        most = max(oracle.most(item.spec) for item in versions)
        return booked + most + oracle.settings.reserve < oracle.limit

    def _is_disk_short(self, key: str) -> bool:
        """Whether there may be too little room on disk beside what cannot leave."""
        endpoint = self._endpoint
        catalog, terms = endpoint.catalog, endpoint.terms
        staying = sum(
            max(map(_on_disk, items))
            for name, items in catalog.versions.items()
            if name != key and self._stays(name)
        )
        if self._since(self._world.now - _LONG_SECONDS, "fill"):
            return True
        limit = min(terms.cache_limit or catalog.disk_bytes * 0.9, catalog.disk_bytes)
        return staying + 2 * max(map(_on_disk, catalog.versions[key])) > limit

    # -- rule 4: evictions ------------------------------------------------------------------

    def note_log_line(self, event: str, fields: dict[str, object]) -> None:
        """An adapter that lives has written this line."""
        if event == "model.unloaded":
            self._freed_at = self._world.now
        if event == "model.loading":
            self._load_begun[str(fields["model_id"])] = self._world.now
            self._arriving.add(str(fields["model_id"]))
        if event in {"model.loaded", "model.load_failed", "model.load_refused"}:
            self._arriving.discard(str(fields["model_id"]))
        judges = {"room": self._for_room, "disk": self._for_disk, "idle": self._as_idle}
        reason = fields.get("evicted") if event == "model.unloading" else None
        if reason in judges:
            self._check_eviction(str(fields["model_id"]), str(reason))
            if not judges[reason](str(fields["model_id"])):
                said = f"{fields['model_id']} was evicted for {reason}, and there was no need"
                raise Violated("4 evicted", said)

    def _check_eviction(self, key: str, reason: str) -> None:
        """Raise if something keeps the model."""
        model = self._known_in_triton()[key]
        if not model.is_for_calls:
            raise Violated("4 evicted", f"{key} was evicted, and is not one of calls")
        if self._is_kept(key):
            raise Violated("4 evicted", f"{key} was evicted, which a platform has loaded")
        if requests := self.busy[model.name]:
            raise Violated("4 evicted", f"{key} was evicted amid {requests} requests")
        if self.is_pinned(key) and not self._since(0.0, "stub ended", key=key):
            raise Violated("4 evicted", f"{key} was evicted for {reason}, and is pinned")

    def _for_room(self, key: str) -> bool:
        """Whether something that is wanted may not fit beside all that there is."""
        oracle, world = self._oracle, self._world
        wanted = self._wanted() + [name for name, count in oracle.loading.items() if count > 0]
        # nobody waits for new versions
        wanted += [name for name in self._arriving if name in world.newest]
        if self._since(world.now - _LONG_SECONDS, "out of memory", "caller left", "echo"):
            return True
        for name in wanted:
            specs = [world.newest[name]]
            if name in self._endpoint.catalog.versions:
                specs = [item.spec for item in self._endpoint.catalog.versions[name]]
            others = [*self.present(), *oracle.present.values()]
            needed = max(map(oracle.most, specs))
            if not all(map(oracle.is_known, specs)):
                needed = max(needed, _UNKNOWN_BYTES)
            if not self._has_some_room(needed, others):
                return True
        return False

    def _has_some_room(self, needed: int, others: list[Spec]) -> bool:
        """Return whether some device surely has room for so much beside these."""
        oracle, truth = self._oracle, self._world.truth
        # loads in progress are in the readings, and are reserved
        arriving = sum(oracle.most(held.spec) for held in self._world.arriving())
        kept = truth.held["baseline"] + truth.held.get("strangers", 0)
        for gpu, limit in enumerate(oracle.limits):
            used = truth.most_since(self._world.now - _RECENT_SECONDS, gpu) + arriving
            booked = max(kept + oracle.booked_on(gpu, others), used)
            if booked + needed <= (limit - oracle.settings.reserve) * 0.9:
                return True
        return False

    def _wanted(self) -> list[str]:
        """Return the models that calls have asked for, though these may have given up."""
        states = ("COMING", "LOADING")
        coming = [m.id for m in self._models_of_store() if m.state in states and not m.is_update]
        return [*coming, *(key for key, count in self.waiting.items() if count)]

    def _for_disk(self, key: str) -> bool:
        return any(name != key for name in self._wanted())

    def _as_idle(self, key: str) -> bool:
        seconds = self._endpoint.terms.idle_unload_seconds
        since = self._world.now - self.used_at.get(key, -_LONG_SECONDS)
        return bool(seconds) and since >= seconds

    # -- rule 5: quiet moments --------------------------------------------------------------

    def is_at_rest(self) -> bool:
        models = self._models_of_store()
        are_settled = not self._stores.waiting and all(
            _is_settled(model) and not model.is_update for model in models
        )
        if self._endpoint.terms.idle_unload_seconds:
            are_settled &= all(
                self.is_pinned(model.id) or not model.is_for_calls for model in models
            )
        use = self._endpoint.cache.disk()
        return are_settled and not use.fetching_bytes

    def rest(self, endless: set[str]) -> None:
        """Nothing is under way any more but unloads of the models `endless`: the books of residency
        and of the cache are right.
        """
        models = self._models_of_store()
        if self._stores.waiting:
            raise Violated("5 left over", "callers count as waiting, and there are none")
        known = self._known_in_triton()
        for model in models:
            if not _is_settled(model):
                raise Violated("5 left over", f"{model.id} is {model.state}")
        for_calls = {model.id for model in known.values() if model.is_for_calls}
        if extra := for_calls - {model.id for model in models} - endless:
            raise Violated("5 left over", f"no call has loaded {sorted(extra)}")
        for key in filter(self._is_kept, self.kept):
            self._stays_a_platforms(key, known.get(key))
        folders = {model.folder for model in self._world.known_models()}
        self._cache_is_right(len(folders - {None}))

    def _stays_a_platforms(self, key: str, model: KnownModel | None) -> None:
        if model is None:
            raise Violated("4 evicted", f"{key} was loaded by its name, and is gone")
        if model.is_for_calls:
            raise Violated("4 evicted", f"{key} was loaded by its name, and may be evicted")

    def _cache_is_right(self, pinned: int) -> None:
        endpoint, cache = self._endpoint, self._endpoint.cache
        folders = sorted(endpoint.artifacts.iterdir())
        if left := [*endpoint.work.iterdir()]:
            raise Violated("5 cache", f"{len(left)} folders of fetches are left over")
        if len(folders) != cache.disk().artifacts:
            known = cache.disk().artifacts
            said = f"{len(folders)} artifacts are on disk, and the cache knows {known}"
            raise Violated("5 cache", said)
        real = 0
        for folder in folders:
            files = folder / "files"
            endpoint.spec_of(labels_of(_package(files)), "an artifact")
            # folders count as a block each, in the books
            real += used(files) + BLOCK_BYTES * sum(
                1 for p in [files, *files.rglob("*")] if p.is_dir()
            )
        use = cache.disk()
        if use.fetching_bytes or cache.used_bytes != use.size_bytes:
            raise Violated("5 cache", f"{use.fetching_bytes} bytes stay reserved for fetches")
        if use.size_bytes != real:
            raise Violated("5 cache", f"it counts {use.size_bytes} bytes, and has {real}")
        if cache.used_bytes > cache.limit_bytes:
            raise Violated("5 cache", f"{cache.used_bytes} bytes, of {cache.limit_bytes}")
        if (held := cache.disk().artifacts - cache.unused()[0]) != pinned:
            raise Violated("5 cache", f"{held} artifacts count as in use, and {pinned} are")


def _is_settled(model: KnownModel) -> bool:
    """Return whether nothing is to become of the model. A platform's own may stay dead."""
    is_dead = model.state == "DEAD" and not model.is_for_calls
    return is_dead or model.state == "READY"


def _package(files: Path) -> dict[str, bytes]:
    [package] = files.iterdir()
    return files_at(package)


def _on_disk(item: Item) -> int:
    folders = 3 if item.is_folder else 1
    config = disk_bytes(item.size_of(CONFIG)) if item.is_folder else 0
    return disk_bytes(item.size_bytes) + config + folders * BLOCK_BYTES
