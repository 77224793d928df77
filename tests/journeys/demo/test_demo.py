"""`triton-adapter demo` on a terminal: what it shows, and what is left when it was stopped."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.fakes.scripted_gpus import ScriptedGpus, driver_environ
from tests.journeys.client.terminal import ESCAPE, Terminal
from tests.processes import descendants, is_alive
from tests.running import wait_until

pytestmark = [pytest.mark.triton, pytest.mark.timeout(240)]

COLOUR = re.compile(rf"{ESCAPE}\[[0-9;]*m")
BAR = re.compile(r"\[([a-z+.]{40})\]")


def shown(said: str) -> str:
    """Without what moves the cursor and what colours."""
    return re.sub(rf"{ESCAPE}\[[0-9;?]*[A-Za-z]|\r", "", said)


def left(folder: Path) -> list[Path]:
    """What is there beside a note that onnxruntime makes for itself wherever it runs."""
    return [path for path in folder.iterdir() if path.name != ".ses"]


def stop(terminal: Terminal, folder: Path) -> int:
    """End it by SIGTERM; nothing of it may be left in the folder for temporary files."""
    family = descendants(terminal.process.pid)
    assert family
    assert list(folder.glob("triton-adapter-demo-*"))
    os.kill(terminal.process.pid, signal.SIGTERM)
    code = terminal.end()
    wait_until(lambda: not any(map(is_alive, family)), 60, "no process is left")
    assert left(folder) == []
    return code


@pytest.fixture
def folder() -> Path:
    """A short path: there are sockets in it."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.mark.nightly
def test_memory_fills_is_evicted_and_fits_before_ones_eyes_also_where_there_is_a_gpu(
    folder: Path, tmp_path: Path
) -> None:
    gpus = ScriptedGpus(tmp_path / "gpus")
    gpus.add("GPU-a", 80 * 2**30)
    terminal = Terminal("demo", environ={"TMPDIR": str(folder), **driver_environ(gpus)})
    code = terminal.end(200)
    text = shown(terminal.said)

    assert code == 0, text
    assert COLOUR.search(terminal.said)
    bars = [match[1].strip(".") for match in BAR.finditer(text)]
    kinds = [re.sub(r"(.)\1+", r"\1", bar) for bar in bars]
    steps = [kinds.index(step) for step in ("d", "da", "dab", "db", "dbg", "dg", "dag")]
    assert steps == sorted(steps)
    # the next load is seen to grow before it is known whose memory that is
    assert [kind for kind in kinds if kind.endswith("+")]
    assert re.search(r"2048 MiB in all, 1\d\d\d MiB in use, \d+ MiB\s+free", text)
    assert "models of 700, 700 and 750 MiB" in text
    assert text.rstrip().endswith(
        "Next: make run, or triton-adapter serve --triton=embedded --examples"
    )
    assert left(folder) == []


@pytest.mark.parametrize(
    ("variable", "unwanted"), [({"TERM": "dumb"}, re.compile(ESCAPE)), ({"NO_COLOR": "1"}, COLOUR)]
)
def test_a_terminal_gets_only_what_it_can_or_may_show_and_sigterm_leaves_nothing(
    folder: Path, variable: dict[str, str], unwanted: re.Pattern[str]
) -> None:
    terminal = Terminal("demo", environ={"TMPDIR": str(folder), "COLUMNS": "60", **variable})
    terminal.until(r"GET /models lists", 150)

    code = stop(terminal, folder)

    assert code == 1
    told = terminal.said
    assert told.index("stopping Triton") < told.index("stopped by a signal; nothing is left")
    assert "The end of the log" not in terminal.said
    assert unwanted.search(terminal.said) is None
    assert BAR.search(terminal.said)
    [sentence] = [line for line in shown(told).splitlines() if "the bar is the memory" in line]
    assert len(sentence) <= 60


def test_sigterm_during_the_start_leaves_nothing(folder: Path) -> None:
    terminal = Terminal("demo", environ={"TMPDIR": str(folder)})
    terminal.until("An adapter and a stock Triton")
    wait_until(lambda: bool(descendants(terminal.process.pid)), 60, "Triton is being started")

    assert stop(terminal, folder) == 1


_WITHOUT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "onnxruntime" else find(name, *more)
from adapter import cli
sys.exit(cli.main(["demo"], {}))
"""


def test_without_onnxruntime_the_demo_says_what_to_install_before_it_starts_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        env={**os.environ, "PATH": os.defpath},  # another tritonserver needs no onnxruntime here
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert "needs onnxruntime, which is not installed: pip install onnxruntime" in done.stderr
