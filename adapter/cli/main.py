"""Runs the command line. Starts fast: each command imports what is slow to import by itself."""

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence

from adapter.cli.parser import PROG, find_command, parse
from adapter.cli.text import escape_lines
from adapter.errors import AdapterError, InvalidSettings

# errors of a write to a full disk or a lost device
_WRITE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command. Return 0 if it is done, 2 for bad settings or arguments, otherwise 1."""
    if sys.stdout is None:
        print(f"{PROG}: stdout is closed", file=sys.stderr)
        return 1
    as_json = "--json" in argv
    try:
        return _run(argv, environ)
    except InvalidSettings as error:
        for problem in error.problems:
            _print_error(problem, "", as_json=as_json)
        return 2
    except AdapterError as error:
        _print_error(str(error), getattr(error, "hint", ""), as_json=as_json)
    except KeyboardInterrupt:
        pass
    return 1


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command, and write all of its output.

    Raises AdapterError if the output cannot be written: that is no bug.
    """
    try:
        code = _run_command(argv, environ)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `| head -2`
        _discard_output()
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        _discard_output()
        raise AdapterError(f"the output could not be written: {error.strerror}") from error
    return code


def _run_command(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Parse the arguments, run the command that they name, and return its exit code."""
    try:
        args = parse(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a usage error
        return int(stop.code or 0)
    _, run = find_command(args.command)
    return run(args, environ)


def _print_error(text: str, hint: str, *, as_json: bool) -> None:
    """Write an error to stderr: in words, or as one line of JSON for `--json`."""
    if as_json:
        error = {"error": text, "hint": hint} if hint else {"error": text}
        print(json.dumps(error), file=sys.stderr)
        return
    print(escape_lines(f"{PROG}: {text}"), file=sys.stderr)
    if hint:
        print(escape_lines(f"  {hint}"), file=sys.stderr)


def _discard_output() -> None:
    """Discard what is still buffered: writing it would fail at the end of the interpreter."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
