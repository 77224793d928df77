"""Estimates the memory of a model: as learned, declared, on disk, or by default."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from adapter.core.memory import HOST, NO_BYTES, UNSEEN, Bytes, Device, Gpu, most_of, total
from adapter.core.model import ModelId, Package, strip_last_slash

# Packages, and places of packages, that are remembered; the least recent go first.
MAX_REMEMBERED = 10_000

# Files below this are code and configuration, and say nothing of memory.
_TELLING_BYTES = 2**20

# Each time a model is unloaded its learned size loses this part of what it did not take.
_DECAY = 4

# The content key of a package, and the version of Triton.
_LearnedKey = tuple[str, str]

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {
    "": 1,
    "b": 1,
    **{unit.lower(): count for unit, count in (_BINARY | _DECIMAL).items()},
    **{unit.lower()[:-1]: count for unit, count in _BINARY.items()},  # as Kubernetes writes them
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`8GiB`, `512Mi`, `1.5 GB` or plain bytes, in bytes. ValueError names the accepted forms."""
    match = _SIZE.fullmatch(text)
    if match is None or (unit := _UNITS.get(match[2].lower())) is None:
        units = "KiB, MiB, GiB, TiB, KB, MB, GB or TB"
        raise ValueError(f"write bytes or a number with {units}")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(count: int) -> str:
    """Bytes for people: `1.5 GiB`. Exact figures belong in their own fields."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:  # noqa: PLR2004 - the step of the units
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def exact_size(count: int) -> str:
    """Bytes as `parse_size` reads them: `8GiB`, else the figure and about how much that is."""
    if count < _BINARY["KiB"]:
        return str(count)
    whole = [(count // n, unit) for unit, n in (_BINARY | _DECIMAL).items() if count % n == 0]
    if not whole:
        return f"{count} ({format_size(count)})"
    number, unit = min(whole)
    return f"{number}{unit}"


class Basis(Enum):
    """The basis of an estimate, the most trusted first."""

    LEARNED = "learned"
    DECLARED = "declared"
    DISK = "disk"
    DEFAULT = "default"


# Good enough to refuse a load by, and to let others load beside it.
KNOWN = frozenset({Basis.LEARNED, Basis.DECLARED})


@dataclass(frozen=True, slots=True)
class Estimate:
    """`gpu`: the one that the model is put on; None where Triton or the package decides."""

    needs: Bytes
    basis: Basis
    gpu: Gpu | None = None

    @property
    def size_bytes(self) -> int:
        """On all devices together."""
        return total(self.needs)


@dataclass(frozen=True, slots=True)
class _Learned:
    """`exact` when measured with nothing else going on, else a share of what several took.
    `is_reported`: by Triton, not by readings.
    """

    figures: Bytes
    exact: bool
    is_reported: bool = False


class Sizes:
    """Remembers the memory that each package took, by content key and version of Triton, and
    estimates that of others.

    `size_factor` makes memory of bytes on disk; `default_bytes` is for a package whose files say
    nothing. `version` returns that of Triton, empty while it is unknown. `is_changed`: since they
    were last saved.
    """

    def __init__(
        self,
        size_factor: float = 1.25,
        default_bytes: int = 0,
        version: Callable[[], str] = str,
    ) -> None:
        self._size_factor = size_factor
        self.default_bytes = default_bytes
        self._version = version
        self.is_changed = False
        # of packages and models that need not be loaded; all have the latest at the end
        self._learned: dict[_LearnedKey, _Learned] = {}
        self._key_at: dict[str, str] = {}
        self._key_of: dict[str, str] = {}
        self._baseline: Bytes = NO_BYTES  # the most that was seen, also in earlier runs
        self.earlier_baseline: Bytes = NO_BYTES  # the same of earlier runs alone
        self._declared: dict[str, int] = {}  # by content key, of this run

    def estimate(self, package: Package, devices: Mapping[Device, int | None]) -> Estimate:
        """`devices` with CUDA's number of each, None where it has none or nobody says.

        What is not learned counts on every device that the package may use: Triton makes its
        instances on each GPU unless the configuration names some.
        """
        usable = [device for device, index in devices.items() if _may_use(package, device, index)]
        if (learned := self._of(package.content_key)) is not None:
            figures = learned.figures
            if not figures.keys() <= devices.keys():
                # learned on other hardware: which of its devices is which here, nobody can say
                figures = dict.fromkeys(usable, max(figures.values()))
            return Estimate(figures, Basis.LEARNED)
        size_bytes, basis = self._guess(package)
        return Estimate(dict.fromkeys(usable, size_bytes), basis)

    def learn(
        self,
        package_key: str,
        measured: Bytes,
        *,
        exact: bool,
        is_reported: bool = False,
        gpu: Gpu | None = None,
    ) -> None:
        """The largest of the exact figures counts, on each device; of shares only the latest,
        and those only until there is an exact figure. A share is not below what is declared: the
        rest of it may have gone to those that declare too much. `is_reported`: by Triton. `gpu`:
        the only one that the model was put on; what it took of another before, it would take of
        this one.
        """
        least = 0 if exact else self._declared.get(package_key, 0)
        figures = {d: max(count, least) for d, count in measured.items() if count > 0}
        if least and not figures:
            return
        known = self._of(package_key, gpu)
        if known is not None and known.exact:
            if not exact:
                return
            figures = dict(most_of(figures, known.figures))
        remember(self._learned, self._key(package_key), _Learned(figures, exact, is_reported))
        self.is_changed = True

    def _key(self, package_key: str) -> _LearnedKey:
        return package_key, self._version()

    def _of(self, package_key: str, gpu: Gpu | None = None) -> _Learned | None:
        known = self._learned.get(self._key(package_key))
        if known is None or gpu is None or known.figures.keys() <= {gpu.device}:
            return known
        return replace(known, figures={gpu.device: max(known.figures.values())})

    def forget(self, package_key: str) -> None:
        """Whatever was learned of it is wrong."""
        self._learned.pop(self._key(package_key), None)

    def lived(self, package_key: str, most: Bytes, gpu: Gpu | None = None) -> None:
        """`most` is all that it took from a load to its unload: a larger figure of before comes
        nearer to it. Not at once: models grow by what they are asked. `gpu`: as of `learn`.
        """
        known = self._of(package_key, gpu)
        if known is None or not known.exact:
            return
        figures = {
            device: count - max(0, count - most.get(device, 0)) // _DECAY
            for device, count in known.figures.items()
        }
        self._learned[self._key(package_key)] = replace(known, figures=figures)
        self.is_changed |= figures != known.figures

    def learned(self, package_key: str) -> Bytes | None:
        """The figures that count for the package; None when it was never measured."""
        known = self._of(package_key)
        return known.figures if known else None

    def mean_bytes(self) -> int:
        """Return the mean of all learned sizes, each on all devices; 0 before the first."""
        found = [total(learned.figures) for learned in self._learned.values()]
        return sum(found) // len(found) if found else 0

    def largest(self) -> Bytes:
        """Return the largest figure that was learned for each device."""
        found: Bytes = NO_BYTES
        for learned in self._learned.values():
            found = most_of(found, learned.figures)
        return found

    def saw_baseline(self, baseline: Bytes) -> None:
        """Remember the largest baseline of each device."""
        self._baseline = most_of(self._baseline, baseline)

    def is_exact(self, package_key: str) -> bool:
        """Return whether what was learned of the package is its own alone, not a share."""
        return (learned := self._of(package_key)) is not None and learned.exact

    def is_reported(self, package_key: str) -> bool:
        """Return whether Triton has reported what was learned of the package."""
        return (learned := self._of(package_key)) is not None and learned.is_reported

    def known_at(self, url: str, package: Package) -> None:
        """Remember which files are at `url`, so that a size can be told before they are read."""
        remember(self._key_at, strip_last_slash(url), package.content_key)

    def of_url(self, url: str) -> int | None:
        """Bytes on all devices that the files last seen at `url` were learned to take."""
        key = self._key_at.get(strip_last_slash(url))
        if key is None or (learned := self._of(key)) is None:
            return None
        return total(learned.figures)

    def known_as(self, model_id: ModelId, package: Package) -> None:
        """The same for the name of a model, for whoever asks with another path than it loads."""
        remember(self._key_of, model_id, package.content_key)
        if package.declared_bytes is not None:
            remember(self._declared, package.content_key, package.declared_bytes)

    def of_model(self, model_id: ModelId) -> int | None:
        """Bytes on all devices that the files last loaded as `model_id` were learned to take."""
        key = self._key_of.get(model_id)
        if key is None or (learned := self._of(key)) is None:
            return None
        return total(learned.figures)

    def as_dict(self) -> dict[str, object]:
        """Return what was learned, in that order, as JSON that `restore` reads."""
        known = {key for key, _ in self._learned}
        return {
            "packages": [
                {"key": key, "bytes": dict(learned.figures), "exact": learned.exact}
                | ({"triton": version} if version else {})
                | ({"is_reported": True} if learned.is_reported else {})
                for (key, version), learned in self._learned.items()
            ],
            "places": {url: key for url, key in self._key_at.items() if key in known},
            "models": {name: key for name, key in self._key_of.items() if key in known},
            "baseline": dict(self._baseline),
        }

    def restore(self, data: object) -> int:
        """Learn what `as_dict` wrote; how many packages that were. What is no such entry is left
        out: the data comes from a file that anybody may have written.
        """
        entries = data.get("packages") if isinstance(data, dict) else None
        found = dict(filter(None, map(_parse_entry, entries if isinstance(entries, list) else [])))
        latest = list(found.items())[-MAX_REMEMBERED:]
        for key, learned in latest:
            remember(self._learned, key, learned)
        known = {key for key, _ in self._learned}
        for member, keys in (("places", self._key_at), ("models", self._key_of)):
            named = data.get(member) if isinstance(data, dict) else None
            for name, key in named.items() if isinstance(named, dict) else ():
                if isinstance(name, str) and isinstance(key, str) and key in known:
                    remember(keys, strip_last_slash(name) if member == "places" else name, key)
        baseline = data.get("baseline") if isinstance(data, dict) else None
        if (figures := _parse_bytes(baseline)) is not None:
            self._baseline = self.earlier_baseline = figures
        return len(latest)

    def _guess(self, package: Package) -> tuple[int, Basis]:
        if package.declared_bytes is not None:
            return package.declared_bytes, Basis.DECLARED
        if tells_size(package):
            return int(package.size_bytes * self._size_factor), Basis.DISK
        return self.default_bytes, Basis.DEFAULT


def tells_size(package: Package) -> bool:
    """Return whether the files of the package are more than code and configuration."""
    return package.size_bytes >= _TELLING_BYTES


def _may_use(package: Package, device: Device, index: int | None) -> bool:
    """Where nobody says which GPU a device is, it may be any of those that the package names."""
    if package.gpus is None or device in {HOST, UNSEEN}:
        return True
    return index in package.gpus or (index is None and bool(package.gpus))


def remember(entries: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Put the entry last; drop the first beyond MAX_REMEMBERED."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > MAX_REMEMBERED:
        del entries[next(iter(entries))]


def _parse_entry(entry: object) -> tuple[_LearnedKey, _Learned] | None:
    if not isinstance(entry, dict):
        return None
    key, figures, exact = entry.get("key"), entry.get("bytes"), entry.get("exact")
    version = entry.get("triton", "")
    if not (isinstance(key, str) and isinstance(exact, bool) and isinstance(version, str)):
        return None
    parsed = _parse_bytes(figures)
    is_reported = entry.get("is_reported") is True
    return None if parsed is None else ((key, version), _Learned(parsed, exact, is_reported))


def _parse_bytes(figures: object) -> Bytes | None:
    if not isinstance(figures, dict):
        return None
    if not all(isinstance(d, str) and type(n) is int and n >= 0 for d, n in figures.items()):
        return None
    return {Device(d): n for d, n in figures.items()}
