"""Read and write counts of bytes as people write them: `8GiB`, `512Mi`, `1.5 GB`."""

import re

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES_BY_UNIT = {
    "": 1,
    "b": 1,
    **{unit.lower(): count for unit, count in (_BINARY | _DECIMAL).items()},
    **{unit.lower()[:-1]: count for unit, count in _BINARY.items()},  # as Kubernetes writes them
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_UNIT_STEP = 1024


def parse_size(text: str) -> int:
    """Return how many bytes a text means. Raises ValueError, which names the accepted forms."""
    match = _SIZE.fullmatch(text)
    unit_bytes = None if match is None else _BYTES_BY_UNIT.get(match[2].lower())
    if match is None or unit_bytes is None:
        units = "KiB, MiB, GiB, TiB, KB, MB, GB or TB"
        raise ValueError(f"write bytes or a number with {units}")
    number = match[1]
    return int(float(number) * unit_bytes) if "." in number else int(number) * unit_bytes


def format_size(count: int) -> str:
    """Return bytes for people: `1.5 GiB`. Exact figures belong in fields of their own."""
    if abs(count) < _UNIT_STEP:
        return f"{count} bytes"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= _UNIT_STEP
        if abs(value) < _UNIT_STEP:
            return f"{value:.1f} {unit}"
    return f"{value / _UNIT_STEP:.1f} TiB"


def format_exact_size(count: int) -> str:
    """Return bytes as `parse_size` reads them: `8GiB`; else the count and about how much it is."""
    if count < _UNIT_STEP:
        return str(count)
    units = (_BINARY | _DECIMAL).items()
    whole = [(count // unit_bytes, unit) for unit, unit_bytes in units if count % unit_bytes == 0]
    if not whole:
        return f"{count} ({format_size(count)})"
    number, unit = min(whole)
    return f"{number}{unit}"
