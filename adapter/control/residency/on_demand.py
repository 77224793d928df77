"""Makes a model resident: fetched, then loaded once there is a slot and room."""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from functools import partial

from adapter.control.desired import DesiredModel
from adapter.control.models import ModelControl
from adapter.control.ports import Artifacts
from adapter.control.residency.eviction import Eviction
from adapter.core.artifacts import Artifact, CacheUse, StoreFiles
from adapter.core.model import ModelId, ModelSource
from adapter.core.residency.terms import Terms
from adapter.core.residency.waiting import explain_no_room, room_seconds
from adapter.core.state import ModelEvent, ModelState
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    CapacityError,
    ModelNotFound,
    NoRoom,
    OutOfMemory,
    StoreDenied,
    StoreUnavailable,
)
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics

# A load that lacks room is tried again after a moment, or as models became idle and went for it. To
# look for those at each end of a request would take as much as all the requests.
_TRY_SECONDS = 0.25
_LOOK_SECONDS = 0.005


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
        eviction: Eviction,
        metrics: Metrics,
        *,
        wait_seconds: float,
    ) -> None:
        self._control = control
        self._registry = control.registry
        self._artifacts = artifacts
        self._eviction = eviction
        self._metrics = metrics
        self._room_seconds = room_seconds(wait_seconds)

    async def bring(self, wait: DesiredModel) -> CacheUse:
        """Make the model resident; return where its files were."""
        while not await self._is_loaded_by_others(wait.model_id):
            files, use = await self._files(wait)
            if files is None:
                continue  # somebody else has begun to load the model meanwhile
            try:
                if await self._load(wait, files):
                    return use
            finally:
                self._registry.give_up(wait.model_id, files)
        return CacheUse.HIT

    async def _is_loaded_by_others(self, model_id: ModelId) -> bool:
        """Wait for a platform's load or an unload of the model to end; return whether it is loaded
        then. Unload the rest of a dead model.
        """
        while (known := self._registry.get(model_id)) is not None:
            if known.state is ModelState.UNLOADING:
                async with self._control.operations.lock(model_id):
                    pass
            elif known.state is ModelState.DEAD:
                with suppress(ModelNotFound):  # it is gone
                    await self._control.make_way(model_id)
            else:
                # a platform's load fails where there is no room; calls evict others, and wait
                with suppress(CapacityError):
                    await self._control.wait_for_load(model_id)
                    return True
        return False

    async def _files(self, wait: DesiredModel) -> tuple[StoreFiles | None, CacheUse]:
        """Fetch the model's files unless they are on disk; return them and where they came from.
        Return None for them once others have loaded the model.
        """
        known = self._registry.coming.get(wait.model_id)
        if known is not None:
            return known.files, CacheUse.DISK
        assert wait.key is not None  # noqa: S101 - callers ask by key
        record = self._registry.begin_fetch(wait.model_id, wait.key)
        files = record.files
        assert files is not None  # noqa: S101 - of what is fetched
        try:
            artifact, use = await self.fetched(wait.model_id, files, wait.callers)
        except BaseException:
            if self._registry.find(wait.model_id) is record:
                self._registry.apply(record, ModelEvent.FETCH_FAILED)
            raise
        if self._registry.find(wait.model_id) is not record:
            self._artifacts.release(artifact)
            return None, use
        files.artifact = artifact
        self._registry.apply(record, ModelEvent.FETCHED)
        return files, use

    async def fetched(
        self,
        model_id: ModelId,
        files: StoreFiles,
        callers: Collection[str],
        *,
        unloads: bool = True,
    ) -> tuple[Artifact, CacheUse]:
        """Fetch the version that the store has now. `unloads`: other models may be unloaded for its
        room on disk.
        """
        begun = clock.monotonic()
        try:
            artifact, use = await self._artifacts.fetch(
                files.key,
                files.progress,
                models=self._eviction if unloads else None,
                callers=callers,
            )
        except AdapterError as error:
            self._fetch_failed(model_id, error, clock.monotonic() - begun, unloads)
            raise
        seconds = clock.monotonic() - begun
        files.fetch_seconds = seconds - files.progress.waited_seconds
        files.checked_at = clock.monotonic()
        if use is CacheUse.MISS:
            self._metrics.endpoint_downloading_seconds.observe(seconds)
            self._metrics.history.done("fetch", model_id, seconds, artifact.size_bytes)
        return artifact, use

    def _fetch_failed(
        self, model_id: ModelId, error: AdapterError, seconds: float, unloads: bool
    ) -> None:
        if isinstance(error, StoreDenied | StoreUnavailable):
            self._metrics.endpoint_store_failures.labels(type(error).__name__).inc()
        elif isinstance(error, NoRoom):
            if not unloads:  # nobody waits for it, and it is tried again
                return
            self._metrics.endpoint_no_room.inc()
        self._metrics.history.failed("fetch", model_id, error, seconds)

    async def _load(self, wait: DesiredModel, files: StoreFiles) -> bool:
        """Load; wait for room while what keeps others keeps them for now only. Return False if
        somebody else has begun to load the model by its name.
        """
        patience, files.is_tried_again = self._room_seconds, True
        terms = Terms(is_on_demand=True)

        async def wait_for_room(error: CapacityError) -> None:
            nonlocal patience
            is_stuck = files.artifact is None
            is_left = isinstance(error, OutOfMemory) and not wait.callers
            may_come = self._eviction.may_come(wait.model_id)
            if is_stuck or is_left or patience <= 0 or not may_come:
                refusal = self.explain_no_room(wait, error)
                if isinstance(refusal, NoRoom):
                    self._metrics.endpoint_no_room.inc()
                if refusal is error:
                    raise error
                raise refusal from error
            wait.lack, wait.life = error, self._control.triton_status.now()
            patience -= await self._waited(wait, error)
            wait.lack = None

        wait.load = partial(self._try, wait.model_id, files, terms)
        wait.wait_for_room, wait.ends = wait_for_room, 0
        return bool(await self._control.desired.until_loaded(wait))

    def explain_no_room(self, wait: DesiredModel, error: CapacityError) -> AdapterError:
        """Return the error for a model that does not fit while no other model can be evicted."""
        others = [record for record in self._registry.records() if record.id != wait.model_id]
        may_come = self._eviction.may_come(wait.model_id)
        return explain_no_room(wait.model_id, error, has_others=bool(others), may_come=may_come)

    async def _waited(self, wait: DesiredModel, error: CapacityError) -> float:
        """Wait until models that became idle were evicted for the error, or for a moment; return
        the seconds in which there was nothing to wait for but requests in flight. Loads and unloads
        bring a change for as long as anybody wants the model.
        """
        begun, memory = clock.monotonic(), self._control.memory
        is_moving = memory.is_busy and bool(wait.callers)
        while await self._eviction.became_idle() and clock.monotonic() - begun < _TRY_SECONDS:
            if not memory.is_to_come and await self._eviction.evict_for(error):
                break
            await asyncio.sleep(_LOOK_SECONDS)
        return 0.0 if is_moving else clock.monotonic() - begun

    async def _try(self, model_id: ModelId, files: StoreFiles, terms: Terms) -> bool:
        begun, artifact = clock.monotonic(), files.artifact
        if artifact is None:
            return False
        try:
            await self._control.load_on_terms(model_id, source_of(artifact), terms)
        except AlreadyLoaded:
            with suppress(CapacityError):  # as in `_is_loaded_by_others`
                await self._control.wait_for_load(model_id)
            return False
        self._metrics.endpoint_loading_seconds.observe(clock.monotonic() - begun)
        return True
