"""Parses arguments: help by groups, a short usage line, proposals for misspelt words."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from adapter.cli.commands import COMMANDS, GROUPS, OTHER_WORDS, Command
from adapter.cli.text import printable_lines
from adapter.packages.faults import did_you_mean

PROG = "triton-adapter"
_FORMS: Mapping[object, str] = {"?": "[{}]", "*": "[{}...]", "+": "{}..."}  # of `nargs`
_NO_FLAG = "--control-token"
_NO_FLAG_ADVICE = "set ADAPTER_CONTROL_TOKEN, or name its file by --control-token-file"
Run = Callable[[argparse.Namespace, Mapping[str, str]], int]

_EXAMPLES = (
    f"{PROG} serve --triton=embedded --examples",
    f"{PROG} load digits examples/models/digits",
    f"{PROG} ps",
    f"{PROG} help serve",
)
_EXIT_CODES = "exit codes: 0 done; 2 bad settings or arguments; 1 anything else"


class Parser(argparse.ArgumentParser):
    """An error is one line behind a usage of one line; the help is a flag away."""

    def __init__(self, **given: Any) -> None:
        given.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **given)

    def format_usage(self) -> str:
        """Return the usage with positional arguments alone: --help lists the options."""
        words = [self.prog, "[OPTIONS]"]
        for action in self._get_positional_actions():
            name = str(action.metavar or action.dest.upper())
            nargs = action.nargs
            if nargs == argparse.SUPPRESS:  # amid parse_known_intermixed_args
                nargs = getattr(action, "save_nargs", nargs)
            words.append(_FORMS.get(nargs or "", "{}").format(name))
        return f"usage: {' '.join(words)}\n"

    def format_help(self) -> str:
        """Return the help behind the short usage."""
        usage, _, rest = super().format_help().partition("\n\n")
        return f"{self.format_usage()}\n{rest}" if usage.startswith("usage:") else usage

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2, the message and a hint."""
        hint = f"see: {self.prog} --help"
        said = printable_lines(f"{self.prog}: {message}")
        self.exit(2, f"{self.format_usage()}{said}\n{hint}\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """End with a usage error, and the flag that the first of them may have been meant for."""
        if _NO_FLAG in [each.partition("=")[0] for each in unknown]:
            self.error(f"there is no flag {_NO_FLAG}, which others could see; {_NO_FLAG_ADVICE}")
        if unknown:
            word = unknown[0].partition("=")[0]
            meant = did_you_mean([word], self._option_string_actions)
            # without values: one behind a misspelt name may be a secret
            names = [each.partition("=")[0] for each in unknown if each.startswith("-")]
            self.error(f"unrecognized arguments: {' '.join(names or unknown)}{meant}")


class _Top(Parser):
    """Lists the commands by groups, which argparse has for options alone."""

    def format_help(self) -> str:
        """Return all commands with their summaries."""
        width = max(map(len, COMMANDS))
        lines = [f"usage: {PROG} COMMAND [OPTIONS]", "", str(self.description), ""]
        for title, commands in GROUPS.items():
            lines += [f"{title}:"]
            lines += [f"  {name:<{width}}  {each.summary}" for name, each in commands.items()]
            lines += [""]
        lines += [
            "options:",
            "  -h, --help     show this help",
            "  -V, --version  print the version",
        ]
        return "\n".join([*lines, "", str(self.epilog), ""])


def describe_unknown_command(word: str) -> str:
    """Return the error for an unknown command, with the one that was probably meant."""
    if word in {"log", "logs"}:
        return f"there is no command {word!r}: the log is what `serve` writes to stdout"
    if word in OTHER_WORDS:
        return f"there is no command {word!r}; did you mean {OTHER_WORDS[word]}?"
    return f"there is no command {word!r}{did_you_mean([word], COMMANDS)}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; `command` is None without one. Raises SystemExit as argparse does."""
    wanted = next((word for word in argv if not word.startswith("-")), "")
    top, parsers = build([wanted] if wanted in COMMANDS else [])
    if wanted and wanted not in COMMANDS:
        top.error(describe_unknown_command(wanted))
    args, unknown = _parsed(argv, wanted, top, parsers)
    parsers.get(wanted, top).refuse_unknown(unknown)
    return args


def _parsed(
    argv: Sequence[str], wanted: str, top: Parser, parsers: Mapping[str, Parser]
) -> tuple[argparse.Namespace, list[str]]:
    """Return what the command takes, words and options in any order, and what it does not know."""
    if not argv or argv[0] != wanted:
        return top.parse_known_args(argv)
    given = argparse.Namespace(command=wanted, version=False)
    return parsers[wanted].parse_known_intermixed_args(argv[1:], given)


def build(wanted: Iterable[str]) -> tuple[Parser, dict[str, Parser]]:
    """Return the top parser, and that of each command. Only the wanted ones get their options:
    those of the settings cost imports.
    """
    description = "The contracts of SageMaker and ModelMesh in front of a stock NVIDIA Triton."
    epilog = f"{_epilog(_EXAMPLES)}\n{_EXIT_CODES}"
    top = _Top(prog=PROG, description=description, epilog=epilog)
    top.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parsers = {}
    for name, command in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name,
            help=command.summary,
            description=f"{command.summary[0].upper()}{command.summary[1:]}.",
            epilog=_epilog(command.examples) if command.examples else None,
        )
    for name in wanted:
        add_options, _ = _code_of(name, COMMANDS[name])
        add_options(parsers[name])
    return top, parsers


def run_of(name: str) -> Run:
    """Return the function that runs a command."""
    return _code_of(name, COMMANDS[name])[1]


def _code_of(name: str, command: Command) -> tuple[Callable[[argparse.ArgumentParser], None], Run]:
    module = importlib.import_module(command.module)
    add_options, run = module.COMMANDS[name]
    return add_options, run


def _epilog(examples: Sequence[str]) -> str:
    return "examples:\n" + "".join(f"  {line}\n" for line in examples)


def print_help(command: str | None = None) -> None:
    """Print the help of one command, or of all."""
    top, parsers = build([command] if command else [])
    (parsers[command] if command else top).print_help(sys.stdout)
