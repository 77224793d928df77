"""How many bytes of memory a model will take: learned beats declared, else nobody knows."""

import re
from dataclasses import dataclass
from enum import Enum

from adapter.core.model import Package

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`8GiB`, `512 MiB`, `1.5GiB` or plain bytes, in bytes. ValueError names the accepted forms."""
    match = _SIZE.fullmatch(text)
    if match is None or (unit := _UNITS.get(match[2].lower())) is None:
        raise ValueError(f"{text!r} is no size; write bytes or a number with KiB, MiB, GiB or TiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def format_size(count: int) -> str:
    """Bytes for people: `1.5 GiB`. Exact figures belong in their own fields."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:  # noqa: PLR2004 - the step of the units
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Basis(Enum):
    """What an estimate stands on. Only the first two are good enough to refuse a load by."""

    LEARNED = "learned"
    DECLARED = "declared"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Estimate:
    size_bytes: int
    basis: Basis


class Sizes:
    """What each package was seen to take, by content key."""

    def __init__(self) -> None:
        self._learned: dict[str, int] = {}

    def learn(self, package: Package, measured_bytes: int) -> None:
        known = self._learned.get(package.content_key, 0)
        self._learned[package.content_key] = max(known, measured_bytes)

    def estimate(self, package: Package) -> Estimate:
        if (learned := self._learned.get(package.content_key)) is not None:
            return Estimate(learned, Basis.LEARNED)
        if package.declared_bytes is not None:
            return Estimate(package.declared_bytes, Basis.DECLARED)
        return Estimate(0, Basis.UNKNOWN)
