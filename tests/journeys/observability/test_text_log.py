"""The log for people, of the real command."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.running import EMBEDDED, Client, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

STAMP = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (debug  |info   |warning|error  ) ")
COMMAND = (
    *(sys.executable, "-m", "adapter", "serve", "--log-format=text", "--grpc-data=off"),
    *(*EMBEDDED, "--grpc=127.0.0.1:0"),
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a start, a load, an invocation, two refusals, an unload and the end."""
    folder = tmp_path_factory.mktemp("log")
    model = write_python_model(folder / "models" / "m")
    log = folder / "stdout"
    with log.open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        command = [*COMMAND, f"--model-roots={model.parent}"]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        wait_until(lambda: "adapter.started" in log.read_text(), 60, "it has started")
        [address] = re.findall(r"adapter.listening listener=http address=(\S+)", log.read_text())
        with Client(address) as client:
            assert client.load("m", model).status == 200
            assert client.invoke("m").status == 200
            assert client.load("absent", model.parent / "absent").status == 404
            assert client.post("/models/none/invoke", b"{}").status == 404
            assert client.unload("m").status == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert (folder / "stderr").read_text() == ""
    return log.read_text().splitlines()


def test_log_lines_begin_with_time_and_level(lines: list[str]) -> None:
    assert [line for line in lines if not STAMP.match(line)] == []


def test_tritons_lines_come_without_stamp_and_tables(lines: list[str]) -> None:
    said = [line.partition(" triton | ")[2] for line in lines if " triton | " in line]
    assert "successfully loaded 'm'" in said
    assert [line for line in said if re.match(r"[IWE]\d{4} |[|+]|$", line)] == []


def test_healthy_run_logs_no_warning(lines: list[str]) -> None:
    """What each machine without GPU says is one line."""
    assert [line for line in lines if re.search(r"\d (warning|error)", line)] == []


def at_terminal(*flags: str, **environ: str) -> tuple[int, str]:
    """What a command that ends by itself shows at a terminal, stdout and stderr."""
    master, terminal = pty.openpty()
    env: Mapping[str, str] = {**os.environ, "TERM": "xterm", "NO_COLOR": "", **environ}
    process = subprocess.Popen([*COMMAND, *flags], stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    text = b"".join(_chunks(master)).decode()
    os.close(master)
    return process.wait(60), text.replace("\r\n", "\n")


def _chunks(master: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # nobody has the terminal open any more
            return
        yield chunk


def test_a_start_that_fails_gives_its_reason_once(tmp_path: Path) -> None:
    code, text = at_terminal(f"--tritonserver={tmp_path}/none")
    assert code == 1
    assert text.count(f"{tmp_path}/none") == 1
    assert "\033[31merror  \033[0m adapter.failed reason=" in text


def test_no_colour_where_none_is_wanted(tmp_path: Path) -> None:
    _, text = at_terminal(f"--tritonserver={tmp_path}/none", NO_COLOR="1")
    assert "\033" not in text
