"""Asks the stores for other versions of what is loaded, and lets them take the place of the old."""

import asyncio
import logging
import string
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from adapter.control.models import ModelControl
from adapter.control.ports import Artifacts
from adapter.control.residency.eviction import Eviction
from adapter.control.residency.on_demand import OnDemandLoader, source_of
from adapter.core.artifacts import Artifact, ArtifactKey, FetchProgress, StoreFiles
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.core.residency.terms import Terms
from adapter.core.state import ModelState
from adapter.errors import AdapterError, AlreadyLoaded, CapacityError, ModelNotFound
from adapter.runtime import background, clock

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_AT_ONCE = 4
_PLAIN = frozenset(string.ascii_letters + string.digits)

Bring = Callable[[ModelId, ArtifactKey], Awaitable[object]]


class Updater:
    """`seconds`: how often the store is asked about a model; 0 for never. `bring` loads a model,
    for nobody who waits.

    The new version is loaded beside the old one where that may be and there is free room, and takes
    its place at once. Otherwise the model is unloaded and loaded as soon as it is idle.
    """

    def __init__(
        self,
        control: ModelControl,
        artifacts: Artifacts,
        eviction: Eviction,
        on_demand: OnDemandLoader,
        bring: Bring,
        *,
        seconds: float,
    ) -> None:
        self._control = control
        self._registry = control.registry
        self._artifacts = artifacts
        self._eviction = eviction
        self._on_demand = on_demand
        self._bring = bring
        self._seconds = seconds
        self._questions = asyncio.Semaphore(_AT_ONCE)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.under_way: dict[ModelRecord, asyncio.Task[None]] = {}  # renewals, a few at a time

    async def run(self) -> NoReturn:
        steps = (self.check, self.begin)
        await background.forever(*steps, seconds=_LOOK_SECONDS, expected=AdapterError)

    async def check(self) -> None:
        """Ask the store about each model whose time has come."""
        if not self._seconds:
            return
        before = clock.monotonic() - self._seconds
        due = [
            self._check(record.id, record.files, record.files.artifact)
            for record in self._registry.of_stores()
            if record.state is ModelState.READY
            and record.is_on_demand
            and record.files is not None
            and record.files.artifact is not None
            and record.files.checked_at <= before
        ]
        await asyncio.gather(*due)

    async def _check(self, model_id: ModelId, files: StoreFiles, artifact: Artifact) -> None:
        async with self._questions:
            files.checked_at = clock.monotonic()
            try:
                is_current = await self._artifacts.is_current(artifact)
            except AdapterError as error:  # it is served as it is
                fields = {"model_id": model_id, "reason": str(error)}
                log.warning("model.not_revalidated", extra=fields)
                return
            files.is_outdated |= not is_current

    async def begin(self) -> None:
        """Begin to renew each outdated model. A load that hangs holds up no other renewal."""
        for record in self._registry.of_stores():
            files = record.files
            if files is None or not files.is_outdated or record.state is not ModelState.READY:
                continue
            if record not in self.under_way:
                task = self.under_way[record] = asyncio.create_task(self._renew(record, files))
                task.add_done_callback(partial(self._ended, record))

    def _ended(self, record: ModelRecord, task: asyncio.Task[None]) -> None:
        del self.under_way[record]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task.failed", exc_info=error, extra={"task": "renewal"})

    async def _renew(self, record: ModelRecord, files: StoreFiles) -> None:
        async with self._turns:
            try:
                await self._renew_one(record, files)
            except AdapterError as error:
                fields = {"model_id": record.asked_for, "reason": str(error)}
                log.warning("model.not_renewed", extra=fields)
                self._give_up(files)

    def _is_current(self, record: ModelRecord) -> bool:
        is_loaded = record.state is ModelState.READY and record.id == record.asked_for
        return is_loaded and self._registry.get(record.id) is record

    async def _renew_one(self, record: ModelRecord, files: StoreFiles) -> None:
        is_new = files.newer is None
        if is_new and record.is_on_demand and not await self._fetch(record, files):
            return
        if not self._is_current(record):
            return
        if not record.is_on_demand:  # what a platform keeps is its own
            self._give_up(files)
            return
        if is_new and await self._beside(record, files):
            return
        await self._after(record, files)

    def _give_up(self, files: StoreFiles) -> None:
        """Keep what is loaded until the store is asked again."""
        newer, files.newer, files.is_outdated = files.newer, None, False
        if newer is not None:
            self._artifacts.release(newer)

    async def _fetch(self, record: ModelRecord, files: StoreFiles) -> bool:
        """Fetch the other version; return whether it is one, and still wanted."""
        found = StoreFiles(files.key)
        newer, _ = await self._on_demand.fetched(record.id, found, (), unloads=False)
        known = files.artifact
        if not self._is_current(record) or known is None or newer.etag == known.etag:
            self._artifacts.release(newer)
            files.is_outdated = False
            return False
        files.newer, files.fetch_seconds = newer, found.fetch_seconds
        files.checked_at = found.checked_at
        return True

    async def _beside(self, record: ModelRecord, files: StoreFiles) -> bool:
        """Load the new version beside the old one if that may be; return whether it was loaded."""
        model_id, newer = record.id, files.newer
        if (
            newer is None
            or not record.can_be_doubled
            or not self._control.memory.has_room_beside(record)
        ):
            return False
        if self._eviction.is_pinned(model_id):
            return False  # others may know it by its name in Triton
        etag = "".join(char for char in newer.etag if char in _PLAIN)  # quotes and W/ are not
        other = ModelId(f"{model_id}#{etag[:8]}")
        if self._registry.find(other) is not None:  # an earlier load of it is still being undone
            raise AlreadyLoaded(f"model {other!r} is being loaded", model_id=model_id)
        later = _later(files)
        later.is_tried_again = True
        self._registry.put_on_disk(other, later)
        terms = Terms(is_on_demand=True, evicts=False, takes_over=record)
        try:
            await self._control.load_on_terms(other, source_of(newer), terms)
        except CapacityError:
            if self._is_current(record):
                files.newer, later.artifact = later.artifact, None
            return False
        finally:
            self._registry.give_up(other, later)
        with suppress(ModelNotFound):  # the old version has gone already
            await self._control.make_way(other, evicted="changed", replaced_by=model_id)
        return True

    async def _after(self, record: ModelRecord, files: StoreFiles) -> None:
        """Unload the old version, if it is idle, and load the new one."""
        later = _later(files)
        try:
            if await self._eviction.unload(record):
                is_first = self._registry.find(record.id) is None  # a call may have begun to fetch
                if is_first and later.artifact is not None:
                    self._registry.put_on_disk(record.id, later)
                    later = StoreFiles(files.key)
                await self._bring(record.id, files.key)
            elif self._is_current(record):  # it has a request: later
                files.newer, later.artifact = later.artifact, None
        finally:
            for artifact in later.taken():
                self._artifacts.release(artifact)


def _later(files: StoreFiles) -> StoreFiles:
    """Return the files of the newer version, which are its own now."""
    newer, files.newer = files.newer, None
    return StoreFiles(
        files.key, newer, FetchProgress(), files.fetch_seconds, files.checked_at, used=files.used
    )
