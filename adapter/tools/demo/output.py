"""Prints the demo's steps, and the bar of memory in which each model has its share."""

import asyncio
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from adapter.cli.text import BLUE, BOLD, DIM, GREEN, RED, YELLOW, coloured, is_live, width
from adapter.core.sizing import format_size

if TYPE_CHECKING:
    from rich.text import Text

State = Mapping[str, Any]  # what /debug/state says

PLAIN_COLUMNS = 100  # where there is no terminal
_LEAST_COLUMNS = 30
_WIDTH = 40
_ORDER = ("digits", "alpha", "beta", "gamma", "hungry_infer")  # of the shares, in each bar
_COLOURS = {"alpha": GREEN, "beta": BLUE, "gamma": YELLOW, "hungry_infer": RED}
_LOOK_SECONDS = 0.1


class StepFailed(Exception):
    pass


def title(text: str) -> None:
    print(f"\n{coloured(_wrapped(text, ''), BOLD)}", flush=True)


def say(text: str) -> None:
    print(_wrapped(text, "  "), flush=True)


def _wrapped(text: str, indent: str) -> str:
    """Break each line at words, on a terminal that is too narrow for it. Codes of colours, which
    take no columns, are counted: such a line breaks somewhat early.
    """
    columns = width()
    if columns is None:
        return indent + text
    wrapper = textwrap.TextWrapper(
        max(columns, _LEAST_COLUMNS),
        initial_indent=indent,
        subsequent_indent=indent + " " * 6,
        break_long_words=False,
    )
    lines = [
        wrapper.fill(line) if len(indent + line) > columns else indent + line
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def detail(text: str) -> None:
    print(f"        {text}", flush=True)


def check(is_met: bool, text: str, more: str = "") -> None:
    say(f"{coloured('ok', GREEN)}    {text}" if is_met else f"{coloured('FAIL', RED)}  {text}")
    if not is_met:
        say(more)
        raise StepFailed(text)


def bar(state: State) -> str:
    """Draw the device as one line: `[aaaaaabbbb++........] 1.4 GiB of 2.0 GiB`.

    A model's share has its first letter; `+` is in use and nobody's yet, as while a load goes on.
    """
    [device] = state["memory"]["devices"].values()
    limit = device["limit_bytes"]
    held = {model["model_id"]: sum(model["bytes"].values()) for model in state["models"]}
    shares = {name: held[name] for name in sorted(held, key=_place) if held[name]}
    used = max(0, (device["used_bytes"] or 0) - device["baseline_bytes"])
    others = max(0, used - sum(shares.values()))
    parts, end, sums = [], 0, 0
    for name, size in [*shares.items(), ("+", others), (".", limit)]:
        begin, sums = end, sums + size
        end = min(_WIDTH, round(_WIDTH * sums / limit))
        parts.append(coloured(name[0] * (end - begin), _COLOURS.get(name, DIM)))
    total = max(used, sum(shares.values()))
    return f"[{''.join(parts)}] {format_size(total)} of {format_size(limit)}"


def _place(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


@asynccontextmanager
async def shown_meanwhile(look: Callable[[], Awaitable[State]]) -> AsyncIterator[None]:
    """Draw the bar again and again, where a line can be written over."""
    if not is_live(sys.stdout):
        yield
        return
    drawing = asyncio.create_task(_draw(look))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.wait([drawing])


async def _draw(look: Callable[[], Awaitable[State]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.live import Live  # noqa: PLC0415

    with Live(console=Console(), auto_refresh=False, transient=True) as view:
        while True:
            view.update(_line(bar(await look())), refresh=True)
            await asyncio.sleep(_LOOK_SECONDS)


def _line(text: str) -> "Text":
    from rich.text import Text  # noqa: PLC0415 - see above

    return Text.from_ansi(f"        {text}", no_wrap=True, overflow="ellipsis")
