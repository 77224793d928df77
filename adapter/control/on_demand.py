"""Answer calls of models in stores: each model is fetched and loaded by its first call, for all."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from adapter.control.eviction import Eviction
from adapter.control.leases import Lease, Leases, is_exit
from adapter.control.loader import make_store_source
from adapter.control.memory import LoadTerms
from adapter.control.models import LoadRequest, Models
from adapter.control.operations import Kind, Operation
from adapter.control.ports import Artifacts, StoreSettings, TimeLimits
from adapter.control.triton import TritonStatus
from adapter.core import times
from adapter.core.admission import Purpose
from adapter.core.artifacts import ArtifactKey, CacheUse, parse_artifact_path
from adapter.core.blame import Requester
from adapter.core.model import ModelId
from adapter.core.record import LoadedFor, ModelRecord, OnExit, Step
from adapter.core.registry import Registry
from adapter.core.states import ModelState
from adapter.core.wanted import FILE_ERRORS
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    BackendUnavailable,
    CapacityError,
    InvalidRequest,
    ModelNotFound,
    ModelNotReady,
    NoRoom,
    OutOfMemory,
    TooManyWaiting,
)
from adapter.runtime import clock
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.traffic import leave_out

_MAX_FAILURES = 1024
_MAX_EXITS = 1  # of Triton that one call survives
_RETRY_AFTER_MS = 1000
# Models that are pinned or loaded explicitly stay until somebody unloads them.
_RETRY_AFTER_LONG_MS = 60_000
_SEE_ROOM = "see docs/endpoint.md#which-models-are-in-memory"


@dataclass(slots=True, eq=False)
class OnDemand:
    """Leases models of stores, which are fetched and loaded for the calls that need them."""

    registry: Registry
    leases: Leases
    models: Models
    eviction: Eviction
    status: TritonStatus
    artifacts: Artifacts
    metrics: Metrics
    settings: StoreSettings
    limits: TimeLimits
    # failures of the files, and until when each is repeated to callers
    _failures: dict[ModelId, tuple[AdapterError, float]] = field(default_factory=dict)
    _count_hit: Callable[[], None] = field(init=False)  # looking up a label is slow

    def __post_init__(self) -> None:
        self._count_hit = self.metrics.endpoint_requests.labels(CacheUse.HIT.value).inc

    # -- calls ------------------------------------------------------------------------------

    def lease(self, model_id: ModelId, key: ArtifactKey | None = None) -> Lease | None:
        """Return a lease of a model that is loaded; None if it must be waited for.

        With a key, raise the error of a call that would be refused before it waits.
        """
        record = self.registry.get(model_id)
        is_ready = record is not None and record.state is ModelState.READY
        if record is not None and is_ready and not self.status.has_lost(record):
            if key is not None and record.key is not None and record.key != key:
                raise _explain_other_key(model_id, key, record.key)
            self._count_hit()
            return self.leases.make(record)
        if key is not None:
            self._refuse(model_id, key, "")
        return None

    async def wait_for_lease(
        self,
        model_id: ModelId,
        key: ArtifactKey,
        caller: str = "",  # fetches and loads alternate among callers; "" if unknown
    ) -> tuple[Lease, CacheUse]:
        """Return a lease of the model, and where it was found; fetch and load it where need be.

        Raises ModelNotReady after the setting `model_wait_seconds`; the load continues for the next
        caller.
        """
        lease = self.lease(model_id, key)
        if lease is not None:
            self._record_caller(lease.record, caller)
            return lease, CacheUse.HIT
        started_at = clock.monotonic()
        self._refuse(model_id, key, caller)
        leave_out()
        try:
            with self.leases.count_caller(model_id, caller):
                deadline = started_at + self.limits.model_wait
                lease, use = await self._load_and_lease(model_id, key, deadline)
        finally:
            self.metrics.endpoint_wait_seconds.observe(clock.monotonic() - started_at)
        self.metrics.endpoint_requests.labels(use.value).inc()
        self._record_caller(lease.record, caller)
        return lease, use

    async def wait_for_named(self, model_id: ModelId, limit_seconds: float) -> Lease:
        """Return a lease of a model that is asked for by its name alone, as V2 does.

        `limit_seconds` bounds the wait for a load by somebody else. Raises ArtifactNotFound if no
        store has the name.
        """
        lease = self.lease(model_id)
        if lease is not None:
            return lease
        key = self._find_key_in_use(model_id)
        if key is None:
            try:
                return await self.models.wait_for_lease(model_id, limit_seconds)
            except ModelNotFound as error:
                key = await self._find_or_refuse(model_id, error)
        lease, _ = await self.wait_for_lease(model_id, key)
        return lease

    async def load(self, model_id: ModelId, is_forced: bool = False) -> bool:
        """Load the model, which then stays; return whether a store has it.

        `is_forced` also loads the store's present version of a model that is loaded.
        """
        key = await self.find(model_id)
        if key is None:
            return False
        self.models.refuse_given_up(model_id, Requester.PERSON)
        ready = self.registry.find_ready(model_id)
        if is_forced and ready is not None:
            await self.models.update(ready, key)
        # after an update too: the model may have been evicted before the update began
        await self.load_without_deadline(model_id, key)
        self.models.keep_loaded(model_id)
        return True

    async def load_without_deadline(self, model_id: ModelId, key: ArtifactKey) -> None:
        """Load the model unless it is loaded, and wait for the load however long it takes.

        Whoever waits here does not count among the callers that wait for the model.
        """
        await self._load_and_lease(model_id, key, math.inf)

    async def make_room(self, error: CapacityError) -> bool:
        """Evict idle models for an inference that ran out of memory; return whether any went."""
        return await self.eviction.make_room_for_inference(error)

    # -- names ------------------------------------------------------------------------------

    async def find(self, model_id: ModelId) -> ArtifactKey | None:
        """Return the key of a model that is asked for by name, as V2 does; None where no store has
        it. Raises as the store does.
        """
        key = self._find_key_in_use(model_id) or self._parse_key(model_id)
        return None if key is None else await self.artifacts.find(key)

    def key_of(self, name: str) -> ArtifactKey:
        """Return the key that `name` is, ENDPOINT/KEY or KEY. Raises InvalidRequest."""
        store, _, path = name.partition("/")
        if store and path and store in self.settings.names:
            return ArtifactKey(store, parse_artifact_path(path))
        return ArtifactKey("", parse_artifact_path(name))

    def _parse_key(self, model_id: ModelId) -> ArtifactKey | None:
        """Return the key that the name is, of a store that there is."""
        try:
            key = self.key_of(model_id)
        except InvalidRequest:
            return None
        return key if key.store in self.settings.names else None

    def _find_key_in_use(self, model_id: ModelId) -> ArtifactKey | None:
        """Return the key that the model was fetched from, or is to be."""
        keys = [record.key for record in self.models.list_versions(model_id)]
        return next((key for key in keys if key is not None), None)

    async def _find_or_refuse(self, model_id: ModelId, error: ModelNotFound) -> ArtifactKey:
        """Return the key of a model that is asked for by name. If no store has it, raise
        ArtifactNotFound with the missing key, or `error` for a name that can be no key.
        """
        key = await self.find(model_id)
        if key is not None:
            return key
        missing_key = self._parse_key(model_id)
        if missing_key is None or self.registry.get(model_id) is not None:
            raise error
        text = f"{error}, and in the store there is no such key: {missing_key}"
        raise ArtifactNotFound(text, model_id=model_id) from error

    # -- refusals ---------------------------------------------------------------------------

    def _refuse(self, model_id: ModelId, key: ArtifactKey, caller: str) -> None:
        """Raise the error of a call that need not wait for its model."""
        self.status.refuse_unless_open()
        record = self.registry.get(model_id)
        is_dead = record is not None and record.state is ModelState.DEAD  # its name is free
        key_in_use = self._find_key_in_use(model_id)
        if key_in_use is not None and key_in_use != key and not is_dead:
            raise _explain_other_key(model_id, key, key_in_use)
        self._refuse_after_failure(model_id)
        self._refuse_crowd(model_id, caller)

    def _refuse_after_failure(self, model_id: ModelId) -> None:
        """Raise the failure of the model's files that a load met a moment ago, unless another load
        of the model is in progress.
        """
        error, until = self._failures.get(model_id, (None, 0.0))
        if error is None or self.models.is_being_loaded(model_id):
            return
        if clock.monotonic() < until:
            raise error.with_traceback(None)
        del self._failures[model_id]

    def _refuse_crowd(self, model_id: ModelId, caller: str) -> None:
        """Raise TooManyWaiting if as many calls wait as the settings allow: for this model, for all
        models, or, half of the latter, of this caller.
        """
        limit = self.settings.max_waiting
        count_of_model = self.leases.callers_of(model_id).total()
        count_of_all = self.leases.waiting
        count_of_caller = self.leases.count_calls_of(caller) if caller else 0
        if count_of_model >= self.settings.max_waiting_for_one:
            text = f"{count_of_model} callers wait for model {model_id!r} already"
        elif count_of_all >= limit:
            text = f"{count_of_all} callers wait for models already"
        elif count_of_caller >= max(1, limit // 2):
            text = f"{count_of_caller} calls of this caller wait for models already"
        else:
            return
        raise TooManyWaiting(text, model_id=model_id, retry_after_ms=_RETRY_AFTER_MS)

    # -- loads ------------------------------------------------------------------------------

    async def _load_and_lease(
        self, model_id: ModelId, key: ArtifactKey, deadline: float
    ) -> tuple[Lease, CacheUse]:
        """Load the model, and return a lease of it and where its files were found. Load it once
        more if it was unloaded before the lease was made, or if Triton exited once.
        """
        exits = 0
        while True:
            await self.models.wait_for_exit(model_id)
            operation = self._start_load(model_id, key)
            is_update = operation.kind is Kind.REPLACE
            if is_update and await self._wait_for_update(operation, deadline):
                continue
            try:
                await self._wait_for_load(operation, model_id, deadline)
                # no eviction takes a model that callers wait for, so all of them get their leases
                lease = self.models.lease(model_id)
                return lease, self._take_cache_use(operation)
            except ModelNotFound:
                # somebody has unloaded the model
                self._refuse_at_deadline(model_id, deadline)
            except BackendUnavailable as error:
                exits += 1
                if not is_exit(error) or not error.delivered or exits > _MAX_EXITS:
                    raise

    def _start_load(self, model_id: ModelId, key: ArtifactKey) -> Operation[ModelRecord]:
        patience_seconds = self.limits.model_wait / 2  # the other half is for the load itself
        request = LoadRequest(
            make_store_source("", str(key)),
            LoadedFor.CALLS,
            LoadTerms(Purpose.ON_DEMAND, patience_seconds),
            OnExit.FORGET,
            key,
        )
        return self.models.start_load(model_id, request)

    async def _wait_for_update(self, operation: Operation[ModelRecord], deadline: float) -> bool:
        """Wait for an update; return whether it came to its end, well or not, by the deadline. If
        the new version fails, the old one is loaded again and serves the call, which does not get
        that failure. An update that somebody has ended, as an unload does, has not come to its end.
        """
        is_over = await operation.wait(_count_remaining(deadline))
        return is_over and operation.reason is None

    async def _wait_for_load(
        self, operation: Operation[ModelRecord], model_id: ModelId, deadline: float
    ) -> None:
        """Wait for a load. Raise its failure as the call gets it: NoRoom for a model that does not
        fit, and ModelNotReady at the deadline.
        """
        try:
            await operation.outcome(_count_remaining(deadline))
        except TimeoutError:
            raise self._explain_wait(operation, model_id) from None
        except CapacityError as error:
            refusal = self._explain_no_room(model_id, error)
            if refusal is error:
                raise
            self.metrics.endpoint_no_room.inc()
            raise refusal from error
        except FILE_ERRORS as error:
            self._remember_failure(model_id, error)
            raise

    def _explain_no_room(self, model_id: ModelId, error: CapacityError) -> AdapterError:
        """Return the error for a model that does not fit while no other model can be evicted."""
        has_others = any(record.id != model_id for record in self.registry.records())
        return _explain_no_room(
            model_id,
            error,
            has_other_models=has_others,
            can_unload_later=self.eviction.can_unload_later,
        )

    def _remember_failure(self, model_id: ModelId, error: AdapterError) -> None:
        """Remember a failure of the files, which the callers of the next seconds get as well."""
        while len(self._failures) >= _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[model_id] = (error, clock.monotonic() + times.FAILURE_SECONDS)

    def _refuse_at_deadline(self, model_id: ModelId, deadline: float) -> None:
        """Raise ModelNotReady once the deadline has passed."""
        if clock.monotonic() >= deadline:
            text = f"model {model_id!r} is not ready yet: try again later"
            raise ModelNotReady(text, model_id=model_id) from None

    def _take_cache_use(self, operation: Operation[ModelRecord]) -> CacheUse:
        """Return where the files of a load were found, to the first caller that asks; all further
        callers of the load count as hits.
        """
        record = operation.record
        if record is None:
            return CacheUse.HIT
        use = record.cache_use
        record.cache_use = CacheUse.HIT
        return use

    def _explain_wait(self, operation: Operation[ModelRecord], model_id: ModelId) -> AdapterError:
        """Return the error of a call whose time is over before the load has ended."""
        record = operation.record
        state = "waiting"
        if record is not None and record.step is not None:
            state = record.step.value
            percent = record.progress.percent if record.progress else None
            if record.step is Step.FETCH and percent is not None:
                state = f"{state}, {percent} %"
        text = (
            f"model {model_id!r} is not ready yet ({state}): its load is still in progress, so try"
            " again later"
        )
        return ModelNotReady(text, model_id=model_id)

    def _record_caller(self, record: ModelRecord, caller: str) -> None:
        """Record when a known caller has last called the model."""
        if caller:
            record.usage.called_at[caller] = clock.monotonic()


def _count_remaining(deadline: float) -> float | None:
    """Return the seconds until a deadline; None if there is none."""
    return None if deadline == math.inf else max(0.0, deadline - clock.monotonic())


def _explain_other_key(model_id: ModelId, key: ArtifactKey, other: ArtifactKey) -> ArtifactNotFound:
    """Return the error for a key whose model was loaded from another one: V2 finds a model without
    the suffix of its archive, an endpoint's key must match exactly.
    """
    text = f"there is no {key}: a model of that name was loaded from {other}"
    return ArtifactNotFound(text, model_id=model_id)


def _explain_no_room(
    model_id: ModelId,
    error: CapacityError,
    *,
    has_other_models: bool,  # others have a record: they are loaded, or are being loaded
    can_unload_later: bool,  # some of the others keep their memory for now only
) -> AdapterError:
    """Return the error for the calls of a model that does not fit while nothing can be evicted.

    A model that runs out of memory with no other model loaded fails by itself: its callers get that
    failure, and are not asked to try again. All of them get the same one, so it is left as it is.
    """
    if has_other_models:
        text = f"{error}; all other models are in use, pinned or loaded explicitly; {_SEE_ROOM}"
        retry_after_ms = _RETRY_AFTER_MS if can_unload_later else _RETRY_AFTER_LONG_MS
        return NoRoom(text, model_id=model_id, retry_after_ms=retry_after_ms)
    if isinstance(error, OutOfMemory):
        return error
    return NoRoom(f"{error}; no other model is loaded; {_SEE_ROOM}", model_id=model_id)
