"""Formats text for a terminal: columns, durations, colours."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

_MINUTE = 60
_HOUR = 3600
_DAY = 86400
_MIN_COLUMN = 10  # to which the first column shrinks in a narrow terminal

BOLD = "1"
RED = "31"
GREEN = "32"
YELLOW = "33"


def can_rewrite(stream: TextIO) -> bool:
    """Return whether lines that were written to a stream can be written over."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


def add_colour(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Return the text in an ANSI colour if the stream (stdout by default) shows colours."""
    has_colours = can_rewrite(stream or sys.stdout) and not os.environ.get("NO_COLOR")
    return f"\033[{colour}m{text}\033[0m" if has_colours else text


def terminal_width() -> int | None:
    """Return the columns of the terminal; None if stdout is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def escape(text: str) -> str:
    """Escape characters that move the cursor or break the line; names may hold any character."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def escape_lines(text: str) -> str:
    """Escape each line of a text as `escape` does, but keep the line breaks."""
    return "\n".join(map(escape, text.split("\n")))


def format_columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Return a line for each row, with the cells padded to columns.

    The columns in `right` are aligned to the right. On a terminal that is too narrow the first
    column shrinks, and lines that are still too long are cut.
    """
    rows = [[escape(cell) for cell in row] for row in rows]
    widths = [max(map(_measure, column)) for column in zip(*rows, strict=True)]
    limit = terminal_width() or sys.maxsize
    other_widths = sum(widths[1:]) + 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(_MIN_COLUMN, limit - other_widths))
    lines = []
    for row in rows:
        cells = []
        for column, text in enumerate(row):
            cell = _cut(text, widths[column])
            padding = " " * (widths[column] - _measure(cell))
            cells.append(padding + cell if column in right else cell + padding)
        lines.append(_cut("  ".join(cells).rstrip(), limit))
    return lines


def _cut(text: str, limit: int) -> str:
    """Cut a text to columns of the terminal, with an ellipsis at its end."""
    if _measure(text) <= limit:
        return text
    from rich.cells import set_cell_size  # noqa: PLC0415 - see below

    return set_cell_size(text, limit - 1).rstrip() + "…"


def _measure(text: str) -> int:
    """Return how many columns a text takes: emoji and letters of East Asia take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - imports take 15 ms

    return cell_len(text)


def format_duration(seconds: float) -> str:
    """Return a duration with two units at most: `5s`, `12m`, `3h20m` or `2d4h`."""
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR}h"
