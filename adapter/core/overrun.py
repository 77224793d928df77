"""Judges loads that exceed a limit, and remembers packages that are known to be too large.

A model that is loaded for the first time is tried, so that its size is learned; it may then exceed
a limit that only the adapter enforces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from adapter.core.ledger import LedgerSnapshot
from adapter.core.memory import HOST, Bytes, Device, MemoryReading
from adapter.core.model import ModelId
from adapter.core.sizing import format_size
from adapter.errors import CapacityError, InsufficientMemory, MemoryFigures, ModelTooLarge

# How long a package that was measured above the limit is not tried again.
_PROOF_SECONDS = 24 * 3600.0
_MAX_KEYS = 10_000

_Value = TypeVar("_Value")


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
        took = f"needs more than {format_size(needed)}, which it had when its load was ended"
    had = f"{format_size(free)} of {format_size(booked.limit_bytes)} were free{where}"
    if is_alone(book):
        return ModelTooLarge(
            f"model {model_id!r} {took} with nothing else loaded, where {had}; it was unloaded",
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


def is_alone(book: LedgerSnapshot) -> bool:
    """Return whether the model that is being loaded is the only one."""
    return book.models <= 1


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
    unless the limit changes, or once if others than the models have given memory back. Times are of
    time.monotonic().
    """

    def __init__(self) -> None:
        self._tried: dict[str, None] = {}
        self._proofs: dict[str, _Proof] = {}

    def may_try(self, key: str) -> bool:
        return key not in self._tried

    def tried(self, key: str) -> None:
        _keep(self._tried, key, None)

    def measured(self, key: str, needed: Bytes, book: LedgerSnapshot, now: float) -> None:
        """Note that the package takes `needed` with nothing else loaded, which is too much."""
        _keep(self._proofs, key, _Proof(needed, _limits(book), now, key in self._proofs))

    def proven(
        self, key: str, book: LedgerSnapshot, reading: MemoryReading | None, now: float
    ) -> Bytes | None:
        """Return what the package was measured to take, if that is still above the limit.

        Alone it took more than is free without models; else something unknown held memory then. The
        baseline may be of others that have left: then less is used than book and baseline say. As
        models may take less than the book says, too, that counts once.
        """
        proof = self._proofs.get(key)
        if proof is None or proof.limits != _limits(book) or now - proof.at >= _PROOF_SECONDS:
            return None
        used = reading.used if reading is not None and not proof.is_second else {}
        for device, booked in book.devices.items():
            others = booked.baseline_bytes
            if device in used:
                others = min(others, max(0, used[device] - booked.held_bytes))
            if proof.needed.get(device, 0) + others > booked.limit_bytes:
                return proof.needed
        return None

    def fits(self, key: str) -> None:
        self._proofs.pop(key, None)


def _limits(book: LedgerSnapshot) -> dict[Device, int]:
    return {device: booked.limit_bytes for device, booked in book.devices.items()}


def _keep(entries: dict[str, _Value], key: str, value: _Value) -> None:
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > _MAX_KEYS:
        del entries[next(iter(entries))]
