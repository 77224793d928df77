"""Prometheus's own checker, of the Debian package `prometheus`."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool on PATH: apt-get install prometheus"
)


def promtool(*arguments: str | Path, given: bytes = b"") -> None:
    """Checked to be content."""
    done = subprocess.run(
        [str(PROMTOOL), *map(str, arguments)],
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout.decode()
