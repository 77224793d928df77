"""`examples/demo/demo.py`: what it shows, and what is left when it fails or is stopped."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.scripted_gpus import ScriptedGpus, driver_environ
from tests.processes import descendants, is_alive
from tests.running import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "demo" / "demo.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: there are sockets in it."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def start(folder: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *flags],
        env={**os.environ, "TMPDIR": str(folder), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def remains(folder: Path) -> list[Path]:
    """Return what is there beside a note that onnxruntime makes for itself wherever it runs."""
    return [path for path in folder.iterdir() if path.name != ".ses"]


@pytest.mark.nightly
def test_demo_succeeds_and_leaves_nothing_beside_a_gpu(folder, tmp_path):
    gpus = ScriptedGpus(tmp_path / "gpus")
    gpus.add("GPU-a", 80 * 2**30)
    process = start(folder, **driver_environ(gpus))
    out, err = process.communicate(timeout=220)

    assert (process.returncode, err) == (0, "")
    assert re.search(r"2048 MiB in all, 1\d\d\d MiB in use, \d+ MiB free", out)
    assert out.endswith("\nevery step succeeded\n")
    assert remains(folder) == []


def test_demo_names_the_failed_step_and_exits_1(folder):
    process = start(folder, "--memory-limit=100MiB")
    out, err = process.communicate(timeout=120)

    assert process.returncode == 1
    assert "FAILED" in err
    assert "Out of memory at a load" in err
    assert "507" in err
    assert "every step" not in out
    assert remains(folder) == []


def test_demo_shows_the_log_when_serve_fails(folder):
    process = start(folder, "--tritonserver=/nowhere")
    _, err = process.communicate(timeout=60)

    assert process.returncode == 1
    assert "the adapter did not start" in err
    assert "/nowhere" in err
    assert remains(folder) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("is_starting", [True, False])
def test_demo_leaves_nothing_when_stopped_by_a_signal(folder, number, is_starting):
    """A signal during the start finds a process that the script has not yet waited for."""
    process = start(folder)
    assert process.stdout is not None
    if is_starting:
        wait_until(lambda: bool(descendants(process.pid)), 60, "the adapter is being started")
    else:
        next(line for line in process.stdout if "are ready" in line)
    family = descendants(process.pid)
    assert list(folder.glob("triton-adapter-demo-*"))

    process.send_signal(number)
    process.communicate(timeout=120)

    assert process.returncode == 1
    wait_until(lambda: not any(map(is_alive, family)), 60, "no process is left")
    assert remains(folder) == []
