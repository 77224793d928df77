"""The output of tritonserver, on a real pipe."""

import os
import time
from pathlib import Path

import pytest

from adapter.triton.server import output
from adapter.triton.server.output import Output


class Printer:
    """Writes into the pipe; `finish` waits until all was read."""

    def __init__(self):
        read, self.pipe = os.pipe()
        self.output = Output(read)

    def print(self, data):
        while data:
            data = data[os.write(self.pipe, data) :]

    def finish(self):
        os.close(self.pipe)
        self.output._thread.join(30)
        assert self.output.is_over


@pytest.fixture
def printer(caplog):
    caplog.set_level("INFO")
    return Printer()


def logged(caplog):
    return [r.line for r in caplog.records if r.message == "triton.log"]


TABLE = """\
I1122 11:34:46.539640 17015 server.cc:631]\x20
+---------+------+
| Backend | Path |
+---------+------+
| python  | /b   |
+---------+------+
"""
NO_GPU = """\
W1122 11:34:46.515223 7 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory: %s"
I1122 11:34:46.537778 7 cuda_memory_manager.cc:117] "CUDA memory pool disabled"
E1122 11:34:46.538232 7 server.cc:241] "CudaDriverHelper has not been initialized."
Error: Failed to initialize NVML
W1122 11:34:46.541501 7 metrics.cc:798] "DCGM unable to start: DCGM initialization error"
"""


def test_only_real_tables_are_logged_at_debug(printer, caplog):
    caplog.set_level("DEBUG")
    own = ["+1", "| a bar", "+---", "after"]
    printer.print(f"{own[0]}\n{own[1]}\n{own[2]}\n{TABLE}{own[3]}\n| again".encode())
    printer.finish()
    at = {level: [] for level in ("DEBUG", "INFO")}
    for record in caplog.records:
        at[record.levelname].append(record.line)
    assert at == {"DEBUG": TABLE.splitlines(), "INFO": [*own, "| again"]}


@pytest.mark.parametrize(("has_driver", "level"), [(False, "INFO"), (True, "WARNING")])
def test_usual_lines_without_gpu_are_one(printer, caplog, monkeypatch, *, has_driver, level):
    monkeypatch.setattr(output, "_DRIVER", Path("/" if has_driver else "/nowhere"))
    why = "no CUDA-capable device is detected"
    printer.print((NO_GPU % why).encode() + b"E1122 11:34:46.538232 7 server.cc:241] another\n")
    printer.finish()
    assert [(r.message, r.levelname) for r in caplog.records] == [
        ("triton.no_gpu", level),
        ("triton.log", "ERROR"),
    ]
    assert caplog.records[0].reason == f"Unable to allocate pinned system memory: {why}"


def test_known_words_in_other_lines_keep_levels(printer, caplog):
    printer.print((NO_GPU % "out of memory").encode())
    printer.finish()
    assert [r.message for r in caplog.records] == ["triton.log"] * 5
    levels = ["WARNING", "INFO", "ERROR", "INFO", "WARNING"]
    assert [r.levelname for r in caplog.records] == levels


def test_last_words_are_kept_beyond_the_limit(printer, caplog, monkeypatch):
    # else a machine that reads this for seconds has those logged that come last
    monkeypatch.setattr(printer.output, "_refill_tokens", lambda: int(printer.output._tokens))
    printer.print(b"x\n" * 50_000 + b"the reason\nwhy it gave up\n")
    printer.finish()
    assert "why it gave up" not in logged(caplog)
    said = printer.output.complaint().splitlines()
    assert (said[0], said[-2:]) == ("why it gave up", ["the reason", "why it gave up"])


@pytest.mark.parametrize("piece", [b"y", b"x\n"], ids=["one line", "lines"])
def test_unlogged_lines_are_read_slowly(printer, piece):
    began, size = time.monotonic(), 1_500_000
    printer.print(piece * (size // len(piece)))
    printer.finish()
    assert time.monotonic() - began > size / 4e6


def test_endless_pipe_does_not_keep_the_reader(printer):
    printer.output.close()
    printer.output._thread.join(5)
    assert printer.output.is_over
    with pytest.raises(BrokenPipeError):
        os.write(printer.pipe, b"nobody reads")
    os.close(printer.pipe)
