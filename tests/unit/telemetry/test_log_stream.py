"""The stream of the log, on a real pipe."""

import io
import logging
import os

import pytest

from adapter.telemetry.log import LogStream, setup_logging
from tests.cases import rows

LINE = "x" * 999 + "\n"


class Pipe:
    def __init__(self):
        self.read, self.write = os.pipe()
        self.stream = LogStream(self.write)

    def take(self, size):
        got = b""
        while len(got) < size:
            got += os.read(self.read, size - len(got))
        return got.decode()


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    os.close(pipe.read)  # whatever is still to be written goes nowhere
    pipe.stream.drain(5)
    os.close(pipe.write)


@pytest.fixture(autouse=True)
def _logging_as_before():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before[0], before[1]


def test_memory_is_bounded_by_bytes_too(pipe):
    before = LogStream.lost
    for _ in range(100):
        pipe.stream.write("y" * 2**20)
    assert LogStream.lost - before >= 96


def test_stream_whose_reader_has_gone_drops_what_comes(pipe):
    os.close(pipe.read)
    pipe.stream.write(LINE)
    pipe.stream.drain(10)
    assert pipe.stream._bytes == 0
    pipe.read = os.open(os.devnull, os.O_RDONLY)


@rows("style", ["json", "text"])
@rows("value", ["z" * 10**6, ["z" * 99] * 10**4, "\0" * 10**5, "é" * 10**5])
def test_one_field_of_a_line_has_a_bound(style, value):
    out = io.StringIO()
    setup_logging("info", style, out)
    logging.getLogger("adapter").info("model.loaded", extra={"model_id": "m", "reason": value})
    assert out.getvalue().count("\n") == 1
    assert 10_000 < len(out.getvalue()) < 70_000
    assert "characters cut" in out.getvalue()
