"""Parses arguments: help with examples, a usage of one line, suggestions for misspelt words."""

import argparse
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from adapter.cli.commands import COMMANDS, GROUPS, OTHER_WORDS
from adapter.cli.options import TOKEN_HINT
from adapter.cli.text import escape_lines
from adapter.packages.messages import did_you_mean

PROG = "triton-adapter"
_SECRET_FLAG = "--control-token"  # noqa: S105 - a flag that does not exist: others could see it
_LISTENER_FLAGS = {"--http", "--http-data", "--grpc", "--grpc-data", "--admin", "--metrics"}
# Flags that may stand in the place of a command.
_FLAGS = {"-h": "help", "--help": "help", "-V": "version", "--version": "version"}

AddOptions = Callable[[argparse.ArgumentParser], None]
Run = Callable[[argparse.Namespace, Mapping[str, str]], int]

_OVERVIEW = f"""
The contracts of SageMaker and ModelMesh in front of a stock NVIDIA Triton.

{{commands}}
options:
  -h, --help     show this help
  -V, --version  print the version

examples:
  {PROG} serve --triton=embedded --examples
  {PROG} load digits examples/models/digits
  {PROG} ps
  {PROG} help serve

exit codes: 0 done; 2 bad settings or arguments; 1 anything else
"""


class Parser(argparse.ArgumentParser):
    """Parses the arguments of a command; an error shows the usage, the reason and a hint."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2, the message and a hint."""
        reason = escape_lines(f"{self.prog}: {message}")
        self.exit(2, f"{self.format_usage()}{reason}\nsee: {self.prog} --help\n")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, with the name of the command as `command`.

    Raises SystemExit as argparse does.
    """
    word = argv[0] if argv else "help"
    name = _FLAGS.get(word, word)
    if name not in COMMANDS:
        Parser(prog=PROG, usage=f"{PROG} COMMAND [OPTIONS]").error(describe_unknown(word))
    parser = build_parser(name)
    namespace = argparse.Namespace(command=name)
    args, unknown = parser.parse_known_intermixed_args(argv[1:], namespace)
    if unknown:
        # without values: one behind a misspelt flag may be a secret
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if _SECRET_FLAG in flags:
            parser.error(f"there is no flag {_SECRET_FLAG}, which others could see; {TOKEN_HINT}")
        asked = _LISTENER_FLAGS & parser._option_string_actions.keys()  # noqa: SLF001
        if asked and _LISTENER_FLAGS & set(flags):
            parser.error(f"{name} asks the listener of {' or '.join(sorted(asked))}: give that")
        words = flags or unknown
        suggestion = did_you_mean(words[:1], parser._option_string_actions)  # noqa: SLF001
        parser.error(f"unrecognized arguments: {' '.join(words)}{suggestion}")
    return args


def describe_unknown(word: str) -> str:
    """Return the error for an unknown command, with the one that was probably meant."""
    word = word.partition("=")[0]
    if word in {"log", "logs"}:
        return f"there is no command {word!r}: the log is what `serve` writes to stdout"
    if word in OTHER_WORDS:
        return f"there is no command {word!r}; did you mean {OTHER_WORDS[word]}?"
    return f"there is no command {word!r}{did_you_mean([word], [*COMMANDS, *_FLAGS])}"


def build_parser(name: str) -> Parser:
    """Return the parser of a command, with its options and the texts of its help."""
    command = COMMANDS[name]
    examples = "".join(f"  {line}\n" for line in command.examples)
    parser = Parser(
        prog=f"{PROG} {name}",
        usage=f"%(prog)s [OPTIONS] {command.arguments}".rstrip(),
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        epilog=f"examples:\n{examples}\n{command.notes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options, _ = find_command(name)
    add_options(parser)
    return parser


def find_command(name: str) -> tuple[AddOptions, Run]:
    """Import the module of a command, and return the functions that add options and run it."""
    module = importlib.import_module(COMMANDS[name].module)
    add_options, run = module.COMMANDS[name]
    return add_options, run


def format_overview() -> str:
    """Return the help of the command line: all commands with their summaries, by groups."""
    width = max(map(len, COMMANDS))
    lines = []
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {name:<{width}}  {command.summary}" for name, command in commands.items()]
        lines.append("")
    return f"usage: {PROG} COMMAND [OPTIONS]\n" + _OVERVIEW.format(commands="\n".join(lines))
