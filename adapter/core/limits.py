"""Detects loads that take more memory than the limit, and remembers packages that never fit.

A model that is loaded for the first time is tried, so that its size is learned; it may then exceed
a limit that only the adapter enforces. Times are of time.monotonic().
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from adapter.core.account import Stage
from adapter.core.accounts import Accounts
from adapter.core.admission import SEE_REFUSED, MeshBooks
from adapter.core.ledger import Ledger, LedgerSnapshot
from adapter.core.memory import HOST, Bytes, Device, Gpu, MemoryReading, total
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Estimate, Sizes, format_size, remember
from adapter.errors import CapacityError, InsufficientMemory, MemoryFigures, ModelTooLarge

# How long a package that was measured above the limit is not tried again.
_PROOF_SECONDS = 24 * 3600.0


def exceeded(
    book: LedgerSnapshot, reading: MemoryReading, own: Bytes, *, with_headroom: bool
) -> Device | None:
    """Return the device whose limit is exceeded because of `own`, or None.

    `with_headroom`: exceeded by more than the headroom.
    """
    for device, booked in book.devices.items():
        bound = booked.limit_bytes + (booked.headroom_bytes if with_headroom else 0)
        used, mine = reading.used.get(device, 0), own.get(device, 0)
        if used > bound >= used - mine:
            return device
    return None


def refusal(
    model_id: ModelId,
    device: Device,
    taken: Bytes,
    book: LedgerSnapshot,
    reading: MemoryReading,
    *,
    is_over: bool,
) -> CapacityError | ModelTooLarge:
    """Return the error for a load that was undone because it exceeded the limit of `device`.

    `is_over`: the load was complete; else it was ended early and needs at least `taken`.
    """
    booked, needed = book.devices[device], taken.get(device, 0)
    free = max(0, booked.limit_bytes - (reading.used.get(device, 0) - needed))
    figures = MemoryFigures(needed, free, booked.limit_bytes, device)
    where = "" if device == HOST else f" on {device}"
    took = f"took {format_size(needed)}"
    if not is_over:
        took = f"needs more than {format_size(needed)}, at which its load was ended"
    had = f"{format_size(free)} of {format_size(booked.limit_bytes)} were free{where}"
    if book.models <= 1:  # the one that is being loaded
        return ModelTooLarge(
            f"model {model_id!r} {took} with nothing else loaded, where {had}; it was unloaded;"
            f" {SEE_REFUSED}",
            model_id=model_id,
            figures=figures,
            was_tried=True,
        )
    return InsufficientMemory(
        f"model {model_id!r} {took}, where {had}; it was unloaded",
        model_id=model_id,
        figures=figures,
        was_tried=True,
    )


@dataclass(frozen=True, slots=True)
class _Proof:
    """`is_second`: the package was tried again since the first one."""

    needed: Bytes
    limits: Mapping[Device, int]
    at: float
    is_second: bool


class Oversize:
    """Remembers packages that seem too large, by content key; for this run only.

    A size learned in the past may be wrong, so a package above the limit is tried once, with
    nothing else loaded. If it is measured above the limit then, it is not tried again for 24 hours,
    unless the limit changes, or once if others than the models have given memory back.
    """

    def __init__(self) -> None:
        self._tried: dict[str, None] = {}
        self._proofs: dict[str, _Proof] = {}

    def may_try(self, key: str) -> bool:
        return key not in self._tried

    def tried(self, key: str) -> None:
        remember(self._tried, key, None)

    def measured(self, key: str, needed: Bytes, book: LedgerSnapshot, now: float) -> None:
        """Note that the package takes `needed` with nothing else loaded, which is too much."""
        remember(self._proofs, key, _Proof(needed, _limits(book), now, key in self._proofs))

    def proven(
        self,
        key: str,
        book: LedgerSnapshot,
        reading: MemoryReading | None,
        now: float,
        gpu: Gpu | None = None,
    ) -> Bytes | None:
        """Return what the package was measured to take, if that is still above the limit; of `gpu`
        where it is to be put on that one.

        Alone it took more than is free without models; else something unknown held memory then. The
        baseline may be of others that have left: then less is used than book and baseline say. As
        models may take less than the book says, too, that counts once.
        """
        proof = self._proofs.get(key)
        if proof is None or proof.limits != _limits(book) or now - proof.at >= _PROOF_SECONDS:
            return None
        used = reading.used if reading is not None and not proof.is_second else {}
        needed = {gpu.device: max(proof.needed.values(), default=0)} if gpu else proof.needed
        for device, booked in book.devices.items():
            others = booked.baseline_bytes
            if device in used:
                others = min(others, max(0, used[device] - booked.held_bytes))
            if needed.get(device, 0) + others > booked.limit_bytes:
                return needed
        return None

    def fits(self, key: str) -> None:
        self._proofs.pop(key, None)


def _limits(book: LedgerSnapshot) -> dict[Device, int]:
    return {device: booked.limit_bytes for device, booked in book.devices.items()}


class Hopeless(Enum):
    """Why a model that ran out of memory can never fit."""

    ALONE = "ran out of memory again with nothing else loaded"
    OVERSIZED = "asked again for more memory than the device has"


@dataclass(slots=True)
class _Failures:
    alone: int = 0
    oversized: int = 0


class EvictionLoopBreaker:
    """Counts failures by key, one for each package or model, until its next success.

    Every 507 makes the platform unload others and come again: a model larger than the device, or
    one that leaks, would empty the endpoint again and again.

    `budget`: how many times in a row a model may run out of memory with nothing else loaded before
    it counts as hopeless. It is still tried each time, so the breaker closes by itself. 10,000
    keys are kept; the one that failed longest ago is forgotten.
    """

    def __init__(self, budget: int = 3) -> None:
        self._budget = budget
        self._failures: dict[str, _Failures] = {}

    def __repr__(self) -> str:
        return f"<EvictionLoopBreaker [{len(self._failures)} keys]>"

    def out_of_memory(
        self, key: str, *, alone: bool, requested_bytes: int | None, limit_bytes: int | None
    ) -> Hopeless | None:
        """Note the failure; return a reason if it must be answered with ModelTooLarge, not 507.

        That is when the budget is spent, or when the allocator was asked for more than the device
        has, for the second time. A failure while other models are loaded says nothing about the
        model: it neither counts nor resets the count.
        """
        failures = self._failures.pop(key, None) or _Failures()
        remember(self._failures, key, failures)
        failures.alone += alone
        if requested_bytes is not None and limit_bytes is not None:
            oversized = requested_bytes > limit_bytes
            failures.oversized += oversized
            if oversized and failures.oversized > 1:
                return Hopeless.OVERSIZED
        return Hopeless.ALONE if alone and failures.alone > self._budget else None

    def succeeded(self, key: str) -> None:
        """The model was loaded, or answered: it fits."""
        self._failures.pop(key, None)


class Limits:
    """Compares the limit of each device with what a load was measured to take."""

    def __init__(self, ledger: Ledger, sizes: Sizes, accounts: Accounts, mesh: MeshBooks) -> None:
        self._ledger = ledger
        self._sizes = sizes
        self._accounts = accounts
        self._mesh = mesh
        self.oversize = Oversize()

    # -- before a load ----------------------------------------------------------------------

    def is_below(self, estimate: Estimate) -> bool:
        books = self._ledger.snapshot().devices
        return any(n > books[d].limit_bytes for d, n in estimate.needs.items() if d in books)

    def is_below_the_device(self, reading: MemoryReading | None) -> bool:
        """Return whether a limit is below its device's memory: only the adapter enforces that."""
        books = self._ledger.snapshot().devices
        read = reading.devices if reading else {}
        return any(books[d].limit_bytes < r.limit_bytes for d, r in read.items() if d in books)

    def less_reserved(self, reading: MemoryReading | None) -> MemoryReading | None:
        """Return `reading` less what loads under way have taken: their reservations cover it."""
        if reading is None:
            return None
        found = 0
        for load in self._accounts.loads:
            if load.stage is Stage.LOADING:
                own = self._accounts.in_processes(load.name, reading)
                found += min(own, self._ledger.of(load.name).get(HOST, 0))
        return reading.less({HOST: found}) if found else reading

    # -- during and after it ----------------------------------------------------------------

    def overrun(
        self, record: ModelRecord, reading: MemoryReading | None, now: float
    ) -> CapacityError | ModelTooLarge | None:
        """Return a refusal if the load's own processes exceed the limit of host memory by more than
        the headroom. The size that they have by now is learned if it is more than what is known.
        """
        own = {HOST: self._accounts.in_processes(record.name, reading)}
        found = self._refusal(record, own, reading, now, is_over=False)
        account = self._accounts.models.get(record.name)
        if found is None or account is None:
            return found
        if account.is_guessed or own[HOST] > account.estimate.needs.get(HOST, 0):
            self._sizes.learn(account.package_key, own, exact=True)
        return found

    def excess(
        self, record: ModelRecord, reading: MemoryReading | None, now: float
    ) -> CapacityError | ModelTooLarge | None:
        """Return a refusal if what the load took has passed a limit."""
        taken = self._accounts.taken(record.name)
        found = self._refusal(record, taken, reading, now, is_over=True)
        if found is None:
            self.oversize.fits(self._accounts.key_of(record.name))
        return found

    def _refusal(
        self,
        record: ModelRecord,
        taken: Bytes,
        reading: MemoryReading | None,
        now: float,
        *,
        is_over: bool,
    ) -> CapacityError | ModelTooLarge | None:
        if reading is None:
            return None
        book, account = self._ledger.snapshot(), self._accounts.models.get(record.name)
        is_planned = account is not None and account.is_planned
        if is_planned and self._mesh.evicts_for(record.id, total(taken)):
            book = _of_devices(book, reading)
        device = exceeded(book, reading, taken, with_headroom=not is_over)
        if device is None:
            return None
        if book.models <= 1:  # the one that is being loaded
            self.oversize.measured(self._accounts.key_of(record.name), taken, book, now)
        return refusal(record.id, device, taken, book, reading, is_over=is_over)


def _of_devices(book: LedgerSnapshot, reading: MemoryReading) -> LedgerSnapshot:
    """Return the book with the limits of the devices in place of lower ones that were set, which a
    ModelMesh keeps: it unloads others once it is told what the model takes.
    """
    limits = {device: seen.limit_bytes for device, seen in reading.devices.items()}
    devices = {
        device: replace(booked, limit_bytes=max(booked.limit_bytes, limits.get(device, 0)))
        for device, booked in book.devices.items()
    }
    return replace(book, devices=devices)
