"""Asks the stores for other versions of what is loaded, and lets them take the place of the old."""

import asyncio
import logging
import string
from contextlib import suppress
from functools import partial
from typing import NoReturn

from adapter.control.models import ModelControl
from adapter.control.ports import Artifacts
from adapter.control.residency.entries import Entries, Entry
from adapter.control.residency.eviction import Eviction
from adapter.control.residency.on_demand import OnDemandLoader, source_of
from adapter.core.artifacts import Artifact, FetchProgress
from adapter.core.memory import total
from adapter.core.model import ModelId
from adapter.core.residency.state import ResidencyState
from adapter.core.residency.terms import Terms
from adapter.errors import AdapterError, CapacityError, ModelNotFound
from adapter.runtime import background, clock

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.5
_AT_ONCE = 4
_PLAIN = frozenset(string.ascii_letters + string.digits)


class Updater:
    """`seconds`: how often the store is asked about a model; 0 for never.

    The new version is loaded beside the old one where that may be and there is free room, and takes
    its place at once. Otherwise the model is unloaded and loaded as soon as it is idle.
    """

    def __init__(
        self,
        control: ModelControl,
        artifacts: Artifacts,
        entries: Entries,
        eviction: Eviction,
        on_demand: OnDemandLoader,
        *,
        seconds: float,
    ) -> None:
        self._control = control
        self._artifacts = artifacts
        self._entries = entries
        self._eviction = eviction
        self._on_demand = on_demand
        self._seconds = seconds
        self._questions = asyncio.Semaphore(_AT_ONCE)
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.under_way: dict[Entry, asyncio.Task[None]] = {}

    async def run(self) -> NoReturn:
        steps = (self.check, self.begin)
        await background.forever(*steps, seconds=_LOOK_SECONDS, expected=AdapterError)

    async def check(self) -> None:
        """Ask the store about each model whose time has come."""
        if not self._seconds:
            return
        before = clock.monotonic() - self._seconds
        settled = filter(_is_settled, self._entries)
        due = [each for each in settled if _is_for_calls(each) and each.checked_at <= before]
        await asyncio.gather(*map(self._check_entry, due))

    async def _check_entry(self, entry: Entry) -> None:
        artifact = entry.artifact
        async with self._questions:
            entry.checked_at = clock.monotonic()
            if artifact is None:
                return
            try:
                is_current = await self._artifacts.is_current(artifact)
            except AdapterError as error:  # it is served as it is
                fields = {"model_id": entry.model_id, "reason": str(error)}
                log.warning("model.not_revalidated", extra=fields)
                return
            if entry.artifact is artifact and not is_current:
                entry.is_outdated = True

    async def begin(self) -> None:
        """Begin to renew each outdated model. A load that hangs holds up no other renewal."""
        for entry in self._entries:
            if entry.is_outdated and _is_settled(entry) and entry not in self.under_way:
                task = self.under_way[entry] = asyncio.create_task(self._renew(entry))
                task.add_done_callback(partial(self._ended, entry))

    def _ended(self, entry: Entry, task: asyncio.Task[None]) -> None:
        del self.under_way[entry]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task.failed", exc_info=error, extra={"task": "renewal"})

    async def _renew(self, entry: Entry) -> None:
        async with self._turns:
            try:
                await self._renew_one(entry)
            except AdapterError as error:
                fields = {"model_id": entry.model_id, "reason": str(error)}
                log.warning("model.not_renewed", extra=fields)
                self._give_up(entry)
            finally:
                self._entries.tidy(entry)

    async def _renew_one(self, entry: Entry) -> None:
        is_new = entry.newer is None
        if is_new and _is_for_calls(entry) and not await self._fetch(entry):
            return
        async with entry.lock:
            if entry.state is not ResidencyState.RESIDENT or self._entries.loses(entry):
                return
            if not _is_for_calls(entry):
                self._give_up(entry)
                return
            if is_new and await self._beside(entry):
                return
            if not await self._eviction.unload(entry):
                return  # it has a request: later
            self._take(entry)
            await self._on_demand.load(entry)

    def _give_up(self, entry: Entry) -> None:
        """Keep what is loaded until the store is asked again."""
        newer, entry.newer, entry.is_outdated = entry.newer, None, False
        if newer is not None:
            self._artifacts.release(newer)

    async def _fetch(self, entry: Entry) -> bool:
        """Fetch the other version; return whether it is one, and still wanted."""
        known = entry.artifact
        newer, _ = await self._on_demand.fetched(entry, FetchProgress(), unloads=False)
        is_known = known is None or newer.etag == known.etag
        if is_known or entry.artifact is not known or entry.newer is not None:
            self._artifacts.release(newer)
            entry.is_outdated = False
            return False
        entry.newer = newer
        return True

    async def _beside(self, entry: Entry) -> bool:
        """Load the new version beside the old one if that may be; return whether it was loaded."""
        record, newer = entry.record, entry.newer
        if record is None or newer is None or not record.can_be_doubled:
            return False
        if self._eviction.is_pinned(entry.model_id):
            return False  # others may know it by its name in Triton
        if not self._may_fit(entry.model_id):
            return False
        etag = "".join(char for char in newer.etag if char in _PLAIN)  # quotes and W/ are not
        other = ModelId(f"{entry.model_id}#{etag[:8]}")
        terms = Terms(is_on_demand=True, evicts=False, takes_over=record)
        try:
            entry.record = await self._control.load(other, source_of(newer), terms)
        except CapacityError:
            return False
        old = self._take(entry, releases=False)
        await self._release(other, old)
        return True

    def _may_fit(self, model_id: ModelId) -> bool:
        """Return whether a model of the same size fits into what is free; one that was put on a GPU
        may go to another.
        """
        memory, record = self._control.memory, self._control.registry.get(model_id)
        free, held = memory.ledger.snapshot().free(memory.readings.last), memory.ledger.of(model_id)
        if record is not None and record.gpu is not None:
            return total(held) <= max(free.values(), default=0)
        return all(count <= free.get(device, count) for device, count in held.items())

    def _take(self, entry: Entry, *, releases: bool = True) -> Artifact | None:
        """Let the new version's files take the place of the old one's, which are returned, or may
        leave the disk.
        """
        old, entry.artifact, entry.newer = entry.artifact, entry.newer, None
        entry.is_outdated = False
        if releases and old is not None:
            self._artifacts.release(old)
        return old

    async def _release(self, model_id: ModelId, artifact: Artifact | None) -> None:
        """Unload the old version, once its requests have ended."""
        try:
            with suppress(ModelNotFound):  # it has gone already
                await self._control.make_way(model_id, evicted="changed")
        finally:
            if artifact is not None:
                self._artifacts.release(artifact)


def _is_settled(entry: Entry) -> bool:
    return entry.state is ResidencyState.RESIDENT and not entry.lock.locked()


def _is_for_calls(entry: Entry) -> bool:
    """Return whether the model is there for calls alone: what a platform keeps is its own."""
    return entry.record is not None and entry.record.is_on_demand
