"""The output of tritonserver, on a real pipe."""

import os
import time

import pytest

from adapter.backend import output
from adapter.backend.output import Output


class Printer:
    """Writes into the pipe; `finish` waits until all was read."""

    def __init__(self):
        read, self.pipe = os.pipe()
        self.dropped = 0
        self.output = Output(read, self._count)

    def _count(self, lines):
        self.dropped += lines

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


def test_lines_are_logged_with_their_level(printer, caplog):
    printer.print(b"I1121 10:00:00 all well\nE1121 10:00:01 not well\nplain\nbegun")
    printer.finish()
    assert logged(caplog) == [
        "I1121 10:00:00 all well",
        "E1121 10:00:01 not well",
        "plain",
        "begun",
    ]
    assert [r.levelname for r in caplog.records] == ["INFO", "ERROR", "INFO", "INFO"]


def test_lines_beyond_a_rate_are_dropped_counted_and_summed_up(printer, caplog):
    began, lines = time.monotonic(), 400_000
    printer.print(b"x\n" * lines)
    printer.finish()
    seconds = time.monotonic() - began
    assert 500 <= len(logged(caplog)) <= 500 * (2 + seconds)
    assert printer.dropped == lines - len(logged(caplog))
    sums = [r.lines for r in caplog.records if r.message == "triton.log_dropped"]
    assert sum(sums) == printer.dropped
    assert len(sums) <= 2 + seconds


def test_the_last_words_are_kept_though_they_were_too_many_to_log(printer, caplog):
    printer.print(b"x\n" * 50_000 + b"the reason\nwhy it gave up\n")
    printer.finish()
    assert "why it gave up" not in logged(caplog)
    said = printer.output.complaint().splitlines()
    assert (said[0], said[-2:]) == ("why it gave up", ["the reason", "why it gave up"])


def test_of_a_line_without_end_only_the_beginning_is_kept(printer, caplog):
    printer.print(b"y" * 3_000_000 + b"\nshort\n")
    printer.finish()
    assert [len(line) for line in logged(caplog)] == [8192, 5]


def test_a_line_without_end_is_read_no_faster_than_lines_that_are_too_many(printer):
    began, size = time.monotonic(), 20 * 2**20
    printer.print(b"y" * size)
    printer.finish()
    least_seconds = size / output._READ_BYTES * output._BREATH_SECONDS
    assert time.monotonic() - began > least_seconds * 0.8  # what was only begun is kept


def test_who_keeps_the_pipe_for_ever_does_not_keep_the_reader(printer):
    printer.output.close()
    printer.output._thread.join(5)
    assert printer.output.is_over
    with pytest.raises(BrokenPipeError):
        os.write(printer.pipe, b"nobody reads")
    os.close(printer.pipe)
