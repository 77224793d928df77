"""Attributes observed memory growth to the models that were loaded in the same window, and compares
it with what Triton reports of the GPU memory that its models take.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

from adapter.core.account import Account
from adapter.core.ledger import DeviceBook
from adapter.core.memory import (
    NO_BYTES,
    UNSEEN,
    Bytes,
    Device,
    MemoryReading,
    at_least_zero,
    minus,
    plus,
)
from adapter.core.model import TritonName

# Bytes of one model by CUDA's number of the GPU.
GpuBytes = Mapping[int, int]

_DIFFERS_SHARE = 10  # a tenth
_NOISE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Measured:
    """The bytes that a load took. `exact` when nothing else went on, else its share of what several
    took.
    """

    name: TritonName
    package_key: str
    bytes: Bytes
    exact: bool


@dataclass(frozen=True, slots=True)
class _Load:
    package_key: str
    expected: Bytes
    known: bool


class Window:
    """Notes what came and went from one quiet moment to the next, and shares out the growth.

    A reading shows the whole device, so a load can be measured by itself only when it ran alone;
    what several took is shared out.
    """

    def __init__(self) -> None:
        self._opening: MemoryReading | None = None
        self._loads: dict[TritonName, _Load] = {}  # of this window alone
        self._beside: dict[TritonName, _Load] = {}
        self._released: Bytes = NO_BYTES
        self._is_disturbed = False

    def open(self, reading: MemoryReading | None) -> None:
        self._opening = reading
        self._loads, self._beside = {}, {}
        self._released = NO_BYTES
        self._is_disturbed = False

    def loaded(self, name: TritonName, package_key: str, expected: Bytes, *, known: bool) -> None:
        """A load ended well. `known` when `expected` was learned, and exact."""
        self._loads[name] = _Load(package_key, expected, known)

    def loaded_beside(self, name: TritonName, expected: Bytes) -> None:
        """Note a load that had begun before the window: an unknown part of what it took is in it,
        which is no other's.
        """
        self._beside[name] = _Load("", expected, known=False)
        self.disturbed()

    def released(self, name: TritonName, held: Bytes) -> None:
        """A model left. One that had been loaded in the window gives back only what it took in
        it, any other what it took before.
        """
        if self._loads.pop(name, None) is None:
            self._released = plus(self._released, held)
        self.disturbed()

    def forget(self, name: TritonName) -> None:
        """Its load was undone after all."""
        self._loads.pop(name, None)

    def disturbed(self) -> None:
        """Something came or went that nobody can put a figure to: no load was alone."""
        self._is_disturbed = True

    def close(self, reading: MemoryReading | None) -> list[Measured]:
        """Return what the loads took, by model id. Loads among others whose size is known already
        are not reported: theirs is the better figure. Nor are those of `loaded_beside`.
        """
        opening, self._opening, loads = self._opening, None, self._loads
        if opening is None or reading is None or not _alike(opening, reading):
            return []
        taken = _only(opening.devices, plus(minus(reading.used, opening.used), self._released))
        # what has left may have had less than the ledger says, as a model that has died
        taken = {device: min(count, reading.used[device]) for device, count in taken.items()}
        if len(loads) == 1 and not self._is_disturbed:
            [(name, load)] = loads.items()
            return [Measured(name, load.package_key, at_least_zero(taken), exact=True)]
        for load in loads.values():
            if load.known:
                taken = minus(taken, _only(opening.devices, load.expected))
        unknown = {name: load for name, load in loads.items() if not load.known}
        shares = _shared(at_least_zero(taken), unknown | self._beside)
        return [share for share in shares if share.name not in self._beside]


class Growth:
    """Tracks what each loaded model takes at least, as far as the totals of devices tell.

    More is a model's own where it alone had requests. Less may be any model's, or several have
    given back: so nobody is supposed to take more than before less all of it. What is supposed is
    then never more than was read in all, and a model that takes and gives back while others have
    requests does not seem to grow (docs/memory.md has why models grow after their loads).
    """

    def __init__(self, accounts: Mapping[TritonName, Account]) -> None:
        self._accounts = accounts
        self._before: MemoryReading | None = None

    def begin(self, reading: MemoryReading | None) -> None:
        """No operation is under way any more: what changes from here is traffic alone."""
        self._before = reading

    def end(self, reading: MemoryReading | None) -> None:
        """An operation begins: what changes from here is not traffic alone. What was given back
        since the last tick is, or it would seem to be taken once more by whoever takes it again.
        """
        before, self._before = self._before, None
        if before is not None and reading is not None and _alike(before, reading):
            self._lower(minus(before.used, reading.used))

    def tick(
        self, reading: MemoryReading | None, active: Collection[TritonName], baseline: Bytes
    ) -> Account | None:
        """Return the only model in `active`, those with requests since the last tick, if it has
        grown. `baseline` is what no model takes.
        """
        before, self._before = self._before, reading
        if before is None or reading is None or not _alike(before, reading):
            return None
        change = minus(reading.used, before.used)
        self._lower({device: -count for device, count in change.items()})
        grown = at_least_zero(change)
        found = self._accounts.get(next(iter(active))) if len(active) == 1 else None
        if found is not None and found.least is not None:
            found.least = plus(found.least, grown)
        in_all = at_least_zero(minus(reading.used, baseline))
        least = (each.least or NO_BYTES for each in self._accounts.values())
        self._lower(minus(reduce(plus, least, NO_BYTES), in_all))
        return found if any(grown.values()) else None

    def _lower(self, amounts: Bytes) -> None:
        """Lower what each takes by the amounts above zero."""
        if any(count > 0 for count in amounts.values()):
            less = at_least_zero(amounts)
            for account in self._accounts.values():
                if account.least is not None:
                    account.least = at_least_zero(minus(account.least, less))


def on_devices(models: Collection[GpuBytes], books: Mapping[Device, DeviceBook]) -> Bytes | None:
    """Return what a package takes of each device, by what is reported of each of its models.

    None if nothing is reported of one of them, or something of a GPU that nobody knows: python
    models, and those of libtorch, are not reported.
    """
    if not models or not all(any(model.values()) for model in models):
        return None
    known = {book.index: device for device, book in books.items() if book.index is not None}
    found: dict[Device, int] = {}
    for number, count in [item for model in models for item in model.items()]:
        device = known.get(number, UNSEEN)
        if count and device not in books:
            return None
        found[device] = found.get(device, 0) + count
    return {device: count for device, count in found.items() if count}


def differs(reported: Bytes, seen: Bytes) -> bool:
    """Return whether a reading shows another figure, by more than a tenth and by more than noise,
    for any device.
    """
    for device in reported.keys() | seen.keys():
        one, other = reported.get(device, 0), seen.get(device, 0)
        apart = abs(one - other)
        if apart > _NOISE_BYTES and apart * _DIFFERS_SHARE > max(one, other):
            return True
    return False


def _shared(taken: Bytes, loads: Mapping[TritonName, _Load]) -> list[Measured]:
    """Share out `taken` to the last byte, in proportion to what was expected on each device."""
    # sorted, so that rounding does not depend on which load ended first
    ids = sorted(loads)
    expected = [loads[name].expected for name in ids]
    shares = {device: _split(count, _weights(device, expected)) for device, count in taken.items()}
    return [
        Measured(
            name,
            loads[name].package_key,
            {device: parts[place] for device, parts in shares.items()},
            exact=False,
        )
        for place, name in enumerate(ids)
    ]


def _weights(device: Device, expected: Sequence[Bytes]) -> list[int]:
    """Return what each load was expected to take there. A load of unknown size counts like the
    others' mean: with nothing, all that it takes would be charged to them.
    """
    known = [each.get(device, 0) for each in expected if any(each.values())]
    mean = max(sum(known) // len(known), 1) if known else 1
    return [each.get(device, 0) if any(each.values()) else mean for each in expected]


def _split(count: int, weights: list[int]) -> list[int]:
    """Split `count` in proportion to the weights, or equally when all are zero."""
    if not any(weights):
        weights = [1] * len(weights)
    ends = [count * upto // sum(weights) for upto in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _only(devices: Collection[Device], amounts: Bytes) -> Bytes:
    return {device: amounts.get(device, 0) for device in devices}


def _alike(one: MemoryReading, other: MemoryReading) -> bool:
    """The difference of the two says something."""
    return one.source == other.source and one.devices.keys() == other.devices.keys()
