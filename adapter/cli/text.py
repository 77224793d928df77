"""Formats text for a terminal: columns, durations, colours."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_LEAST_COLUMN = 10  # of the column that gives way in a narrow terminal

BOLD, DIM, RED, GREEN, YELLOW, BLUE = "1", "2", "31", "32", "33", "34"


def is_live(stream: TextIO) -> bool:
    """Return whether lines that were written can be written over."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


def has_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours."""
    return is_live(stream) and not os.environ.get("NO_COLOR")


def coloured(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in an ANSI colour where the stream shows colours."""
    return f"\033[{colour}m{text}\033[0m" if has_colours(stream or sys.stdout) else text


def width(stream: TextIO | None = None) -> int | None:
    """Return the columns of the terminal; None where there is none."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def printable(text: str) -> str:
    """Escape what would move the cursor or break the line: names may hold any character."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """Escape each line as `printable` does; the line breaks stay."""
    return "\n".join(map(printable, text.split("\n")))


def columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Return a line for each row, the columns below each other; those in `right` end so.

    On a terminal the first column gives way where lines would be too wide; what still is, is cut.
    """

    def padded(text: str, at: int) -> str:
        blanks = " " * (widths[at] - _width_of(text))
        return blanks + text if at in right else text + blanks

    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(_width_of, column)) for column in zip(*rows, strict=True)]
    limit = width() or sys.maxsize
    others = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(_LEAST_COLUMN, limit - others))
    lines = []
    for first, *rest in rows:
        cells = [_cut(first, widths[0]), *rest]
        lines.append(_cut("  ".join(map(padded, cells, range(len(cells)))).rstrip(), limit))
    return lines


def _cut(text: str, size: int) -> str:
    if _width_of(text) <= size:
        return text
    from rich.cells import set_cell_size  # noqa: PLC0415 - see below

    return set_cell_size(text, size - 1).rstrip() + "…"


def _width_of(text: str) -> int:
    """Return the columns of the text: letters of China, Japan and Korea, and emoji, take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - imports take 15 ms

    return cell_len(text)


def duration(seconds: float) -> str:
    """Return `5s`, `12m`, `3h20m` or `2d4h`."""
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR}h"
