"""Runs the commands about the command itself: version, help, completion, check-config, schema."""

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from adapter.cli.commands import COMMANDS as ALL_COMMANDS
from adapter.cli.options import add_settings, read_settings
from adapter.cli.parser import (
    PROG,
    build_parser,
    describe_unknown,
    find_command,
    format_overview,
)
from adapter.cli.text import escape, terminal_width

_DEPENDENCIES = ("aiohttp", "grpcio", "protobuf", "tritonclient", "uvloop", "nvidia-pytriton")
_SHELLS = ("bash", "zsh", "tcsh")
_FILES = frozenset({"FILE", "PATH", "SOURCE"})  # metavars
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
# The table of check-config.
_MIN_ORIGIN = 30  # columns for an origin; a narrower terminal breaks the lines by itself
_MAX_VALUE = 32  # columns for a value; a longer one moves the origin to the right


def _add_version_options(parser: argparse.ArgumentParser) -> None:
    text = "with Python and the key dependencies"
    parser.add_argument("--all", action="store_true", help=text)


def _print_version(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Print the version of the adapter, and with --all those of its dependencies."""
    print(PROG, _find_version(PROG))
    if args.all:
        for name in _DEPENDENCIES:
            print(name, _find_version(name))
        print("python", sys.version.split()[0])
    return 0


def _find_version(name: str) -> str:
    """Return the version of an installed package, or that it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _add_help_options(parser: argparse.ArgumentParser) -> None:
    text = "(default: an overview of all)"
    parser.add_argument("of", nargs="?", metavar="COMMAND", type=_parse_command, help=text)


def _parse_command(name: str) -> str:
    """Return the name of a command. Raises ArgumentTypeError for another word."""
    if name not in ALL_COMMANDS:
        raise argparse.ArgumentTypeError(describe_unknown(name))
    return name


def _print_help(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Print the help of one command, or an overview of all."""
    text = build_parser(args.of).format_help() if args.of else format_overview()
    print(text, end="")
    return 0


def _add_completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))


def _print_completion(args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Print the script that completes commands, flags, files and values in a shell."""
    import shtab  # noqa: PLC0415 - no other command needs it

    top = argparse.ArgumentParser(prog=PROG)
    top.add_argument("-V", "--version", action="store_true", help="print the version")
    subparsers = top.add_subparsers(metavar="COMMAND")
    for name, command in ALL_COMMANDS.items():
        parser = subparsers.add_parser(name, help=command.summary)
        add_options, _ = find_command(name)
        add_options(parser)
        for action in parser._actions:  # noqa: SLF001 - argparse has no other list of them
            metavar = str(action.metavar)
            if metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif metavar == "FOLDER":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif metavar == "COMMAND":
                action.choices = list(ALL_COMMANDS)
            elif "|" in metavar and metavar.islower():
                action.choices = metavar.split("|")
    script = shtab.complete(top, shell=args.shell)
    print(script + _BASH_EQUALS if args.shell == "bash" else script)
    return 0


def _add_schema_options(_parser: argparse.ArgumentParser) -> None:
    pass


def _print_schema(_args: argparse.Namespace, _environ: Mapping[str, str]) -> int:
    """Print the JSON schema of a file of settings."""
    from adapter.settings import file_schema  # noqa: PLC0415 - pydantic

    print(json.dumps(file_schema(), indent=2))
    return 0


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    add_settings(parser)


def _check_config(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print each setting with its value and its origin, and warnings on stderr.

    Return 0, also with warnings. Raises InvalidSettings.
    """
    from adapter.settings import for_people, for_programs  # noqa: PLC0415 - pydantic

    loaded = read_settings(args, environ)
    for warning in loaded.warnings:
        print(escape(warning), file=sys.stderr)
    if args.json:
        print(json.dumps(for_programs(loaded), indent=2))
        return 0
    rows = [[escape(cell) for cell in row] for row in for_people(loaded)]
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(_MAX_VALUE, max(len(value) for _, value, _ in rows))
    width = terminal_width() or 0
    for name, value, origin in rows:
        start = f"{name:<{name_width}}  {value:<{value_width}}  "
        indent = " " * (name_width + value_width + 4)
        if width - len(start) < _MIN_ORIGIN:
            print(start + origin)
        else:
            print(textwrap.fill(origin, width, initial_indent=start, subsequent_indent=indent))
    return 0


COMMANDS = {
    "version": (_add_version_options, _print_version),
    "help": (_add_help_options, _print_help),
    "completion": (_add_completion_options, _print_completion),
    "check-config": (_add_config_options, _check_config),
    "schema": (_add_schema_options, _print_schema),
}
