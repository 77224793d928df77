"""Decides whether a load is admitted, waits or is refused, on figures alone: nothing is awaited
between the decision and the reservation.
"""

from dataclasses import dataclass
from enum import Enum

from adapter.core.ledger import DeviceBook, LedgerSnapshot
from adapter.core.memory import HOST, UNSEEN, Bytes, Device, MemoryReading
from adapter.core.model import ModelId
from adapter.core.sizing import KNOWN, Basis, Estimate, format_size
from adapter.errors import InsufficientMemory, MemoryFigures, ModelTooLarge

SEE_REFUSED = "see docs/memory.md#why-a-load-is-refused"
_MESH_UNIT = 8192  # ModelMesh counts in these, rounded down
# With less than this free a load of unknown size is not worth a try.
_LEAST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class AdmissionInput:
    """Holds what a decision is based on.

    `loads` are the others between their admission and their settling, `unknown_loads` those of
    them without a known footprint, of which Triton will not report one either. `unloads` are under
    way, or wait for their memory to come back.
    `is_settling`: the reading may be older than the last change of the ledger. `may_wait` is False
    once the caller has waited for memory as long as it will; turns are still waited for.

    `unknown_bytes` is what is supposed of a model of which nothing is known. `may_be_wrong`: what
    was learned of this package may be, and was not tried in this run. `proven` is what it was
    measured to take when that was too much. `can_evict`: a refusal makes room. `is_planned`:
    ModelMesh has made room by its own books, so that a refusal evicts nothing. `processes`: as of
    the package. `is_told`: Triton will report what the model takes, or ModelMesh plans with the
    size of its files.
    """

    book: LedgerSnapshot
    reading: MemoryReading | None
    loads: int = 0
    unknown_loads: int = 0
    unloads: int = 0
    is_settling: bool = False
    may_wait: bool = True
    unknown_bytes: int = 0
    may_be_wrong: bool = False
    proven: Bytes | None = None
    can_evict: bool = False
    is_planned: bool = False
    processes: int | None = None
    is_told: bool = False


class Answer(Enum):
    ADMIT = "admit"
    WAIT = "wait"


def decide(model_id: ModelId, estimate: Estimate, inputs: AdmissionInput) -> Answer:
    """Admit, wait, or raise InsufficientMemory or ModelTooLarge (docs/memory.md, Admission).

    A refusal makes the platform unload other models and come again. So it is given only when the
    need is known, nothing is changing that may make room, and there is something that could go.
    Everything else is tried, and Triton's answer counts. Where a refusal is no answer to anybody,
    but evicts something, it is given for a guess as well, and other loads are not waited for.

    ModelMesh evicts before it loads, by the sizes that it was told, and remembers a failed load for
    minutes. So a load of its that is planned may use the headroom, and one of unknown size is tried
    while anything is left below the limit.
    """
    book, reading = inputs.book, inputs.reading
    device = book.tightest(estimate.needs, reading)
    if device is None:
        return Answer.ADMIT
    _refuse_what_can_never_fit(model_id, estimate, inputs)
    if waits_its_turn(estimate, inputs):
        return Answer.WAIT
    refusal = _refusal(estimate, device, inputs)
    if refusal is None:
        return Answer.ADMIT
    loads = 0 if inputs.can_evict else inputs.loads
    may_change = inputs.unloads > 0 or loads > 0 or inputs.is_settling
    if inputs.may_wait and may_change:
        return Answer.WAIT
    if not inputs.can_evict and (book.models == 0 or not refusal.is_sure):
        return Answer.ADMIT
    free, limit = book.free(reading)[refusal.device], book.devices[refusal.device].limit_bytes
    error = InsufficientMemory(
        f"model {model_id!r} {refusal.needs}; "
        f"{format_size(free)} of {format_size(limit)} are free{_where(refusal.device)}",
        model_id=model_id,
        figures=MemoryFigures(refusal.needed, free, limit, refusal.device),
    )
    error.is_known = estimate.basis in KNOWN
    raise error


@dataclass(frozen=True, slots=True)
class _Refusal:
    """`needs` is for people. `is_sure`: a try would be for nothing."""

    device: Device
    needed: int
    needs: str
    is_sure: bool


def _refusal(estimate: Estimate, device: Device, inputs: AdmissionInput) -> _Refusal | None:
    """Why it does not fit now; None when it does. `device` is the tightest for it."""
    book = inputs.book
    if inputs.is_planned:
        return _refusal_of_planned(estimate, inputs)
    free = book.free(inputs.reading)
    if estimate.basis not in KNOWN:
        least = max(inputs.unknown_bytes, _LEAST_BYTES)
        usable = [each for each in estimate.needs if each in free]
        full = min(usable, key=lambda each: free[each], default=None)
        if full is not None and free[full] < least:
            needed = max(least, estimate.needs[full])
            needs = f"is of unknown size, for which {format_size(least)} must be free"
            return _Refusal(full, needed, needs, is_sure=True)
    needed = estimate.needs.get(device, 0)
    if needed <= free[device]:
        return None
    needs = f"needs {format_size(needed)} ({estimate.basis.value})"
    is_sure = _is_sure(estimate.basis, needed, free[device], book.devices[device])
    return _Refusal(device, needed, needs, is_sure)


def _refusal_of_planned(estimate: Estimate, inputs: AdmissionInput) -> _Refusal | None:
    left = inputs.book.left(inputs.reading)
    is_known = estimate.basis in KNOWN
    lacking = {d: left[d] - (n if is_known else 1) for d, n in estimate.needs.items() if d in left}
    device = min(lacking, key=lambda each: lacking[each], default=None)
    if device is None or lacking[device] >= 0:
        return None
    needed = estimate.needs[device]
    needs = f"needs {format_size(needed)} ({estimate.basis.value})"
    if not is_known:
        needs = "is of unknown size, and nothing is left below the limit"
    return _Refusal(device, needed, needs, is_sure=True)


def _refuse_what_can_never_fit(
    model_id: ModelId, estimate: Estimate, inputs: AdmissionInput
) -> None:
    """Raise ModelTooLarge, unless a learned size may be wrong and nothing else is loaded."""
    book, needs, basis = inputs.book, estimate.needs, estimate.basis.value
    if inputs.proven is not None:
        needs, basis = inputs.proven, "measured"
    elif estimate.basis not in KNOWN or _is_worth_a_try(estimate, inputs):
        return
    for device, booked in book.devices.items():
        needed, limit = needs.get(device, 0), booked.limit_bytes
        client, processes = booked.client_limit_bytes, inputs.processes
        if client is not None and processes and needed > client * processes:
            raise ModelTooLarge(
                f"model {model_id!r} needs {format_size(needed)} ({basis}); MPS allows"
                f" {format_size(client)}{_where(device)} to each of its processes: {processes};"
                f" {SEE_REFUSED}",
                model_id=model_id,
                figures=MemoryFigures(needed, None, client * processes, device),
            )
        if needed > limit or (inputs.proven is not None and needed > 0):
            raise ModelTooLarge(
                f"model {model_id!r} needs {format_size(needed)} ({basis}); it can never fit into"
                f" {format_size(limit)}{_where(device)}{_taken(booked)}; {SEE_REFUSED}",
                model_id=model_id,
                figures=MemoryFigures(needed, None, limit, device),
            )


def _is_worth_a_try(estimate: Estimate, inputs: AdmissionInput) -> bool:
    return estimate.basis is Basis.LEARNED and inputs.may_be_wrong and inputs.book.models == 0


def waits_its_turn(estimate: Estimate, inputs: AdmissionInput) -> bool:
    """Return whether it must wait for other loads. Where growth is measured, a load of unknown size
    runs alone: all growth is its own, and two of them do not run out of memory together. Loads that
    Triton reports need not.
    """
    if inputs.reading is None:
        return False
    is_known = estimate.basis in KNOWN or inputs.is_told
    others = inputs.unknown_loads if is_known else inputs.loads
    return others > 0


def _is_sure(basis: Basis, needed: int, free: int, book: DeviceBook) -> bool:
    """Return whether it surely does not fit. Files tell the size in memory to within a factor of
    two or so: half of it would not fit either, not even with half of the headroom.
    """
    if basis is Basis.DISK:
        return needed > 2 * free + book.headroom_bytes
    return basis in KNOWN


def _taken(book: DeviceBook) -> str:
    taken = book.baseline_bytes
    return (
        f", of which {format_size(taken)} are used by something other than loaded models"
        if taken
        else ""
    )


def _where(device: Device) -> str:
    return "" if device in {HOST, UNSEEN} else f" on {device}"


class MeshBooks:
    """ModelMesh's books: the capacity that it was told, None before, and what it counts by model.

    ModelMesh fills its capacity to the last unit, and evicts only by these figures. When a load
    turns out larger than predicted they exceed the capacity: an eviction is on its way, but
    ModelMesh does not hold back the next load for it (docs/modelmesh.md).
    """

    def __init__(self) -> None:
        self.is_present = False  # a ModelMesh has called runtimeStatus
        self.capacity: int | None = None
        self._sizes: dict[ModelId, int] = {}  # from before a model's record until after it

    def start(self, capacity: int) -> None:
        """Note the capacity that a ModelMesh is told at its start, with nothing loaded."""
        self.capacity = capacity
        self._sizes.clear()

    def count(self, model_id: ModelId, size_bytes: int) -> None:
        """Note the size of a model, as predicted for its load or as answered after it."""
        self._sizes[model_id] = max(1, size_bytes // _MESH_UNIT)

    def drop(self, model_id: ModelId) -> None:
        """Note that the model was unloaded, or its load has failed. Harmless when it is unknown."""
        self._sizes.pop(model_id, None)

    @property
    def is_evicting(self) -> bool:
        """Whether the models exceed the capacity, so that ModelMesh unloads some."""
        return self._exceeds(sum(self._sizes.values()))

    def evicts_for(self, model_id: ModelId, size_bytes: int) -> bool:
        """Return whether ModelMesh unloads others once it learns that the model takes that much."""
        others = sum(units for each, units in self._sizes.items() if each != model_id)
        return others > 0 and self._exceeds(others + size_bytes // _MESH_UNIT)

    def _exceeds(self, units: int) -> bool:
        return self.capacity is not None and units > self.capacity // _MESH_UNIT
