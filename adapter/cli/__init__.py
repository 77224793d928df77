"""Runs the command line. Starts fast: each command imports what is heavy by itself."""

import errno
import json
import os
import sys
from collections.abc import Mapping, Sequence

from adapter.cli.parser import PROG, parse, print_help, run_of
from adapter.cli.text import printable_lines
from adapter.errors import AdapterError, InvalidSettings

# errors of a write to a full disk or a lost device
_NOT_WRITTEN = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command. Returns 0 if done, 2 for bad settings or arguments, else 1."""
    if sys.stdout is None:  # closed by who runs the command
        print(f"{PROG}: stdout is closed", file=sys.stderr)
        return 1
    as_json = "--json" in argv
    try:
        return _written(argv, environ)
    except InvalidSettings as error:
        for problem in error.problems:
            _print_error(problem, "", as_json=as_json)
        return 2
    except AdapterError as error:
        _print_error(str(error), getattr(error, "hint", ""), as_json=as_json)
        return 1
    except KeyboardInterrupt:
        return 1


def _written(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command; tell output that cannot be written from a bug."""
    try:
        code = _run(argv, environ)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `| head -2`
        _drop_output()
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _NOT_WRITTEN:
            raise
        _drop_output()
        raise AdapterError(f"the output could not be written: {error.strerror}") from error
    return code


def _print_error(text: str, hint: str, *, as_json: bool) -> None:
    """Write an error to stderr: in words, or as one line of JSON for `--json`."""
    if as_json:
        said = {"error": text, "hint": hint} if hint else {"error": text}
        print(json.dumps(said), file=sys.stderr)
        return
    print(printable_lines(f"{PROG}: {text}"), file=sys.stderr)
    if hint:
        print(printable_lines(f"  {hint}"), file=sys.stderr)


def _drop_output() -> None:
    """Discard what is still buffered: writing it would fail at the end of the interpreter."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    try:
        args = parse(argv)
    except SystemExit as stop:  # argparse: 0 after --help, 2 after a usage error
        return int(stop.code or 0)
    if args.command is None:
        if args.version:
            return run_of("version")(parse(["version"]), environ)
        print_help()
        return 0
    return run_of(args.command)(args, environ)
