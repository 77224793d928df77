"""Prints the settings in force."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping

from adapter.cli.options import add_config, add_settings, load
from adapter.cli.text import printable

_LEAST_WIDTH = 30  # of the last column; narrower terminals break the lines themselves
_MOST_VALUE = 32  # of the column of values; a longer one pushes what follows to the right


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_settings(parser)


def _run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from adapter.settings import for_people, for_programs  # noqa: PLC0415 - pydantic

    loaded = load(args, environ)
    for warning in loaded.warnings:
        print(printable(warning), file=sys.stderr)
    if args.json:
        print(json.dumps(for_programs(loaded), indent=2))
        return 0
    rows = [[printable(cell) for cell in row] for row in for_people(loaded)]
    names = max(len(name) for name, _, _ in rows)
    values = min(_MOST_VALUE, max(len(value) for _, value, _ in rows))
    for name, value, origin in rows:
        print(_line(f"{name:<{names}}  {value:<{values}}  ", origin, names + values + 4))
    return 0


def _line(head: str, origin: str, indent: int) -> str:
    """The origin is broken into several lines on a terminal that is too narrow for it."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if width - max(indent, len(head)) < _LEAST_WIDTH:
        return head + origin
    after = " " * indent
    return textwrap.fill(origin, width, initial_indent=head, subsequent_indent=after)


COMMANDS = {"check-config": (_add_options, _run)}
