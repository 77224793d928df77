"""Judge failures of Triton: was it a lack of memory?

Triton's statuses do not tell, so its texts are read (`adapter.core.oom`). A strong text says that
an allocator has failed. A weak one may mean something else, and counts if an observation agrees:
less than 5 % of a device was free meanwhile, the kernel killed a process, or /dev/shm was full.

The text of a failed load is believed. A failed inference is different: its model may repeat in its
error what a caller wrote, and each 507 makes a platform unload other models. So the strong text of
an inference is compared with the figures of its device, in this order:

- It asks for more than the device has: not believed, because no unload can help.
- It is the first one of its package in a row: believed.
- It is the fourth one in a row, and nothing else is loaded: 400 ModelTooLarge.
- Nothing is known of the device: not believed a second time.
- It asks for a tenth of what is free, or less: not believed. Allocators do not fail so early.

The device is the one that the text names. Otherwise it is each device that the model is booked on.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from adapter.core.memory import HOST, NO_BYTES, Bytes, Device, MemoryReading
from adapter.core.oom import Strength, Verdict
from adapter.core.sizes import remember
from adapter.errors import MemoryFigures

# Below a twentieth of a device allocators begin to fail, as memory is in pieces.
LOW_SHARE = 0.05
# An allocator finds a tenth of what is free, however scattered that is.
PLAUSIBLE_SHARE = 0.1
# One failure after a reload may be bad luck. A model that cannot compute in the whole device fails
# each time.
MAX_FAILURES = 3
# With less than this free /dev/shm is full: Triton's smallest region takes 1 MiB.
LEAST_SHM_BYTES = 2**20

_OF_SHM = re.compile(r"shared memory|/dev/shm|\bshm\b", re.IGNORECASE)
_OF_GPU = re.compile(
    r"\b(?:cuda|gpu|hip|cu(?:blas|dnn|solver|sparse|rand|fft))|cuda_", re.IGNORECASE
)
_OF_HOST = re.compile(r"bad_alloc|bad allocation|memoryerror|\[errno 12\]|enomem", re.IGNORECASE)


class Outcome(Enum):
    """Names what a failure was."""

    OUT_OF_MEMORY = "507 OutOfMemory"
    TOO_LARGE = "400 ModelTooLarge"
    FAILED = "the failure that it seems"


class Evidence(Enum):
    """Explains a judgement; the texts of errors end with it."""

    TEXT = "an allocator said so"
    LOW = "memory was low at that time"
    NO_WORDS = "its text does not mention memory"
    NOT_LOW = "memory was not low"
    MORE_THAN_DEVICE = "not taken for out of memory: it asks for more than the device has"
    FAR_MORE_FREE = "not taken for out of memory: far more was free than it asked for"
    UNSEEN_AGAIN = "not taken for out of memory again: its device is not measured"
    ALONE = "again with nothing else loaded"


class Place(Enum):
    """Names the memory that a text is about."""

    GPU = "gpu"
    HOST = "host"
    SHM = "shm"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Holds what a failure was, the evidence for it, and the figures for its error."""

    outcome: Outcome
    evidence: Evidence
    figures: MemoryFigures = field(default_factory=MemoryFigures)


@dataclass(frozen=True, slots=True)
class Scene:
    """Describes memory around a failure."""

    limits: Bytes  # of each device, as of the ledger; none for devices that are not seen
    readings: Sequence[MemoryReading] = ()  # from shortly before the call until after it, in order
    devices: Collection[Device] = ()  # devices where the model is booked, or its load has reserved
    # free bytes of each device by the ledger: those that the next load could have
    free: Bytes = field(default_factory=dict)


class FailedInferences:
    """Counts the strong failures of each package in a row."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[int, float]] = {}  # the number, and when the last one was

    def add(self, package_key: str, now: float, answered_at: float) -> int:
        """Count a failure; return the number of those before it.

        An answer since then, at `answered_at`, ends a row. A reload alone does not.
        """
        count, failed_at = self._rows.get(package_key, (0, now))
        before = 0 if answered_at > failed_at else count
        remember(self._rows, package_key, (before + 1, now))
        return before

    def forget(self, package_key: str) -> None:
        """Begin a new row for the package."""
        self._rows.pop(package_key, None)


def judge_load(verdict: Verdict, text: str, scene: Scene) -> Judgement:
    """Judge the failure of a load by the reader's verdict on its text."""
    if verdict.strength is Strength.STRONG:
        return Judgement(Outcome.OUT_OF_MEMORY, Evidence.TEXT, _figures_of(verdict, text, scene))
    return _judge_weak(verdict, text, scene)


def is_refuted(verdict: Verdict, text: str, scene: Scene) -> bool:
    """Return whether a load that ran out of memory asked for a tenth of what was free, or less, in
    each reading since its begin.

    A text without a figure is not refuted. Most of them are true, and with nothing else loaded a
    507 would have a platform unload other models for one that never fits.
    """
    requested = verdict.requested_bytes
    devices = _devices_of(text, scene)
    free = [
        scene.limits[device] - reading.used[device]
        for reading in scene.readings
        for device in devices
        if device in reading.used
    ]
    return requested is not None and bool(free) and requested <= PLAUSIBLE_SHARE * min(free)


def judge_inference(
    verdict: Verdict,
    text: str,
    scene: Scene,
    *,
    failures: int,  # strong ones of the package before this one, in a row
    is_only_model: bool,  # nothing else is loaded
) -> Judgement:
    """Judge whether a failed inference ran out of memory, by the reader's verdict on its text.

    A weak text counts if memory was low. A strong one is compared with the figures of its device,
    by the rules at the top of this module: they believe the first failure in a row, unless it asks
    for more than the device has, and doubt those that follow.
    """
    if verdict.strength is not Strength.STRONG:
        return _judge_weak(verdict, text, scene)
    figures = _figures_of(verdict, text, scene)
    evidence = Evidence.TEXT
    outcome = Outcome.OUT_OF_MEMORY
    requested = verdict.requested_bytes
    devices = _devices_of(text, scene)
    limits = [scene.limits[device] for device in devices]
    free = _list_free(name_place(text), devices, scene)
    if requested is not None and limits and requested > max(limits):
        outcome = Outcome.FAILED
        evidence = Evidence.MORE_THAN_DEVICE
    elif failures == 0:
        pass
    elif is_only_model and failures >= MAX_FAILURES:
        outcome = Outcome.TOO_LARGE
        evidence = Evidence.ALONE
    elif not free:
        outcome = Outcome.FAILED
        evidence = Evidence.UNSEEN_AGAIN
    elif requested is not None and requested <= PLAUSIBLE_SHARE * min(free):
        outcome = Outcome.FAILED
        evidence = Evidence.FAR_MORE_FREE
    return Judgement(outcome, evidence, figures)


def name_place(text: str) -> Place | None:
    """Return the memory that a text is about; None if it does not say."""
    if _OF_SHM.search(text):
        return Place.SHM
    if _OF_GPU.search(text):
        return Place.GPU
    return Place.HOST if _OF_HOST.search(text) else None


def can_concern(text: str, devices: Collection[Device]) -> bool:
    """Return whether a text may be about one of these devices, which are all that the ledger has.

    A text about a GPU is not about host memory: where no GPU is known it concerns none of them.
    """
    return name_place(text) is not Place.GPU or any(device != HOST for device in devices)


def was_memory_low(scene: Scene, devices: Collection[Device]) -> bool:
    """Return whether a device was nearly full meanwhile, the kernel has killed a process of this
    container for memory, or /dev/shm was full.
    """
    kills = [reading.oom_kills for reading in scene.readings if reading.oom_kills is not None]
    has_killed = bool(kills) and kills[-1] > kills[0]
    is_any_low = any(
        limit - reading.used[device] < LOW_SHARE * limit
        for reading in scene.readings
        for device, limit in scene.limits.items()
        if device in devices and device in reading.used
    )
    return has_killed or is_any_low or was_shm_full(scene)


def was_shm_full(scene: Scene) -> bool:
    """Return whether a reading has seen /dev/shm full."""
    free = [reading.shm_free_bytes for reading in scene.readings]
    return any(count is not None and count < LEAST_SHM_BYTES for count in free)


def _judge_weak(verdict: Verdict, text: str, scene: Scene) -> Judgement:
    if verdict.strength is Strength.NONE:
        return Judgement(Outcome.FAILED, Evidence.NO_WORDS)
    devices = _devices_of(text, scene) or list(scene.limits)
    is_low = was_shm_full(scene) if verdict.of_shm else was_memory_low(scene, devices)
    if not is_low:
        return Judgement(Outcome.FAILED, Evidence.NOT_LOW)
    return Judgement(Outcome.OUT_OF_MEMORY, Evidence.LOW, _figures_of(verdict, text, scene))


def _devices_of(text: str, scene: Scene) -> list[Device]:
    """Return the measured devices that a failure may be about.

    If the text names a kind of device, these are the model's devices of that kind, or else all of
    that kind. Otherwise these are the model's devices. A text about /dev/shm is about no device.
    """
    place = name_place(text)
    if place is Place.SHM:
        return []
    devices = list(scene.limits)
    if place is Place.GPU:
        devices = [device for device in devices if device != HOST]
    elif place is Place.HOST:
        devices = [device for device in devices if device == HOST]
    own_devices = [device for device in devices if device in scene.devices]
    return own_devices if own_devices or place is None else devices


def _list_free(place: Place | None, devices: Collection[Device], scene: Scene) -> list[int]:
    """Return the limit of each of these devices less the last reading, at least 0, or the free
    bytes of /dev/shm. Devices that it does not show are left out; without readings the list
    is empty.
    """
    if not scene.readings:
        return []
    last = scene.readings[-1]
    if place is Place.SHM:
        return [] if last.shm_free_bytes is None else [last.shm_free_bytes]
    used = last.used
    return [max(0, scene.limits[device] - used[device]) for device in devices if device in used]


def _figures_of(verdict: Verdict, text: str, scene: Scene) -> MemoryFigures:
    """Return the requested bytes, and the figures of the fullest of the measured devices that the
    failure may be about. If none of these is measured, the figures stay unknown: those of another
    device would seem to refute the error.
    """
    used = scene.readings[-1].used if scene.readings else NO_BYTES
    devices = [device for device in _devices_of(text, scene) if device in used]
    if not devices:
        return MemoryFigures(verdict.requested_bytes)
    device = min(devices, key=lambda device: scene.limits[device] - used[device])
    free_bytes = scene.free.get(device)
    return MemoryFigures(verdict.requested_bytes, free_bytes, scene.limits[device], device)
