"""Makes a model resident: fetched, then loaded once there is a slot and room."""

from adapter.control.models import ModelControl
from adapter.control.ports import Artifacts
from adapter.control.recovery import CALLS_REFUSED_SECONDS
from adapter.control.residency.entries import Entries, Entry
from adapter.control.residency.eviction import Eviction
from adapter.core.artifacts import Artifact, CacheUse, FetchProgress
from adapter.core.model import ModelId, ModelSource
from adapter.core.registry import ModelRecord
from adapter.core.residency.state import ResidencyEvent, ResidencyState
from adapter.core.residency.terms import Terms
from adapter.core.residency.waiting import room_seconds
from adapter.core.state import ModelState
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    BackendUnavailable,
    CapacityError,
    NoRoom,
    OutOfMemory,
    StoreDenied,
    StoreUnavailable,
)
from adapter.runtime import clock
from adapter.runtime.fair_slots import FairSlots
from adapter.telemetry.metrics import Metrics


def source_of(artifact: Artifact) -> ModelSource:
    return ModelSource(artifact.folder, is_cached=True, key=str(artifact.key))


class OnDemandLoader:
    """`wait_seconds`: how long a caller waits; `load_concurrency`: loads at a time, without those
    that hang in Triton.
    """

    def __init__(
        self,
        control: ModelControl,
        artifacts: Artifacts,
        entries: Entries,
        eviction: Eviction,
        metrics: Metrics,
        *,
        wait_seconds: float,
        load_concurrency: int,
    ) -> None:
        self._control = control
        self._artifacts = artifacts
        self._entries = entries
        self._eviction = eviction
        self._metrics = metrics
        self._room_seconds = room_seconds(wait_seconds)
        self._slots = FairSlots(load_concurrency, self._hangs)

    async def bring(self, entry: Entry) -> CacheUse:
        """Make the model resident; return where its files were."""
        async with entry.lock:
            if self._entries.loses(entry):
                entry.apply(ResidencyEvent.LOST)
                self._entries.release(entry)
            elif entry.state is ResidencyState.RESIDENT:
                await self._unload_ended(entry)
                return CacheUse.HIT
            if await self._is_loaded_by_others(entry):
                return CacheUse.HIT
            use = await self._fetch(entry)
            await self.load(entry)
            return use

    async def _unload_ended(self, entry: Entry) -> None:
        """Wait for the end of an unload that somebody else has begun."""
        known = self._control.registry.get(entry.model_id)
        if known is not None and known.state is ModelState.UNLOADING:
            async with self._control.operations.lock(entry.model_id):
                pass

    async def _is_loaded_by_others(self, entry: Entry) -> bool:
        """Return whether a platform has loaded the model, or does so now."""
        known = self._control.registry.get(entry.model_id)
        if known is None or known.state not in {ModelState.LOADING, ModelState.READY}:
            return False
        try:
            await self._control.loaded(entry.model_id)
        except CapacityError:  # the platform is told so; calls have models evicted, and wait
            return False
        return True

    async def _fetch(self, entry: Entry) -> CacheUse:
        entry.progress = FetchProgress()
        entry.apply(ResidencyEvent.ASKED_FOR)
        try:
            entry.artifact, use = await self.fetched(entry, entry.progress)
        except BaseException:
            entry.apply(ResidencyEvent.FETCH_FAILED)
            raise
        entry.checked_at = clock.monotonic()
        entry.apply(ResidencyEvent.FETCHED)
        return use

    async def fetched(
        self, entry: Entry, progress: FetchProgress, *, unloads: bool = True
    ) -> tuple[Artifact, CacheUse]:
        """`unloads`: other models may be unloaded for its room on disk."""
        begun = clock.monotonic()
        try:
            artifact, use = await self._artifacts.fetch(
                entry.key,
                progress,
                models=self._eviction if unloads else None,
                callers=entry.callers,
            )
        except AdapterError as error:
            self._fetch_failed(entry, error, clock.monotonic() - begun, unloads)
            raise
        seconds = clock.monotonic() - begun
        entry.fetch_seconds = seconds - progress.waited_seconds
        if use is CacheUse.MISS:
            self._metrics.endpoint_downloading_seconds.observe(seconds)
            size = artifact.size_bytes
            self._metrics.history.done("fetch", entry.model_id, seconds, size)
        return artifact, use

    def _fetch_failed(
        self, entry: Entry, error: AdapterError, seconds: float, unloads: bool
    ) -> None:
        if isinstance(error, StoreDenied | StoreUnavailable):
            self._metrics.endpoint_store_failures.labels(type(error).__name__).inc()
        elif isinstance(error, NoRoom):
            if not unloads:  # nobody waits for it, and it is tried again
                return
            self._metrics.endpoint_no_room.inc()
        self._metrics.history.failed("fetch", entry.model_id, error, seconds)

    async def load(self, entry: Entry) -> None:
        """Load what was fetched, whose files may leave the disk when that fails."""
        try:
            await self._load(entry)
        except BaseException:
            self._entries.release(entry)
            raise
        finally:
            entry.lack = None

    async def _load(self, entry: Entry) -> None:
        """Load; wait for room while what keeps others keeps them for now only."""
        patience, was_broken_off = self._room_seconds, False
        terms = Terms(is_on_demand=True)
        while True:
            await self._turn(entry, was_broken_off=was_broken_off)
            async with self._slots.slot(entry.model_id, entry.callers):
                try:
                    return await self._try(entry, terms)
                except CapacityError as error:
                    entry.apply(ResidencyEvent.NO_ROOM)
                    is_left = isinstance(error, OutOfMemory) and not entry.waiting
                    if is_left or patience <= 0 or not self._eviction.may_come(entry):
                        self._metrics.endpoint_no_room.inc()
                        raise no_room(entry, error) from error
                    entry.lack = error
                except BackendUnavailable as error:  # Triton has ended: it is started again
                    entry.apply(ResidencyEvent.LOAD_FAILED)
                    if was_broken_off:  # it may be what ends Triton
                        raise BackendUnavailable(str(error), delivered=True) from error
                    if not error.delivered:
                        raise
                    was_broken_off = True
                    continue
                except BaseException:
                    entry.apply(ResidencyEvent.LOAD_FAILED)
                    raise
            patience -= await self._waited(entry)

    def _hangs(self, name: str) -> bool:
        known = self._control.registry.get(ModelId(name))
        return known is not None and self._control.load_threads.hangs_since(known) is not None

    async def _turn(self, entry: Entry, *, was_broken_off: bool) -> None:
        """Wait until the model may be loaded, if it is suspected of ending Triton."""
        if not self._control.is_open:
            return
        model_id, deadline = entry.model_id, clock.monotonic() + self._room_seconds
        turn = self._control.recovery.turn
        try:
            await turn(model_id, deadline, refused_seconds=CALLS_REFUSED_SECONDS)
        except BackendUnavailable as error:  # no other machine is to try what may have ended this
            raise BackendUnavailable(str(error), delivered=was_broken_off) from error

    async def _waited(self, entry: Entry) -> float:
        """Wait for a change; return the seconds in which there was nothing to wait for but requests
        in flight. Loads and unloads bring one for as long as anybody wants the model.
        """
        begun = clock.monotonic()
        is_moving = self._control.memory.is_busy and entry.waiting > 0
        await self._eviction.changed()
        return 0.0 if is_moving else clock.monotonic() - begun

    async def _try(self, entry: Entry, terms: Terms) -> None:
        entry.apply(ResidencyEvent.LOAD_BEGUN)
        if self._control.is_open:
            await self._control.triton_status.wait_up(clock.monotonic() + self._room_seconds)
        assert entry.artifact is not None  # noqa: S101 - it was fetched
        entry.record = await self.loaded(entry, entry.artifact, terms)
        entry.apply(ResidencyEvent.LOADED)

    async def loaded(self, entry: Entry, artifact: Artifact, terms: Terms) -> ModelRecord:
        begun, source = clock.monotonic(), source_of(artifact)
        try:
            record = await self._control.load(entry.model_id, source, terms)
        except AlreadyLoaded:  # a platform was faster
            return await self._control.loaded(entry.model_id)
        self._metrics.endpoint_loading_seconds.observe(clock.monotonic() - begun)
        return record


def no_room(entry: Entry, error: CapacityError) -> NoRoom:
    """Return what callers are told of a model that does not fit, and for which nothing can go."""
    text = f"{error}; all that could make room is in use, pinned, or loaded by a platform"
    return NoRoom(text, model_id=entry.model_id)
