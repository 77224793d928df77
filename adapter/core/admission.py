"""May this model come in? Decided on figures alone, in one breath with reserving its bytes."""

from dataclasses import dataclass
from enum import Enum

from adapter.core.ledger import UNSEEN, DeviceBook, LedgerSnapshot
from adapter.core.memory import HOST, Device, MemoryReading
from adapter.core.model import ModelId
from adapter.core.sizing import Basis, Estimate, format_size
from adapter.errors import InsufficientMemory, MemoryFigures, ModelTooLarge

# Good enough to refuse a load by, and to let others load beside it.
_KNOWN = frozenset({Basis.LEARNED, Basis.DECLARED})


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a decision stands on.

    `loads` are the others between their admission and their settling, `unknown_loads` those of
    them without a known footprint. `unloads` are under way, or wait for their memory to come back.
    `is_settling`: the reading may be older than the last change of the ledger. `may_wait` is False
    once the caller has waited for memory as long as it will; turns are still waited for.
    """

    book: LedgerSnapshot
    reading: MemoryReading | None
    loads: int = 0
    unknown_loads: int = 0
    unloads: int = 0
    is_settling: bool = False
    may_wait: bool = True


class Answer(Enum):
    ADMIT = "admit"
    WAIT = "wait"


def decide(model_id: ModelId, estimate: Estimate, outlook: Outlook) -> Answer:
    """Admit, wait, or raise InsufficientMemory or ModelTooLarge (memory.md section 7, 2 to 4).

    A refusal makes the platform unload other models and come again. So it is given only when the
    need is known, nothing is changing that may make room, and there is something that could go.
    Everything else is tried, and Triton's answer counts.
    """
    book, reading = outlook.book, outlook.reading
    device = book.tightest(estimate.needs, reading)
    if device is None:
        return Answer.ADMIT
    _refuse_what_can_never_fit(model_id, estimate, book)
    if waits_its_turn(estimate, outlook):
        return Answer.WAIT
    needed = estimate.needs.get(device, 0)
    free = book.free(reading)[device]
    if needed <= free:
        return Answer.ADMIT
    may_change = outlook.unloads > 0 or outlook.loads > 0 or outlook.is_settling
    if outlook.may_wait and may_change:
        return Answer.WAIT
    if book.models == 0 or not _is_sure(estimate.basis, needed, free, book.devices[device]):
        return Answer.ADMIT
    limit = book.devices[device].limit_bytes
    raise InsufficientMemory(
        f"model {model_id!r} needs {format_size(needed)} ({estimate.basis.value}); "
        f"{format_size(free)} of {format_size(limit)} are free{_where(device)}",
        model_id=model_id,
        figures=MemoryFigures(needed, free, limit, device),
    )


def _refuse_what_can_never_fit(model_id: ModelId, estimate: Estimate, book: LedgerSnapshot) -> None:
    if estimate.basis not in _KNOWN:
        return
    for device, booked in book.devices.items():
        needed = estimate.needs.get(device, 0)
        limit = booked.limit_bytes
        if needed > limit:
            raise ModelTooLarge(
                f"model {model_id!r} needs {format_size(needed)} ({estimate.basis.value}); "
                f"it can never fit into {format_size(limit)}{_where(device)}",
                model_id=model_id,
                figures=MemoryFigures(needed, None, limit, device),
            )


def waits_its_turn(estimate: Estimate, outlook: Outlook) -> bool:
    """Where growth is measured a load of unknown size runs alone: the growth is then all its own,
    and two of them do not run out of memory together.
    """
    if outlook.reading is None:
        return False
    others = outlook.unknown_loads if estimate.basis in _KNOWN else outlook.loads
    return others > 0


def _is_sure(basis: Basis, needed: int, free: int, book: DeviceBook) -> bool:
    """That it does not fit. Files tell the size in memory to within a factor of two or so: half of
    it would not fit either, not even with half of the headroom.
    """
    if basis is Basis.DISK:
        return needed > 2 * free + book.headroom_bytes
    return basis in _KNOWN


def _where(device: Device) -> str:
    return "" if device in {HOST, UNSEEN} else f" on {device}"
