"""Residency: which of the models in the stores are in memory, for all listeners together."""

import asyncio
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from adapter.control.desired import DesiredModel
from adapter.control.lease import Lease
from adapter.control.models import ModelControl
from adapter.control.ports import Artifacts
from adapter.control.residency.eviction import Eviction
from adapter.control.residency.on_demand import OnDemandLoader, source_of
from adapter.control.residency.updater import Updater
from adapter.control.residency.waits import Waits
from adapter.core.artifacts import ArtifactKey, CacheUse, DiskUse, StoreFiles, parse_artifact_path
from adapter.core.desired import CALLS_REFUSED_SECONDS, Reason
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.core.residency.policies import POLICIES
from adapter.core.residency.waiting import WaitLimits, room_seconds
from adapter.core.state import ModelState
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    BackendUnavailable,
    CapacityError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
)
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.traffic import leave_out

_READY = ModelState.READY  # looking up a member of an enumeration is slow in Python 3.11


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of those names."""

    pin: tuple[str, ...] = ()
    idle_unload_seconds: float = 0.0
    model_wait_seconds: float = 55.0
    load_concurrency: int = 2
    revalidate_seconds: float = 0.0
    eviction: str = "cost"
    min_residency_seconds: float = 1.0
    limits: WaitLimits = field(default_factory=WaitLimits)


def _eviction(control: ModelControl, waits: Waits, metrics: Metrics, options: Options) -> Eviction:
    return Eviction(
        *(control.unloads, waits, metrics, options.pin),
        policy=POLICIES[options.eviction](),
        min_seconds=options.min_residency_seconds,
        idle_seconds=options.idle_unload_seconds,
    )


class Residency:
    """`stores` are the names of the stores, "" for model_store."""

    def __init__(
        self,
        control: ModelControl,
        artifacts: Artifacts,
        metrics: Metrics,
        options: Options,
        *,
        stores: Collection[str] = ("",),
    ) -> None:
        self._uses = {use: metrics.endpoint_requests.labels(use.value) for use in CacheUse}
        self._count_hit = self._uses[CacheUse.HIT].inc
        self.options = options
        seconds, refused = options.model_wait_seconds, CALLS_REFUSED_SECONDS
        most, turn = options.load_concurrency, room_seconds(seconds)
        self.waits = Waits(options.limits, Reason("call", most, turn, refused, keeps=False))
        self.eviction = _eviction(control, self.waits, metrics, options)
        self._on_demand = OnDemandLoader(
            control,
            artifacts,
            self.eviction,
            metrics,
            wait_seconds=seconds,
        )
        self._updater = Updater(
            control,
            artifacts,
            self.eviction,
            self._on_demand,
            self._bring_for_nobody,
            seconds=options.revalidate_seconds,
        )
        self._control = control
        self._registry = control.registry
        self._registry.release = self._release
        self._artifacts = artifacts
        self._metrics = metrics
        self._stores = stores
        control.evictor = self.eviction
        metrics.endpoint_loaded.set_function(self.eviction.count)
        metrics.endpoint_waiting.set_function(lambda: self.waits.count)

    # -- what frontends ask -----------------------------------------------------------------

    def lease(self, model_id: ModelId, key: ArtifactKey | None = None) -> Lease | None:
        """Return a lease if the model is loaded, by whomever; None if it must be waited for, also
        where Triton has ended since.

        It is for the fast path: a look-up, no IO. With a key, raise ArtifactNotFound if the model
        was loaded from another one, and the error of a call that would be refused before it waits.
        """
        record = self._registry.get(model_id)  # as `_ready` does, without a call more
        if (
            record is None
            or record.state is not _READY
            or self._control.triton_status.has_lost(record)
        ):
            if key is not None:
                self._refuse(model_id, key)
            return None
        if key is not None and record.files is not None and record.files.key != key:
            raise _another(model_id, key, record.files.key)
        lease = self._control.leases.of(record)
        self._count_hit()
        return lease

    def _refuse(self, model_id: ModelId, key: ArtifactKey) -> None:
        """Raise the error of a call that would be refused before it waits for its model."""
        self._control.refuse_unless_open()  # before anything is fetched for nothing
        known = self._registry.get(model_id)
        if known is not None and self._control.triton_status.has_lost(known):
            return  # `wait_for_lease` catches up with Triton first
        is_dead = known is not None and known.state is ModelState.DEAD  # its name is free
        if (other := self._key_in_use(model_id)) not in {None, key} and not is_dead:
            raise _another(model_id, key, other)
        self.waits.refuse_known(model_id)
        self.waits.refuse_one_more(model_id)

    async def wait_for_lease(
        self, model_id: ModelId, key: ArtifactKey, caller: str = ""
    ) -> tuple[Lease, CacheUse]:
        """Return a lease of the model, which is fetched and loaded first where need be. `caller`:
        who asks, if that is known; each has its turn.

        The lease must be begun before anything else is awaited. Raises ModelNotReady when that
        takes longer than `model_wait_seconds` (the load goes on), TooManyWaiting, NoRoom, what the
        store and the load raise, and BackendUnavailable amid a start or a drain.
        """
        if (lease := self.lease(model_id, key)) is not None:
            self._note_use(model_id, caller)
            return lease, CacheUse.HIT
        begun = clock.monotonic()
        deadline = begun + self.options.model_wait_seconds
        await self._control.catch_up(model_id)
        self._refuse(model_id, key)
        leave_out()
        wait = self.waits.begin(model_id, key, caller)
        try:
            record, use = await self._served(wait, deadline)
            # no eviction comes before the caller has begun its lease
            lease = self._control.leases.of(record)
            self._uses[use].inc()
            self._note_use(model_id, caller)
            return lease, use
        finally:
            self.waits.end(wait, caller)
            self._metrics.endpoint_wait_seconds.observe(clock.monotonic() - begun)

    async def bring(self, model_id: ModelId, key: ArtifactKey) -> None:
        """Have the model loaded, as for a call that waits as long as it takes."""
        if self._ready(model_id) is None:
            wait = self.waits.begin(model_id, key)
            try:
                await self._served(wait, math.inf)
            finally:
                self.waits.end(wait)

    async def load(self, model_id: ModelId, is_forced: bool = False) -> bool:
        """Load a model of a store by its name, as V2's repository does: it is not evicted then.
        `is_forced`: also where it is loaded already. Return whether a store has it.
        """
        if (key := await self.find(model_id)) is None:
            return False
        self._registry.lost.pop(model_id, None)
        if is_forced and model_id in self._registry:
            work = self._load_again(model_id, key)
            await asyncio.shield(self._control.operations.start("load", model_id, work))
        await self.bring(model_id, key)
        if (record := self._ready(model_id)) is not None:
            record.is_on_demand = False
        return True

    async def _load_again(self, model_id: ModelId, key: ArtifactKey) -> None:
        """Replace the model by the version that the store has now. One that is not ready is
        unloaded for it.
        """
        record = self._ready(model_id)
        if record is None or record.files is None:
            await self._control.make_way(model_id)
            return
        files = StoreFiles(key, used=record.files.used)
        files.artifact, _ = await self._on_demand.fetched(model_id, files, ())
        await self._control.updates.update(record, source_of(files.artifact), files)

    async def find(self, model_id: ModelId) -> ArtifactKey | None:
        """Return the key of a model that is asked for by name, as V2 does; None where no store has
        it. Raises as the store does.
        """
        if (key := self._key_in_use(model_id)) is not None:
            return key
        key = self._asked_for(model_id)
        return None if key is None else await self._artifacts.find(key)

    def _asked_for(self, model_id: ModelId) -> ArtifactKey | None:
        """Return the key that the name is, of a store that there is."""
        try:
            key = self.key_of(model_id)
        except InvalidRequest:
            return None
        return key if key.store in self._stores else None

    def key_of(self, name: str) -> ArtifactKey:
        """Return the key that `name` is, ENDPOINT/KEY or KEY. Raises InvalidRequest."""
        first, _, rest = name.partition("/")
        store, path = (first, rest) if rest and first in self._stores else ("", name)
        return ArtifactKey(store, parse_artifact_path(path))

    async def wait_for_named(self, model_id: ModelId, limit_seconds: float) -> Lease:
        """Return a lease of a model that is asked for by name alone, as V2 does: it is loaded
        first where it is not and a store has it. `limit_seconds`: for a load by somebody else.
        Raises ArtifactNotFound if a store was asked for it and has no such key.
        """
        if (lease := self.lease(model_id)) is not None:
            return lease
        if (key := self._key_in_use(model_id)) is not None:
            return (await self.wait_for_lease(model_id, key))[0]
        await self._control.catch_up(model_id)
        try:
            return await self._control.wait_for_lease(model_id, limit_seconds)
        except ModelNotFound as error:
            if (key := await self.find(model_id)) is None:
                asked = self._asked_for(model_id)
                if asked is None or model_id in self._registry:
                    raise
                why = f"{error}, and in the store there is no such key: {asked}"
                raise ArtifactNotFound(why, model_id=model_id) from error
        return (await self.wait_for_lease(model_id, key))[0]

    @property
    def waiting(self) -> int:
        """Count the callers that have no lease yet."""
        return self.waits.count

    @property
    def evictions(self) -> Mapping[str, int]:
        """Count the models that were evicted, by reason."""
        return self.eviction.evictions

    def waiting_for(self, model_id: ModelId) -> int:
        """Return how many callers wait for the model."""
        wait = self.waits.get(model_id)
        return 0 if wait is None else wait.callers.total()

    def is_pinned(self, model_id: ModelId) -> bool:
        """Return whether the model is never evicted."""
        return self.eviction.is_pinned(model_id)

    def models(self) -> list[ModelRecord]:
        """Return the models that calls have had fetched."""
        return self._registry.of_stores()

    def disk(self) -> DiskUse:
        """Return how full the disk cache is."""
        return self._artifacts.disk()

    def unused(self) -> tuple[int, int]:
        """Return how many models are on disk alone, and their bytes."""
        return self._artifacts.unused()

    async def make_room(self, error: CapacityError) -> bool:
        """Evict idle models until what `error` needs fits; False when nothing could go."""
        return await self.eviction.evict_for(error)

    # -- start, housekeeping and stop -------------------------------------------------------

    async def run_housekeeping(self) -> NoReturn:
        await asyncio.gather(self.eviction.run(), self._updater.run())
        raise AssertionError("they never end")

    async def sweep(self) -> None:
        """Do once what `run_housekeeping` does all the time."""
        await self.eviction.unload_left()
        await self.eviction.unload_idle()
        await self._updater.check()
        await self._updater.begin()
        await asyncio.gather(*self._updater.under_way.values())

    async def close(self) -> None:
        """End what is being fetched; what is being loaded is control's."""
        tasks: list[asyncio.Task[Any]] = [*self._updater.under_way.values()]
        tasks += [wait.task for wait in self.waits if wait.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside -----------------------------------------------------------------------------

    def _note_use(self, model_id: ModelId, caller: str) -> None:
        record = self._registry.get(model_id) if caller else None
        if record is not None and record.files is not None:
            record.files.used[caller] = clock.monotonic()

    def _release(self, files: StoreFiles) -> None:
        for artifact in files.taken():
            self._artifacts.release(artifact)

    def _key_in_use(self, model_id: ModelId) -> ArtifactKey | None:
        """Return the key that the model was fetched from, or is to be."""
        record, wait = self._registry.find(model_id), self.waits.get(model_id)
        if record is not None and record.files is not None:
            return record.files.key
        return wait.key if wait is not None else None

    def _ready(self, model_id: ModelId) -> ModelRecord | None:
        record = self._registry.get(model_id)
        return record if record is not None and record.state is _READY else None

    async def _served(self, wait: DesiredModel, deadline: float) -> tuple[ModelRecord, CacheUse]:
        """Wait until the model is loaded, for a caller who counts as waiting meanwhile."""
        while True:
            task = wait.task or self._begin(wait)
            left = None if deadline == math.inf else max(0.0, deadline - clock.monotonic())
            await asyncio.wait({task}, timeout=left)
            if not task.done():
                raise self._not_ready(wait)
            if task.cancelled():
                raise BackendUnavailable("the adapter is stopping", delivered=False)
            if (error := task.exception()) is not None:
                raise error.with_traceback(None)
            if (record := self._ready(wait.model_id)) is not None:
                return record, task.result()

    def _begin(self, wait: DesiredModel) -> asyncio.Task[CacheUse]:
        """Begin to make the model resident, for all who ask; nobody who leaves ends that."""
        task = wait.task = asyncio.create_task(self._on_demand.bring(wait))
        task.add_done_callback(partial(self._ended, wait))
        return task

    def _ended(self, wait: DesiredModel, task: asyncio.Task[CacheUse]) -> None:
        self.waits.task_ended(wait, None if task.cancelled() else task.exception())

    async def _bring_for_nobody(self, model_id: ModelId, key: ArtifactKey) -> None:
        wait = self.waits.of(model_id, key)
        await asyncio.shield(wait.task or self._begin(wait))

    def _not_ready(self, wait: DesiredModel) -> AdapterError:
        model_id, known = wait.model_id, self._registry.find(wait.model_id)
        if wait.lack is not None and wait.life == self._control.triton_status.now():
            return self._on_demand.explain_no_room(wait, wait.lack)
        state = "waiting" if known is None else known.state.value.lower().replace("_", " ")
        if known is not None and known.state is ModelState.FETCHING and known.files is not None:
            percent = known.files.progress.percent
            state = state if percent is None else f"{state}, {percent} %"
        why = f"model {model_id!r} is not ready yet ({state}): its load goes on, so try again later"
        return ModelNotReady(why, model_id=model_id)


def _another(model_id: ModelId, key: ArtifactKey, other: ArtifactKey | None) -> ArtifactNotFound:
    """Return the error for a key whose model was loaded from another one: V2 finds a model without
    the suffix of its archive, an endpoint's key must match exactly.
    """
    why = f"there is no {key}: a model of that name was loaded from {other}"
    return ArtifactNotFound(why, model_id=model_id)
