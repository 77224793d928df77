"""The first minutes of somebody new, on a clean Debian as a plain user."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.place import free_listeners
from tests.nightly.debian import Machine, debian, wait_for

pytestmark = pytest.mark.timeout(1800)

NEEDED = ("make", "curl", "python3", "python3-venv")


@contextmanager
def serving(machine: Machine, script: str, folder: str, log: Path) -> Iterator[None]:
    """The script goes on, as in a terminal of its own, until Ctrl-C."""
    process = machine.start(script, folder, log=log)
    try:
        yield
    finally:
        # nsenter has a child in there, which has the group of its session, out here and in there
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def first_answer(machine: Machine, folder: str, log: Path) -> tuple[float, str]:
    """Seconds from `make run` to the labels of the first request, and what make said."""
    at = free_listeners()
    names = {"HTTP": at["http"], "ADMIN": at["admin"], "GRPC": at["grpc"]}
    arguments = " ".join(f"{name}={address}" for name, address in names.items())
    load = f'{{"model_name": "digits", "url": "{folder}/examples/models/digits"}}'
    ask = (
        f"curl -sf -X POST {at['http']}/models -d '{load}' &&"
        f" curl -sf {at['http']}/models/digits/invoke --data @examples/models/digits/sample.json"
    )
    begun = time.monotonic()
    with serving(machine, f"exec make run {arguments}", folder, log):
        wait_for(machine, folder, f"curl -sf {at['admin']}/readyz", 600, {"make run": log})
        code, said = machine.run(ask, folder)
        seconds = time.monotonic() - begun
        assert code == 0, said
        assert "[8,4,0,0,2,7,2,2]" in said
    return seconds, log.read_text()


def test_make_run_installs_once_and_answers(tmp_path: Path) -> None:
    with debian("bookworm", *NEEDED) as bookworm, bookworm.up() as machine:
        fresh = bookworm.clone("fresh")
        first, said = first_answer(machine, fresh, tmp_path / "first")
        second, said_then = first_answer(machine, fresh, tmp_path / "second")

    sys.stdout.write(f"\nmake run to the first answer: {first:.1f} s, then {second:.1f} s\n")
    assert "setup: installing the packages of requirements/run.txt" in said
    assert "setup:" not in said_then
    assert second < first
