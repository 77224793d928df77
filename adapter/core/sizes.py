"""Say how much memory a load needs: as declared, measured or guessed.

    need = max(declared, measured)
           else what the package was last booked with, a guess like the next
           else max(files x size_factor, 64 MiB)

After an out-of-memory a package needs at least twice what its load had reserved, until a load of it
succeeds. A known need is raised only after the second one in a row. The most that any load needs is
what an empty device has: a figure that was never tried refuses nothing.

Declared and measured needs are known. Each measurement replaces the one before. Whatever a load of
the package was booked with replaces a guess, and so does any measurement. The same files
may take another size in another version of Triton, so sizes are kept by package and version.

Unless the operator sets size_factor, it depends on the backend (`HOST_FACTORS`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from adapter.core.memory import HOST, NO_BYTES, UNSEEN, Bytes, Device, find_larger, total
from adapter.core.model import ModelId, Package, strip_last_slash

MIB = 2**20
# The smallest guess: a model with little more than code takes about this. Readings also vary by
# about this from one moment to the next.
LEAST_NEED_BYTES = 64 * MIB
# Bytes in memory for each byte on disk, of packages of which nothing else is known. TorchScript and
# TensorRT take about what their files do.
SIZE_FACTOR = 1.25
# The same in host memory, by backend. Of an ONNX model Triton makes two instances on a CPU unless
# its config says otherwise, and each has the file's bytes more than once while it starts: 4.1 was
# seen.
HOST_FACTORS = {"onnxruntime": 4.1}
# A load that ran out of memory takes more than was reserved. Doubling finds any size in a few
# tries.
SHORTAGE_FACTOR = 2
# Packages, places and models that are remembered; the one that was used longest ago is forgotten.
MAX_REMEMBERED = 10_000


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_PackageVersion = tuple[str, str]  # content key of the package, version of Triton


class Basis(Enum):
    """Names what a need is based on, as /debug/state, the log and a metric show it."""

    DECLARED = "declared"
    MEASURED = "learned"
    BOOKED = "booked"
    FILES = "disk"
    SHORTAGE = "shortage"


# The basis of a need in the texts of refusals.
BASIS_TEXTS: Mapping[Basis, str] = {
    Basis.DECLARED: "declared",
    Basis.MEASURED: "measured",
    Basis.BOOKED: "as it was last booked",
    Basis.FILES: "guessed from its files",
}


@dataclass(frozen=True, slots=True)
class Need:
    """Holds the memory that one load asks for, and what that is based on."""

    package_key: str
    bytes: Bytes
    basis: Basis = Basis.DECLARED
    is_known: bool = True  # declared or measured, not guessed
    declared: Bytes = field(default_factory=dict)
    known_bytes: Bytes = field(default_factory=dict)  # also of what no device has
    processes: int | None = 1  # among which its memory is divided; None if nobody can tell
    too_little: Bytes = field(default_factory=dict)  # the last load ran out of memory with these


@dataclass(frozen=True, slots=True)
class Size:
    """Holds what a package took when it was last loaded."""

    bytes: Bytes
    is_measured: bool  # by a reading of this load alone, or by Triton's report
    is_reported: bool = False  # by Triton, on all devices


@dataclass(frozen=True, slots=True)
class Shortage:
    """Describes the last load of a package, which ran out of memory."""

    reserved: Bytes
    factor: int  # by which the next need is larger


@dataclass(slots=True)
class Sizes:
    """Remembers what packages took, and says what their next load needs."""

    size_factor: float | None = None  # the operator's; None: by backend and device
    triton_version: str = ""  # empty while it is unknown
    _sizes: dict[_PackageVersion, Size] = field(default_factory=dict)
    _shortages: dict[_PackageVersion, Shortage] = field(default_factory=dict)
    _key_by_place: dict[str, str] = field(default_factory=dict)
    _key_by_model: dict[str, str] = field(default_factory=dict)

    # -- needs ----------------------------------------------------------------------------------

    def need_of(
        self,
        package: Package,
        rooms: Bytes,  # the most that a load can have of each device
        usable: Collection[Device],  # the devices that the package may use
        *,
        device: Device
        | None = None,  # where the adapter would place a package that may be anywhere
        guess_limit_bytes: int | None = None,  # of loads that ModelMesh has planned
    ) -> Need:
        """Return what the load of a package needs of each device, by the rule at the top of this
        module.

        `guess_limit_bytes` limits what is guessed, also after a shortage; `rooms` limits every
        need, a declared one too.
        """
        places = usable if device is None else [device]
        declared: Bytes = {}
        if package.declared_bytes is not None:
            declared = dict.fromkeys(places, package.declared_bytes)
        size = self.find(package.content_key)
        last_bytes = NO_BYTES if size is None else _move(size.bytes, rooms, places, device)
        measured = last_bytes if size is not None and size.is_measured else NO_BYTES
        known_bytes = find_larger(declared, measured)
        if known_bytes:
            needed = known_bytes
            basis = Basis.MEASURED if total(measured) > total(declared) else Basis.DECLARED
        elif last_bytes:
            needed = _limit_guess(last_bytes, guess_limit_bytes)
            basis = Basis.BOOKED
        else:
            guesses = {place: self._guess_from_files(package, place) for place in places}
            needed = _limit_guess(guesses, guess_limit_bytes)
            basis = Basis.FILES
        too_little = NO_BYTES
        shortage = self._shortages.get(self._add_version(package.content_key))
        if shortage is not None:
            reserved = _move(shortage.reserved, rooms, places, device)
            guess = {place: shortage.factor * count for place, count in reserved.items()}
            raised = find_larger(needed, _limit_guess(guess, guess_limit_bytes))
            if raised != needed:
                needed = raised
                basis = Basis.SHORTAGE
                too_little = reserved
        return Need(
            package.content_key,
            {place: _limit_to_room(count, rooms.get(place)) for place, count in needed.items()},
            basis,
            is_known=bool(known_bytes),
            declared=declared,
            known_bytes=known_bytes,
            processes=package.processes,
            too_little=too_little,
        )

    # -- what loads have shown ------------------------------------------------------------------

    def learn(
        self, package_key: str, booked: Bytes, *, is_measured: bool, is_reported: bool = False
    ) -> None:
        """Remember what a load was booked with. A guess never replaces a measurement, and where
        nothing has memory there is nothing to remember.
        """
        size = self.find(package_key)
        is_newer = size is None or is_measured or not size.is_measured
        if booked and is_newer:
            learned = Size(dict(booked), is_measured, is_reported)
            remember(self._sizes, self._add_version(package_key), learned)

    def record_shortage(self, package_key: str, reserved: Bytes, *, is_known: bool = False) -> None:
        """Raise the next need of a package to at least twice what its load had reserved.

        The load ran out of memory with that. A known need stays as it is until the load has failed
        twice in a row: the first time something else may have taken the memory. `end_shortage`
        ends it.
        """
        is_believed = is_known and self._add_version(package_key) not in self._shortages
        factor = 1 if is_believed else SHORTAGE_FACTOR
        shortage = Shortage(dict(reserved), factor)
        remember(self._shortages, self._add_version(package_key), shortage)

    def end_shortage(self, package_key: str) -> None:
        """Forget that the package ran out of memory: it was loaded."""
        self._shortages.pop(self._add_version(package_key), None)

    def forget(self, package_key: str) -> None:
        """Forget what loads of the package have shown, with any version of Triton."""
        for entries in (self._sizes, self._shortages):
            for key in [key for key in entries if key[0] == package_key]:
                del entries[key]

    def find_shortage(self, package_key: str) -> Bytes:
        """Return what the last load of a package had reserved, if it ran out of memory."""
        shortage = self._shortages.get(self._add_version(package_key))
        return NO_BYTES if shortage is None else shortage.reserved

    def find(self, package_key: str) -> Size | None:
        """Return what the package took the last time; None if it was never loaded."""
        return self._sizes.get(self._add_version(package_key))

    # -- sizes that ModelMesh asks for before it has the files ----------------------------------

    def remember_place(self, url: str, package_key: str) -> None:
        """Remember which package was last loaded from a place."""
        remember(self._key_by_place, strip_last_slash(url), package_key)

    def remember_model(self, model_id: ModelId, package_key: str) -> None:
        """Remember which package was last loaded as the model of this id."""
        remember(self._key_by_model, model_id, package_key)

    def key_of_model(self, model_id: ModelId) -> str | None:
        """Return the key of the package that was last to be loaded as this model."""
        return self._key_by_model.get(model_id)

    def measured_bytes(self, url: str, model_id: ModelId) -> int | None:
        """Return what the package took that was last loaded from the place, else under the name;
        None if neither was ever measured.
        """
        keys = (self._key_by_place.get(strip_last_slash(url)), self._key_by_model.get(model_id))
        for key in keys:
            size = None if key is None else self.find(key)
            if size is not None and size.is_measured:
                return total(size.bytes)
        return None

    def mean_bytes(self) -> int:
        """Return the mean of all measured sizes, each on all devices; 0 before the first."""
        sizes = [total(size.bytes) for size in self._list_measured()]
        return sum(sizes) // len(sizes) if sizes else 0

    def largest(self) -> Bytes:
        """Return the largest measured size on each device."""
        largest: Bytes = NO_BYTES
        for size in self._list_measured():
            largest = find_larger(largest, size.bytes)
        return largest

    def _list_measured(self) -> list[Size]:
        return [size for size in self._sizes.values() if size.is_measured]

    # -- from one run to the next ---------------------------------------------------------------

    def as_dict(self) -> dict[str, object]:
        """Return what the sizes file keeps: JSON that `restore` reads, the oldest first."""
        keys = {key for key, _ in self._sizes}
        return {
            "packages": [
                {
                    "key": key,
                    "triton": version,
                    "bytes": dict(size.bytes),
                    "is_measured": size.is_measured,
                    "is_reported": size.is_reported,
                }
                for (key, version), size in self._sizes.items()
            ],
            "places": {url: key for url, key in self._key_by_place.items() if key in keys},
            "models": {name: key for name, key in self._key_by_model.items() if key in keys},
        }

    def restore(self, data: object) -> int:
        """Learn what `as_dict` has written; return how many sizes are remembered now.

        Anybody may have written the file: entries of another form are left out.
        """
        if not isinstance(data, dict):
            return 0
        packages = data.get("packages")
        for entry in packages if isinstance(packages, list) else []:
            parsed = _parse_size(entry)
            if parsed is not None:
                remember(self._sizes, *parsed)
        keys = {key for key, _ in self._sizes}
        for name, key in _parse_keys(data.get("places"), keys):
            remember(self._key_by_place, strip_last_slash(name), key)
        for name, key in _parse_keys(data.get("models"), keys):
            remember(self._key_by_model, name, key)
        return len(self._sizes)

    def _guess_from_files(self, package: Package, device: Device) -> int:
        """Return the bytes that a package of these files may take of the device.

        If its models have several backends, the largest factor counts.
        """
        factor = self.size_factor
        if factor is None:
            host_factors = HOST_FACTORS if device == HOST else {}
            factors = [host_factors.get(name, SIZE_FACTOR) for name in package.backends]
            factor = max(factors, default=SIZE_FACTOR)
        return int(package.size_bytes * factor)

    def _add_version(self, package_key: str) -> _PackageVersion:
        """Return the key that sizes are kept by: the package's, with the version of Triton."""
        return package_key, self.triton_version


def usable_devices(package: Package, numbers: Mapping[Device, int | None]) -> list[Device]:
    """Return the devices that the package may use; `numbers` are CUDA's, of GPUs.

    Triton makes instances on each GPU unless the package names some. A GPU without a number may be
    any of those that the package names.
    """
    if package.gpus is None:
        return list(numbers)
    devices = []
    for device, number in numbers.items():
        is_host = device in {HOST, UNSEEN}
        may_be_named = bool(package.gpus) if number is None else number in package.gpus
        if is_host or may_be_named:
            devices.append(device)
    return devices


def _move(size: Bytes, rooms: Bytes, usable: Collection[Device], device: Device | None) -> Bytes:
    """Return a size for where the package will be: it needs the same there as elsewhere."""
    if not size or (device is None and size.keys() <= rooms.keys()):
        return size
    return dict.fromkeys(usable, max(size.values()))


def _limit_guess(guess: Bytes, limit_bytes: int | None) -> Bytes:
    """Return a guess of at least 64 MiB and at most `limit_bytes` on each device."""
    guessed = {device: max(count, LEAST_NEED_BYTES) for device, count in guess.items()}
    if limit_bytes is None:
        return guessed
    return {device: min(count, limit_bytes) for device, count in guessed.items()}


def _limit_to_room(count: int, room_bytes: int | None) -> int:
    """Return `count`, cut to the room for loads on its device unless that room is not known."""
    return count if room_bytes is None else min(count, max(0, room_bytes))


def remember(entries: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Put the entry last; drop the first beyond MAX_REMEMBERED."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > MAX_REMEMBERED:
        del entries[next(iter(entries))]


def _parse_size(entry: object) -> tuple[_PackageVersion, Size] | None:
    if not isinstance(entry, dict):
        return None
    key = entry.get("key")
    version = entry.get("triton")
    figures = entry.get("bytes")
    is_measured = entry.get("is_measured")
    if not (isinstance(key, str) and isinstance(version, str) and isinstance(is_measured, bool)):
        return None
    if not isinstance(figures, dict):
        return None
    if not all(isinstance(d, str) and type(n) is int and n >= 0 for d, n in figures.items()):
        return None
    is_reported = entry.get("is_reported") is True
    learned = Size({Device(d): n for d, n in figures.items()}, is_measured, is_reported)
    return (key, version), learned


def _parse_keys(names: object, keys: Collection[str]) -> list[tuple[str, str]]:
    """Return pairs of a place or model name and its package key, read from the sizes file.

    The pairs leave out entries of another form, and packages without a remembered size.
    """
    if not isinstance(names, dict):
        return []
    return [
        (name, key)
        for name, key in names.items()
        if isinstance(name, str) and isinstance(key, str) and key in keys
    ]
