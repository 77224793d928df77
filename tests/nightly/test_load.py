"""The load tests of examples/load, as a user starts them: `make run`, then `make load`."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.ports import free_ports
from tests.running import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.timeout(600)]

SCENARIOS = ("sagemaker", "v2_rest", "v2_grpc", "endpoint", "loads")
SECONDS = 10
START_SECONDS = 600  # of which packages are installed


@contextmanager
def made_run(log: Path, arguments: list[str], *, folder: Path = ROOT) -> Iterator[None]:
    """Serve by `make run` until the caller is done."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "run", *arguments],
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: b"Ctrl-C stops everything" in log.read_bytes(),
            START_SECONDS,
            "a running adapter",
        )
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)


def test_every_scenario_of_make_load_has_no_failure(tmp_path):
    names = ("HTTP", "ADMIN", "GRPC")
    addresses = [
        f"{name}=127.0.0.1:{port}" for name, port in zip(names, free_ports(3), strict=True)
    ]
    with made_run(tmp_path / "run.log", addresses):
        done = subprocess.run(
            ["make", "load", f"SECONDS={SECONDS}", "USERS=4", *addresses],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 0, done.stdout + done.stderr
    # without a terminal locust writes its table to stderr
    totals = re.findall(r"^ +Aggregated +(\d+) +0\(0\.00%\)", done.stderr, re.MULTILINE)
    assert len(totals) == len(SCENARIOS), done.stdout + done.stderr
    assert min(map(int, totals)) > 0


def test_make_load_without_an_adapter_names_make_run():
    [port] = free_ports(1)

    done = subprocess.run(
        ["make", "load", f"HTTP=127.0.0.1:{port}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "make run" in done.stdout
