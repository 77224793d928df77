"""The log for people, of the real command."""

import re
import signal
import subprocess
import sys

import pytest

from tests.journeys.client.terminal import on_terminal
from tests.running import EMBEDDED, Client, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

STAMP = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (debug  |info   |warning|error  ) ")
SERVE = ("serve", "--log-format=text", "--grpc-data=off", "--grpc=127.0.0.1:0", *EMBEDDED)
FAILING = (*SERVE, "--tritonserver=/nowhere/triton")


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> list[str]:
    """Of a start, a load, an invocation, two refusals, an unload and the end."""
    folder = tmp_path_factory.mktemp("log")
    model = write_python_model(folder / "models" / "m")
    log = folder / "stdout"
    with log.open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        command = [sys.executable, "-m", "adapter", *SERVE, f"--model-roots={model.parent}"]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        wait_until(lambda: "adapter.started" in log.read_text(), 60, "it has started")
        [address] = re.findall(r"adapter.listening listener=http address=(\S+)", log.read_text())
        with Client(address) as client:
            client.load_model("m", model)
            assert client.invoke("m").status == 200
            assert client.load("absent", model.parent / "absent").status == 404
            assert client.post("/models/none/invoke", b"{}").status == 404
            client.unload_model("m")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert (folder / "stderr").read_text() == ""
    return log.read_text().splitlines()


def test_log_lines_begin_with_time_and_level(lines):
    assert [line for line in lines if not STAMP.match(line)] == []


def test_tritons_lines_come_without_stamp_and_tables(lines):
    said = [line.partition(" triton | ")[2] for line in lines if " triton | " in line]
    assert "successfully loaded 'm'" in said
    assert [line for line in said if re.match(r"[IWE]\d{4} |[|+]|$", line)] == []


def test_healthy_run_logs_no_warning(lines):
    """What each machine without GPU says is one line."""
    assert [line for line in lines if re.search(r"\d (warning|error)", line)] == []


def test_a_start_that_fails_gives_its_reason_once():
    code, text = on_terminal(*FAILING, environ={})
    assert code == 1
    assert text.count("/nowhere/triton") == 1
    assert "\033[31merror  \033[0m adapter.failed reason=" in text


def test_no_colour_where_none_is_wanted():
    _, text = on_terminal(*FAILING, environ={"NO_COLOR": "1"})
    assert "\033" not in text
