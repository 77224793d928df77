"""The command that shows the memory of each device of a running adapter."""

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from adapter.cli.options import add_listeners
from adapter.cli.text import (
    BLUE,
    BOLD,
    DIM,
    GREEN,
    YELLOW,
    coloured,
    columns,
    has_colours,
    printable,
)
from adapter.core.ledger import NOT_MEASURED
from adapter.core.sizing import format_size
from adapter.tools.client.connection import target_of
from adapter.tools.client.models import add_watch, shown, state_of

_BAR = 40
_HEAD = ["DEVICE", "LIMIT", "USED", "HELD", "RESERVED", "FREE"]
_FIGURES = ("limit_bytes", "used_bytes", "held_bytes", "reserved_bytes", "free_bytes")
# From the left: held by models, reserved for loads under way, in use by others, free, kept free.
_KINDS = (
    ("#", GREEN, "held by models"),
    ("+", YELLOW, "reserved for loads"),
    ("=", BLUE, "other use"),
    (".", DIM, "free"),
    ("-", DIM, "kept free"),
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_watch(parser)
    add_listeners(parser, "admin")


def _run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    target = target_of(args, environ, "admin")

    def look() -> list[str]:
        memory = state_of(target)["memory"]
        return [json.dumps(memory)] if args.json else _lines(memory)

    return shown(look, target, args)


def _lines(memory: Mapping[str, Any]) -> list[str]:
    devices = memory["devices"]
    if not devices:
        return [NOT_MEASURED]
    rows = [[name, *(_size(each[key]) for key in _FIGURES)] for name, each in devices.items()]
    title, *lines = columns([_HEAD, *rows], frozenset(range(1, len(_HEAD))))
    bars = [bar for each in devices.values() if (bar := _bar(each))]
    shown = [coloured(title, BOLD)]
    for at, line in enumerate(lines):
        shown += [line, *([f"  {bars[at]}"] if len(bars) == len(lines) else [])]
    if bars:
        shown += [
            "",
            "  ".join(_painted(mark, 1, colour) + f" {text}" for mark, colour, text in _KINDS),
        ]
    shown += [
        printable(f"unaccounted for on {name}: {_size(count)}")
        for name, each in devices.items()
        if (count := each.get("unaccounted_bytes"))
    ]
    return [*shown, printable(f"measured by: {memory['source'] or 'nothing'}")]


def _size(count: int | None) -> str:
    return "-" if count is None else format_size(count)


def _bar(device: Mapping[str, Any]) -> str:
    """One of _BAR characters, without the limit none."""
    limit = device["limit_bytes"]
    if not limit:
        return ""
    held, reserved = device["held_bytes"], device["reserved_bytes"]
    kept = device["headroom_bytes"]
    free = max(0, device["free_bytes"] or 0)
    other = max(0, limit - held - reserved - free - kept)
    ends, sums = [], 0
    for count in (held, reserved, other, free, kept):
        sums += count
        ends.append(min(_BAR, round(_BAR * sums / limit)))
    sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    parts = [
        _painted(mark, max(0, size), colour)
        for (mark, colour, _), size in zip(_KINDS, sizes, strict=True)
    ]
    return f"[{''.join(parts)}]"


def _painted(mark: str, count: int, colour: str) -> str:
    """Characters of ASCII, in blocks of colour where there are colours."""
    if not count:
        return ""
    blocks = {"#": "█", "+": "▓", "=": "▒", ".": "·", "-": "-"}
    return coloured((blocks[mark] if has_colours(sys.stdout) else mark) * count, colour)


COMMANDS = {"memory": (_add_options, _run)}
