"""Decide about a load: admit it, try it, let it wait, evict others for it, or refuse it.

A refusal makes a platform unload other models. So 507 is for a need that does not fit while other
models are loaded. Where no unload can help, the load is tried, and Triton's answer counts. The
rules, in this order:

1. The package declares more than a device can ever have: 400 ModelTooLarge. The same if it ran out
   of memory with nothing else loaded, and an emptied device would have as little. Nothing is
   evicted for it. The refusal ends with its reason.
2. With readings, one guessed need is loaded at a time. So each of them is measured, and no two of
   them run out of memory together. The next one waits for the end of the load before it, or for
   5 s. A load beside which anything else has begun is not waited for: nobody can measure it any
   more. So a load that hangs holds up the next one, and none after that.
3. A need that is free is admitted.
4. If nothing is on the lacking devices, the load is tried, because 507 would be a dead end. Host
   memory is an exception: if the machine itself has less than is surely needed, the kernel would
   end more than the load, so the answer is 507.
5. Candidates are evicted in their order, as few as suffice, if evicting all of them can be enough.
   Memory that is leaving counts as gone. Busy candidates are waited for.
6. Loads and unloads in progress on the lacking devices are waited for. After that, or if there are
   none, the answer is 507.

A caller awaits nothing between the decision and `Ledger.begin_load`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from adapter.core import times
from adapter.core.byte_sizes import format_size
from adapter.core.ledger import Ledger, Overrun
from adapter.core.memory import HOST, UNSEEN, Bytes, Device
from adapter.core.model import ModelId, TritonName
from adapter.core.sizes import BASIS_TEXTS, LEAST_NEED_BYTES, Basis, Need
from adapter.core.victims import choose_fewest
from adapter.errors import InsufficientMemory, MemoryFigures, ModelTooLarge

_SEE_REFUSED = "see docs/memory.md#why-a-load-is-refused"


class Answer(Enum):
    """Says what to do with a load."""

    ADMIT = "admit"
    TRY = "try"
    WAIT = "wait"
    EVICT = "evict"
    INSUFFICIENT = "507 InsufficientMemory"
    TOO_LARGE = "400 ModelTooLarge"


class Reason(Enum):
    """Explains an answer; the texts of refusals end with it."""

    FITS = "the need is free"
    NOTHING_TO_UNLOAD = "nothing is there that could be unloaded"
    TURN = "another load of unknown size is in progress"
    LEAVING = "enough is about to be free"
    EVICTION = "enough can be evicted"
    BUSY = "models that could be evicted have requests"
    IN_PROGRESS = "a load or an unload is in progress"
    MESH = "ModelMesh is about to unload models"
    DOES_NOT_FIT = "unload other models"
    WAITED = "what it waited for took too long: unload other models"
    FUTILE = "what was evicted for it lately was not enough"
    KERNEL = "the machine has less memory than that, and the kernel would end more than this load"
    DECLARED = "no unload can make enough room"
    PROCESS_LIMIT = "MPS allows no more to its processes"
    TRIED = "it ran out of memory with nothing else loaded, and no unload can give it more"


class Purpose(Enum):
    """Says who asks for a load."""

    EXPLICIT = "explicit"  # a platform or a person, who can unload others after a 507
    ON_DEMAND = "on demand"  # a call: 507 would help nobody
    PLANNED = "planned"  # ModelMesh, which has made room by its own figures


@dataclass(frozen=True, slots=True)
class Evictable:
    """A model that may be evicted."""

    name: TritonName
    is_busy: bool = False  # a model with requests is evicted when they have ended


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """Describes who asks for a load, how long it may wait, and which models may be evicted."""

    purpose: Purpose = Purpose.EXPLICIT
    started_at: float = 0.0  # when it began to wait
    deadline: float = 0.0  # when an on-demand or planned load has waited long enough
    candidates: tuple[Evictable, ...] = ()  # in the order of eviction
    is_mesh_evicting: bool = False  # see MeshBooks.is_evicting


@dataclass(frozen=True, slots=True)
class Decision:
    """Holds the answer to a load, its reason, and the figures of the device that lacks most."""

    answer: Answer
    reason: Reason
    need: Need
    figures: MemoryFigures = field(default_factory=MemoryFigures)
    victims: tuple[TritonName, ...] = ()
    device: Device | None = None  # where the package is placed, if the adapter chooses


def decide(ledger: Ledger, need: Need, request: MemoryRequest, now: float) -> Decision:
    """Return whether a load may begin on the devices of its need: at once, as a try, or after
    evictions or a wait. Or refuse it. Changes nothing.
    """
    refusal = _find_permanent_refusal(ledger, need)
    if refusal is not None:
        return refusal
    is_planned = request.purpose is Purpose.PLANNED
    free = {device: _free(ledger, device, is_planned=is_planned) for device in need.bytes}
    figures = _find_figures(ledger, need, free)
    if not _has_turn(ledger, need, request, now):
        return Decision(Answer.WAIT, Reason.TURN, need, figures)
    lacking = _find_lacking(need, free)
    if not lacking:
        return Decision(Answer.ADMIT, Reason.FITS, need, figures)
    if all(ledger.is_empty(device) for device in lacking):
        return _decide_on_empty_devices(ledger, need, lacking, figures)
    return replace(_decide_on_others(ledger, need, request, now, lacking), figures=figures)


# -- devices ------------------------------------------------------------------------------------


def sort_devices(
    ledger: Ledger,
    needs: Mapping[Device, Need],
    previous: Device | None = None,  # where the model was before Triton lost it
) -> list[Device]:
    """Sort the devices for a package that leaves the choice open, the best one first.

    Those that could never have the package come last. Apart from that the previous one comes first,
    and then the device with most memory free now.
    """

    def rank(device: Device) -> tuple[bool, bool, int, Device]:
        can_never = needs[device].bytes[device] > ledger.devices[device].room_bytes
        return can_never, device != previous, -ledger.free(device), device

    return sorted(needs, key=rank)


def decide_place(
    ledger: Ledger,
    needs: Mapping[Device, Need],
    request: MemoryRequest,
    now: float,
    previous: Device | None = None,  # where the model was before Triton lost it
) -> Decision:
    """Choose one of several devices and decide about the load there.

    All devices come into question before an eviction, and before a wait that may take long.
    """
    decisions = [
        replace(decide(ledger, needs[device], request, now), device=device)
        for device in sort_devices(ledger, needs, previous)
    ]
    return min(decisions, key=_rank)


def _rank(decision: Decision) -> int:
    """Return the place of a decision among those for several devices; the lowest is taken."""
    if decision.reason in {Reason.TURN, Reason.LEAVING}:
        return 2
    order = {
        Answer.ADMIT: 0,
        Answer.TRY: 1,
        Answer.EVICT: 3,
        Answer.WAIT: 4,
        Answer.INSUFFICIENT: 5,
        Answer.TOO_LARGE: 6,
    }
    return order[decision.answer]


# -- refusals for people --------------------------------------------------------------------------


def make_refusal(model_id: ModelId, decision: Decision) -> InsufficientMemory | ModelTooLarge:
    """Return the error that refuses a load, with its figures and what to do."""
    figures = decision.figures
    free = format_size(figures.free_bytes or 0)
    limit = format_size(figures.limit_bytes or 0)
    text = (
        f"model {model_id!r} needs {_describe_need(decision)};"
        f" {free} of {limit} are free{_name(figures)}: {decision.reason.value}; {_SEE_REFUSED}"
    )
    if decision.answer is Answer.TOO_LARGE:
        return ModelTooLarge(text, model_id=model_id, figures=figures)
    error = InsufficientMemory(text, model_id=model_id, figures=figures)
    error.is_known = decision.need.is_known
    return error


def make_overrun_refusal(model_id: ModelId, overrun: Overrun) -> InsufficientMemory | ModelTooLarge:
    """Return the error of a load that was ended, or undone, because it passed a limit.

    It is ModelTooLarge if nothing else was loaded or loading, as no unload can help then.
    """
    figures = overrun.figures
    needed = format_size(figures.needed_bytes or 0)
    if figures.needs_more_than_bytes is not None:
        needed = f"more than {needed}"
    free = format_size(figures.free_bytes or 0)
    what_happened = f"needs {needed}, where {free} were free{_name(figures)}"
    if not overrun.is_alone:
        limit = format_size(figures.limit_bytes or 0)
        what_happened = f"was loaded beside others when more than {limit} were used{_name(figures)}"
    reason = Reason.DECLARED if overrun.is_permanent else Reason.DOES_NOT_FIT
    text = f"model {model_id!r} {what_happened}, and was unloaded: {reason.value}; {_SEE_REFUSED}"
    error = ModelTooLarge if overrun.is_permanent else InsufficientMemory
    return error(text, model_id=model_id, figures=figures, was_tried=True)


def _describe_need(decision: Decision) -> str:
    """Return what a load needs, and how that is known. A bound is called one."""
    needed_bytes = decision.figures.needed_bytes or 0
    more_than_bytes = decision.figures.needs_more_than_bytes
    needed = format_size(needed_bytes)
    if more_than_bytes is None:
        return f"{needed} ({BASIS_TEXTS[decision.need.basis]})"
    bound = f"more than {format_size(more_than_bytes)}"
    return f"{bound} ({needed} are tried next)" if needed_bytes > more_than_bytes else bound


def _name(figures: MemoryFigures) -> str:
    is_only_device = figures.device in {None, HOST, UNSEEN}
    return "" if is_only_device else f" on {figures.device}"


# -- the rules ------------------------------------------------------------------------------------


def _find_permanent_refusal(ledger: Ledger, need: Need) -> Decision | None:
    """Return the refusal of a package that no unload can make room for, None for others.

    It declares more than a device can ever have or than MPS allows its processes. Or it ran out of
    memory with nothing else loaded, and would get as little now. A measured or guessed need alone
    refuses nothing.
    """
    declared = replace(need, basis=Basis.DECLARED)
    for device, count in need.declared.items():
        book = ledger.devices[device]
        if count > book.room_bytes:
            free_bytes = max(0, ledger.free(device))
            figures = MemoryFigures(count, free_bytes, book.limit_bytes, device)
            return Decision(Answer.TOO_LARGE, Reason.DECLARED, declared, figures)
        if book.process_limit_bytes is not None and need.processes is not None:
            limit_bytes = book.process_limit_bytes * need.processes
            if count > limit_bytes:
                free_bytes = min(limit_bytes, max(0, ledger.free(device)))
                figures = MemoryFigures(count, free_bytes, limit_bytes, device)
                return Decision(Answer.TOO_LARGE, Reason.PROCESS_LIMIT, declared, figures)
    tried = ledger.tried.get(need.package_key, {})
    proofs = [device for device in need.bytes if device in tried]
    if not proofs or any(_has_more_now(ledger, device, tried[device]) for device in proofs):
        return None
    device = max(proofs, key=need.bytes.__getitem__)
    limit_bytes = ledger.devices[device].limit_bytes
    # a reading of the load that ended may have shown more than it had free
    bound_bytes = max(tried[device], need.too_little.get(device, 0))
    measured_bytes = need.known_bytes.get(device, 0) if need.basis is Basis.MEASURED else 0
    figures = MemoryFigures(
        max(need.bytes[device], bound_bytes, measured_bytes),
        max(0, ledger.free(device)),
        limit_bytes,
        device,
        None if measured_bytes > bound_bytes else bound_bytes,
    )
    return Decision(Answer.TOO_LARGE, Reason.TRIED, need, figures)


def _has_more_now(ledger: Ledger, device: Device, tried_bytes: int) -> bool:
    """Return whether the device would have more than at a try, if all models were unloaded."""
    book = ledger.devices[device]
    emptied_bytes = book.limit_bytes - book.settled_bytes + ledger.booked(device)
    return emptied_bytes > tried_bytes + LEAST_NEED_BYTES


def _decide_on_empty_devices(
    ledger: Ledger, need: Need, lacking: Collection[Device], figures: MemoryFigures
) -> Decision:
    """Try a load, because nothing could be unloaded for it.

    It is refused only if the machine itself has less host memory free than the load surely needs.
    The kernel would then end more than this load.
    """
    if HOST in lacking:
        book = ledger.devices[HOST]
        known_bytes = need.known_bytes.get(HOST, 0)
        if book.available_bytes is not None and known_bytes > book.available_bytes:
            free_bytes = max(0, min(ledger.free(HOST), book.available_bytes))
            figures = MemoryFigures(known_bytes, free_bytes, book.limit_bytes, HOST)
            return Decision(Answer.INSUFFICIENT, Reason.KERNEL, need, figures)
    return Decision(Answer.TRY, Reason.NOTHING_TO_UNLOAD, need, figures)


def _decide_on_others(
    ledger: Ledger, need: Need, request: MemoryRequest, now: float, lacking: Collection[Device]
) -> Decision:
    """Evict others for a load, wait for them, or refuse it for now."""
    is_futile = _is_futile(ledger, need, now)
    eviction = None if is_futile else _decide_eviction(ledger, need, request)
    if eviction is not None:
        decision = eviction
    elif ledger.is_in_progress(lacking):
        decision = Decision(Answer.WAIT, Reason.IN_PROGRESS, need)
    elif request.is_mesh_evicting:
        decision = Decision(Answer.WAIT, Reason.MESH, need)
    else:
        reason = Reason.FUTILE if is_futile else Reason.DOES_NOT_FIT
        decision = Decision(Answer.INSUFFICIENT, reason, need)
    if decision.answer is Answer.WAIT and not _should_wait(ledger, need, request, now):
        return Decision(Answer.INSUFFICIENT, Reason.WAITED, need)
    return decision


def _has_turn(ledger: Ledger, need: Need, request: MemoryRequest, now: float) -> bool:
    """Return whether a load need not wait for another one with a guessed need.

    Readings measure a load that is alone on its devices. Where there are no readings, and for a
    load that is not alone any more, no load waits.

    A planned load waits for each of them until its deadline, because ModelMesh remembers a failed
    load for minutes.
    """
    guessed_loads = [load for load in ledger.loads.values() if not load.need.is_known]
    is_read = any(ledger.devices[device].used_bytes is not None for device in need.bytes)
    if need.is_known or not guessed_loads or not is_read:
        return True
    if request.purpose is Purpose.PLANNED:
        return now >= request.deadline
    if not any(load.is_alone for load in guessed_loads):
        return True
    return now - request.started_at >= times.MEMORY_SECONDS


def _should_wait(ledger: Ledger, need: Need, request: MemoryRequest, now: float) -> bool:
    """Return whether a load may wait for memory.

    An explicit load waits while an unload is in progress, and for 5 s after memory was last seen
    back. It also waits in its own first 5 s, or first 10 s with a guessed need, which may have
    waited 5 s for its turn. An on-demand or planned load waits until its deadline.
    """
    if request.purpose is not Purpose.EXPLICIT:
        return now < request.deadline
    turn_at = request.started_at + (0.0 if need.is_known else times.MEMORY_SECONDS)
    is_unloading = bool(ledger.unloads or ledger.returning)
    return is_unloading or now - max(turn_at, ledger.returned_at) < times.MEMORY_SECONDS


def _decide_eviction(ledger: Ledger, need: Need, request: MemoryRequest) -> Decision | None:
    """Choose victims, or wait for leaving memory or busy models; None if eviction cannot help."""
    free = {device: ledger.free_soon(device) for device in need.bytes}
    lacking = _find_lacking(need, free)
    if not lacking:
        return Decision(Answer.WAIT, Reason.LEAVING, need)
    evictable = ledger.evictable()
    candidates = [model for model in request.candidates if model.name in evictable]
    sizes = [evictable[candidate.name] for candidate in candidates]
    has_candidates = all(any(device in size for size in sizes) for device in lacking)
    if not has_candidates or not _can_evict_enough(ledger, need, request):
        return None
    idle = []
    has_busy = False
    for candidate, size in zip(candidates, sizes, strict=True):
        if not any(device in size for device in lacking):
            continue
        if candidate.is_busy:
            has_busy = True
        else:
            idle.append((candidate.name, size))
    freed = {device: sum(size.get(device, 0) for _, size in idle) for device in need.bytes}
    emptied = {device: count + freed[device] for device, count in free.items()}
    if has_busy and _find_lacking(need, emptied):
        return Decision(Answer.WAIT, Reason.BUSY, need)
    missing = {device: count - free[device] for device, count in need.bytes.items()}
    victims = tuple(choose_fewest(idle, missing))
    return Decision(Answer.EVICT, Reason.EVICTION, need, victims=victims)


def _can_evict_enough(ledger: Ledger, need: Need, request: MemoryRequest) -> bool:
    """Return whether the need would fit if all candidates were evicted, busy ones included.

    Two figures say what stays then, and the lesser counts. The first is what an empty device and
    the other models have: all other memory may be growth of the candidates, and would leave with
    them. The second is what `settled` has beyond the candidates, since models may be booked with
    more than they have.
    """
    names = {candidate.name for candidate in request.candidates}
    staying = [booked for name, booked in ledger.models.items() if name not in names]
    unshown = [load.reserved for name, load in ledger.loads.items() if name in names]
    for device, count in need.bytes.items():
        book = ledger.devices[device]
        staying_bytes = sum(booked.get(device, 0) for booked in staying)
        unshown_bytes = sum(reserved.get(device, 0) for reserved in unshown)
        leaving_bytes = ledger.booked(device) - staying_bytes
        empty_bytes = book.empty_bytes or 0
        rest_bytes = min(empty_bytes + staying_bytes, book.settled_bytes - leaving_bytes)
        taken_bytes = ledger.reserved(device) - unshown_bytes + rest_bytes
        if count > book.limit_bytes - book.headroom_bytes - taken_bytes:
            return False
    return True


def _is_futile(ledger: Ledger, need: Need, now: float) -> bool:
    """Return whether an eviction for the package has lately brought too little."""
    evicted_at = ledger.futile_evictions.get(need.package_key)
    return evicted_at is not None and now - evicted_at < times.RECENT_SECONDS


def _free(ledger: Ledger, device: Device, *, is_planned: bool) -> int:
    """Return the free bytes for a load. A planned load may use the headroom."""
    headroom_bytes = ledger.devices[device].headroom_bytes if is_planned else 0
    return ledger.free(device) + headroom_bytes


def _find_lacking(need: Need, free: Bytes) -> list[Device]:
    return [device for device, count in need.bytes.items() if count > free[device]]


def _find_figures(ledger: Ledger, need: Need, free: Bytes) -> MemoryFigures:
    """Return the figures of the device that lacks most, or has least to spare."""
    if not need.bytes:
        return MemoryFigures()
    missing = {device: count - free[device] for device, count in need.bytes.items()}
    device = max(missing, key=missing.__getitem__)
    limit_bytes = ledger.devices[device].limit_bytes
    return MemoryFigures(
        need.bytes[device],
        max(0, ledger.free(device)),
        limit_bytes,
        device,
        need.too_little.get(device),
    )
