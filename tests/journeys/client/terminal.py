"""Runs the command as on a terminal, and as in a pipe."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests import forked

COMMAND = (sys.executable, "-m", "adapter")
ESCAPE = "\x1b"
ROOT = Path(__file__).parents[3]


def run(
    *argv: str,
    environ: Mapping[str, str],
    stdin: bytes = b"",
    folder: Path | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """On no terminal. `environ` is added to the environment, as everywhere here."""
    return forked.run(argv, _environment(environ), stdin, folder)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of whoever runs the tests say nothing about a terminal."""
    kept = {
        k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "TERM", "COLUMNS", "LINES"}
    }
    return {**kept, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **environ}


class Terminal:
    """One command on a terminal of 100 columns and 30 lines. `said` is all that it wrote."""

    def __init__(self, *argv: str, environ: Mapping[str, str]) -> None:
        self.said = ""
        size = {"COLUMNS": "100", "LINES": "30"}
        self._master, slave = pty.openpty()
        given = {**size, **_environment(environ)}
        self.process = forked.Child(argv, given, [slave] * 3, is_on_terminal=True)
        os.close(slave)

    def until(self, pattern: str, seconds: float = 90) -> str:
        """Read until that was written; return what was written since the last such call."""
        end, since = time.monotonic() + seconds, len(self.said)
        while re.search(pattern, self.said[since:]) is None:
            left = end - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.said[since:]!r}"
            assert self._read(left), f"ended before {pattern!r}: {self.said[since:]!r}"
        return self.said[since:]

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self, seconds: float = 90) -> int:
        """Read to the end; return the exit code."""
        end = time.monotonic() + seconds
        while self._read(end - time.monotonic()):
            pass
        code = self.process.wait(seconds)
        os.close(self._master)
        return code

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0, seconds))
        if not ready:
            return False
        try:
            found = os.read(self._master, 65536)
        except OSError:  # what Linux says once the other end is closed
            return False
        self.said += found.decode(errors="replace")
        return bool(found)


def on_terminal(*argv: str, environ: Mapping[str, str]) -> tuple[int, str]:
    terminal = Terminal(*argv, environ=environ)
    return terminal.end(), terminal.said
