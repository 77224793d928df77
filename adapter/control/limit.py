"""Detects loads that take more memory than the limit, during the load and at its end."""

from dataclasses import replace

from adapter.core.accounts import Accounts, Stage
from adapter.core.admission import MeshBooks
from adapter.core.ledger import Ledger, LedgerSnapshot
from adapter.core.memory import HOST, Bytes, MemoryReading, total
from adapter.core.model import ModelId
from adapter.core.overrun import Oversize, exceeded, is_alone, refusal
from adapter.core.sizing import Estimate, Sizes
from adapter.errors import CapacityError, ModelTooLarge
from adapter.runtime import clock


class Limit:
    """Compares the limit of each device with what a load was measured to take."""

    def __init__(self, ledger: Ledger, sizes: Sizes, accounts: Accounts, mesh: MeshBooks) -> None:
        self._ledger = ledger
        self._sizes = sizes
        self._accounts = accounts
        self._mesh = mesh
        self._oversize = Oversize()

    # -- before a load ----------------------------------------------------------------------

    def is_below(self, estimate: Estimate) -> bool:
        books = self._ledger.snapshot().devices
        return any(n > books[d].limit_bytes for d, n in estimate.needs.items() if d in books)

    def is_below_the_device(self, reading: MemoryReading | None) -> bool:
        """Return whether a limit is below its device's memory: only the adapter enforces that."""
        books = self._ledger.snapshot().devices
        read = reading.devices if reading else {}
        return any(books[d].limit_bytes < r.limit_bytes for d, r in read.items() if d in books)

    def tries(self, key: str, estimate: Estimate) -> None:
        """Note that a load is admitted; a package that seems too large is admitted only once."""
        if self.is_below(estimate):
            self._oversize.tried(key)

    def may_try(self, key: str) -> bool:
        return self._oversize.may_try(key)

    def proven(self, key: str, reading: MemoryReading | None) -> Bytes | None:
        """Return what the package was measured to take, if that is above the limit."""
        return self._oversize.proven(key, self._ledger.snapshot(), reading, clock.monotonic())

    def less_reserved(self, reading: MemoryReading | None) -> MemoryReading | None:
        """Return `reading` less what loads under way have taken: their reservations cover it."""
        if reading is None:
            return None
        found = 0
        for load in self._accounts.loads:
            if load.stage is Stage.LOADING:
                own = self._accounts.in_processes(load.model_id, reading)
                found += min(own, self._ledger.of(load.model_id).get(HOST, 0))
        return reading.less({HOST: found}) if found else reading

    # -- during and after it ----------------------------------------------------------------

    def overrun(
        self, model_id: ModelId, reading: MemoryReading | None
    ) -> CapacityError | ModelTooLarge | None:
        """Return a refusal if the load's own processes exceed the limit of host memory by more than
        the headroom. The size that they have by now is learned.
        """
        own = {HOST: self._accounts.in_processes(model_id, reading)}
        found = self._refusal(model_id, own, reading, is_over=False)
        if found is not None:
            self._sizes.learn(self._accounts.key_of(model_id), own, exact=True)
        return found

    def excess(
        self, model_id: ModelId, reading: MemoryReading | None
    ) -> CapacityError | ModelTooLarge | None:
        """Return a refusal if what the load took has passed a limit."""
        found = self._refusal(model_id, self._accounts.taken(model_id), reading, is_over=True)
        if found is None:
            self._oversize.fits(self._accounts.key_of(model_id))
        return found

    def _refusal(
        self, model_id: ModelId, taken: Bytes, reading: MemoryReading | None, *, is_over: bool
    ) -> CapacityError | ModelTooLarge | None:
        if reading is None:
            return None
        book = self._ledger.snapshot()
        if self._is_evicted_for(model_id, taken):
            book = _of_devices(book, reading)
        device = exceeded(book, reading, taken, with_headroom=not is_over)
        if device is None:
            return None
        if is_alone(book):
            key = self._accounts.key_of(model_id)
            self._oversize.measured(key, taken, book, clock.monotonic())
        return refusal(model_id, device, taken, book, reading, is_over=is_over)

    def _is_evicted_for(self, model_id: ModelId, taken: Bytes) -> bool:
        """Return whether ModelMesh unloads others once it is told what the model takes."""
        account = self._accounts.models.get(model_id)
        is_planned = account is not None and account.is_planned
        return is_planned and self._mesh.evicts_for(model_id, total(taken))


def _of_devices(book: LedgerSnapshot, reading: MemoryReading) -> LedgerSnapshot:
    """Return the book with the limits of the devices in place of lower ones that were set."""
    limits = {device: seen.limit_bytes for device, seen in reading.devices.items()}
    devices = {
        device: replace(booked, limit_bytes=max(booked.limit_bytes, limits.get(device, 0)))
        for device, booked in book.devices.items()
    }
    return replace(book, devices=devices)
