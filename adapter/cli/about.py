"""Runs the commands about the command itself: version, help, completion, check-config."""

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from adapter.cli.commands import COMMANDS as ALL
from adapter.cli.options import add_config, add_settings, load
from adapter.cli.parser import PROG, build, describe_unknown_command, print_help
from adapter.cli.text import printable

_DEPENDENCIES = ("aiohttp", "grpcio", "protobuf", "tritonclient", "uvloop", "nvidia-pytriton")
_SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"FILE", "FILE.png", "PATH", "SOURCE"}
_FOLDERS = {"FOLDER"}
# For bash `--flag=value` is three words, or one where COMP_WORDBREAKS has no `=`; shtab's function
# knows flag and value as two.
_BASH_EQUALS = """
_triton_adapter() {
  local word before="" words=() at
  for ((at = 0; at <= COMP_CWORD; at++)); do
    word="${COMP_WORDS[at]}"
    before=""
    if [[ $word == "=" ]]; then
      ((at == COMP_CWORD)) && words+=("")
    elif [[ $word == --*=* ]]; then
      before="${word%%=*}="
      words+=("${word%%=*}" "${word#*=}")
    else
      words+=("$word")
    fi
  done
  local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
  _shtab_triton_adapter
  [[ -n $before ]] && COMPREPLY=("${COMPREPLY[@]/#/$before}")
  return 0
}

complete -o bashdefault -F _triton_adapter triton-adapter
"""
# of check-config's table
_LEAST_WIDTH = 30  # of the last column; narrower terminals break the lines themselves
_MOST_VALUE = 32  # of the column of values; a longer one pushes what follows to the right


def _version_options(parser: argparse.ArgumentParser) -> None:
    text = "with Python and the key dependencies"
    parser.add_argument("--all", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def _version(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    found = {name: _installed(name) for name in (PROG, *(_DEPENDENCIES if args.all else ()))}
    if args.all:
        found["python"] = sys.version.split()[0]
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for name, number in found.items():
            print(name, number or "not installed")
    return 0


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _help_options(parser: argparse.ArgumentParser) -> None:
    text = "(default: of all)"
    parser.add_argument("of", nargs="?", metavar="COMMAND", type=_command, help=text)


def _command(name: str) -> str:
    if name not in ALL:
        raise argparse.ArgumentTypeError(describe_unknown_command(name))
    return name


def _help(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    print_help(args.of)
    return 0


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def _completion(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    import shtab  # noqa: PLC0415 - no other command needs it

    top, parsers = build(ALL)
    for parser in parsers.values():
        for action in parser._actions:  # noqa: SLF001 - argparse has no other list of them
            taken = str(action.metavar)
            if taken in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif taken in _FOLDERS:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif "|" in taken and taken.islower():
                action.choices = taken.split("|")
            elif taken == "COMMAND":
                action.choices = list(ALL)
    script = shtab.complete(top, shell=args.shell)
    print(script + _BASH_EQUALS if args.shell == "bash" else script)
    return 0


def _schema(_args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    from adapter.settings import file_schema  # noqa: PLC0415 - pydantic

    print(json.dumps(file_schema(), indent=2))
    return 0


def _config_options(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_settings(parser)


def _check_config(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
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
    """Add the origin, broken into several lines on a terminal that is too narrow for it."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if width - max(indent, len(head)) < _LEAST_WIDTH:
        return head + origin
    after = " " * indent
    return textwrap.fill(origin, width, initial_indent=head, subsequent_indent=after)


COMMANDS = {
    "version": (_version_options, _version),
    "help": (_help_options, _help),
    "completion": (_completion_options, _completion),
    "check-config": (_config_options, _check_config),
    "schema": (lambda _: None, _schema),
}
