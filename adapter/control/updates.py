"""Replaces a loaded model by another package under the same name.

A package that the inspection refuses changes nothing. Where both versions may be loaded at a time
and have room, the new one is loaded beside the old one, under another name in Triton; then it gets
the calls, and the old one is unloaded. Else the load of the new one begins with the unload of the
old one, which is loaded again if that load fails; calls wait for the end of it all. What the
adapter had unpacked or written for the old one was kept, and so were its files from a store; the
files of a model root are what they are by then.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from typing import Protocol

from adapter.control.load_limit import LimitedLoad, LoadLimit
from adapter.control.memory import Memory
from adapter.control.operations import Operations
from adapter.control.ports import Packages
from adapter.control.triton_status import TritonStatus
from adapter.core.artifacts import StoreFiles
from adapter.core.model import ModelId, ModelSource, inspection_name
from adapter.core.registry import ModelRecord, Registry
from adapter.core.residency.terms import Terms
from adapter.errors import (
    AdapterError,
    BackendUnavailable,
    CapacityError,
    ModelNotFound,
    UnloadedMeanwhile,
)
from adapter.runtime import clock


class BeginLoad(Protocol):
    """Begins a load and returns it at once. `lost` is the model that it brings back, if any."""

    def __call__(
        self,
        model_id: ModelId,
        source: ModelSource,
        lost: ModelRecord | None,
        terms: Terms,
        /,
        **log_fields: str,
    ) -> LimitedLoad: ...


class MakeWay(Protocol):
    async def __call__(self, model_id: ModelId, **log_fields: str) -> None: ...


class Updates:
    """Replaces loaded models, one update of a model at a time."""

    def __init__(
        self,
        registry: Registry,
        memory: Memory,
        operations: Operations,
        *,
        loads: LoadLimit,
        status: TritonStatus,
        packages: Packages,
        load_seconds: float,
        begin_load: BeginLoad,
        make_way: MakeWay,
        is_pinned: Callable[[ModelId], bool],
    ) -> None:
        self._registry = registry
        self._memory = memory
        self._operations = operations
        self._loads = loads
        self._status = status
        self._packages = packages
        self._load_seconds = load_seconds
        self._begin_load = begin_load
        self._make_way = make_way
        self._is_pinned = is_pinned
        # one for each model that is updated in its place; done when a version of it may be served
        self.in_place: dict[ModelId, asyncio.Future[None]] = {}

    async def update(
        self,
        old: ModelRecord,
        source: ModelSource,
        files: StoreFiles | None = None,  # of the package, if it is of a store; released here
        /,
        **log_fields: str,
    ) -> bool:
        """Replace `old`, a loaded model, by the package of `source`. Return False where it is not
        loaded any more, or something else has taken its place.

        Raises the failure of the new package; the old one serves then, unless the error says that
        it could not be loaded again.
        """
        try:
            return await self._update(old, source, files, log_fields)
        finally:
            if files is not None:
                self._registry.release(files)

    async def _update(
        self,
        old: ModelRecord,
        source: ModelSource,
        files: StoreFiles | None,
        log_fields: Mapping[str, str],
    ) -> bool:
        model_id = old.asked_for
        self._operations.refuse_when_full(model_id)
        async with self._operations.update_lock(model_id):
            if not self._registry.is_serving(old):
                return False
            if self._can_load_beside(old):
                with suppress(CapacityError):  # there is no room for both
                    await self._load_beside(old, source, files, log_fields)
                    return True
            return await self._load_in_place(old, source, files, log_fields)

    def _can_load_beside(self, old: ModelRecord) -> bool:
        """Return whether another version may be loaded beside this one. Other models may call a
        pinned one by its name in Triton, which it has to keep.
        """
        is_free = old.can_be_doubled and not self._is_pinned(old.asked_for)
        return is_free and self._memory.has_room_beside(old)

    # -- beside the old one -----------------------------------------------------------------

    async def _load_beside(
        self,
        old: ModelRecord,
        source: ModelSource,
        files: StoreFiles | None,
        log_fields: Mapping[str, str],
    ) -> None:
        """Load the new version, exchange it for the old one, and unload that."""
        model_id = old.asked_for
        other = self._free_id(model_id)
        terms = Terms(evicts=False, takes_over=old)
        try:
            with self._lend(files, other):
                load = self._begin_load(other, source, None, terms, **log_fields)
                await self._loads.outcome(load)
        except AdapterError as error:
            error.args = (str(error).replace(other, model_id),)
            error.model_id = model_id
            raise
        # The load has exchanged the ids: `other` now names the old version.
        with suppress(AdapterError):
            await self._make_way(other, replaced_by=model_id, **log_fields)

    def _free_id(self, model_id: ModelId) -> ModelId:
        ids = (ModelId(f"{model_id}#{number}") for number in count(1))
        return next(each for each in ids if not self._is_in_use(each))

    def _is_in_use(self, model_id: ModelId) -> bool:
        is_loading = model_id in self._loads.in_progress
        return is_loading or self._registry.find(model_id) is not None

    @contextmanager
    def _lend(self, files: StoreFiles | None, model_id: ModelId) -> Iterator[None]:
        """Let the model have the files for its load, and take them back if that has failed and is
        undone.
        """
        if files is None:
            yield
            return
        lent = replace(files, is_tried_again=True)
        files.artifact = None
        self._registry.put_on_disk(model_id, lent)
        try:
            yield
        except AdapterError:
            record = self._registry.coming.get(model_id)
            if record is not None and record.files is lent:
                files.artifact = lent.artifact
                lent.artifact = None
            raise
        finally:
            self._registry.give_up(model_id, lent)

    # -- in its place -----------------------------------------------------------------------

    async def _load_in_place(
        self,
        old: ModelRecord,
        source: ModelSource,
        files: StoreFiles | None,
        log_fields: Mapping[str, str],
    ) -> bool:
        """Unload the old version and load the new one; return False where somebody else has
        unloaded or loaded the model meanwhile.
        """
        model_id = old.asked_for
        await self._inspect(model_id, source)
        kept = await self._packages.keep(old.name)
        try:
            with self._keep_files(old) as old_files:
                if not self._registry.is_serving(old):
                    return False
                with self._calls_wait(model_id):
                    try:
                        await self._load_new(model_id, source, files, log_fields)
                    except ModelNotFound:  # an unload that was asked for earlier came first
                        return False
                    except UnloadedMeanwhile:
                        raise
                    except AdapterError as error:
                        await self._load_old(old, old_files, kept, error, log_fields)
                        raise
        finally:
            await self._packages.discard(kept)
        return True

    @contextmanager
    def _keep_files(self, old: ModelRecord) -> Iterator[StoreFiles | None]:
        """Keep the files of a model of a store on disk beyond its unload."""
        files = old.files
        if files is None:
            yield None
            return
        kept = replace(files)
        files.artifact = None
        files.newer = None
        try:
            yield kept
        finally:
            is_still_loaded = self._registry.find(old.id) is old
            if is_still_loaded and old.files is files:
                files.artifact = kept.artifact
                files.newer = kept.newer
            else:
                self._registry.release(kept)

    async def _load_new(
        self,
        model_id: ModelId,
        source: ModelSource,
        files: StoreFiles | None,
        log_fields: Mapping[str, str],
    ) -> None:
        """Unload the old version and load the new one; raise once a failure is undone. Raises
        UnloadedMeanwhile if an unload has ended it.
        """
        terms = Terms(unloads_first=True)
        with self._lend(files, model_id):
            load = self._begin_load(model_id, source, None, terms, **log_fields)
            try:
                await self._loads.outcome(load)
            except AdapterError as error:
                await asyncio.wait({load.task})
                if load.is_unloaded and not isinstance(error, UnloadedMeanwhile):
                    raise UnloadedMeanwhile(str(error), model_id=model_id) from error
                raise

    @contextmanager
    def _calls_wait(self, model_id: ModelId) -> Iterator[None]:
        """Have calls of the model wait, also between a failed load and that of the old version."""
        self.in_place[model_id] = settled = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self.in_place[model_id]
            settled.set_result(None)

    async def _inspect(self, model_id: ModelId, source: ModelSource) -> None:
        """Raise what is wrong with the package, before anything is unloaded for it."""
        name = inspection_name(model_id)
        try:
            await self._packages.prepare(name, model_id, source)
        finally:
            await self._packages.remove(name)

    async def _load_old(
        self,
        old: ModelRecord,
        files: StoreFiles | None,
        kept: str,
        error: AdapterError,
        log_fields: Mapping[str, str],
    ) -> None:
        """Load the old version again after `error`, and say so in it."""
        if isinstance(error, BackendUnavailable):
            with suppress(AdapterError):
                await self._status.wait_until_up(clock.monotonic() + self._load_seconds)
        if not self._status.is_open or self._is_in_use(old.asked_for):
            return
        source = replace(old.source, kept=kept)
        terms = Terms(is_on_demand=old.is_on_demand)
        try:
            with self._lend(files, old.asked_for):
                load = self._begin_load(old.asked_for, source, None, terms, **log_fields)
                record = await self._loads.outcome(load)
        except AdapterError as failure:
            what = f"the model that was there could not be loaded again: {failure}"
        else:
            record.can_load_again = old.can_load_again
            record.begun_at = old.begun_at  # its files are those of then
            what = "the model that was there was loaded again"
        error.args = (f"{error}; {what}",)
