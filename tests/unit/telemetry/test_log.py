"""What a line of the log looks like, whatever is put into it."""

import io
import json
import logging
from pathlib import Path

import pytest

from adapter.telemetry.log import setup_logging
from tests.cases import rows


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.fixture(autouse=True)
def _logging_as_before():
    root, access = logging.getLogger(), logging.getLogger("aiohttp.access")
    before = root.handlers[:], root.level, access.disabled
    yield
    root.handlers[:], access.disabled = before[0], before[2]
    root.setLevel(before[1])


def line_of(style="json", extra=None, message="model.loaded", args=(), **more) -> str:
    stream = io.StringIO()
    setup_logging("info", style, stream)
    logging.getLogger("adapter.control").info(message, *args, extra=extra, **more)
    assert stream.getvalue().endswith("\n")
    return stream.getvalue()[:-1]


def test_log_line_is_one_json_object():
    fields = json.loads(line_of(extra={"model_id": "fraud", "bytes": 12, "seconds": 1.5}))
    time = fields.pop("time")
    assert fields == {
        "level": "info",
        "logger": "adapter.control",
        "event": "model.loaded",
        "model_id": "fraud",
        "bytes": 12,
        "seconds": 1.5,
    }
    assert len(time) == len("2025-01-31T12:00:00.123Z")
    assert time.endswith("Z")


@rows(
    ("value", "written"),
    [
        (None, None),
        ("naïve\n", "naïve\n"),
        (Path("/a"), "/a"),
        ([1, Path("/b")], [1, "/b"]),
        (float("nan"), "nan"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        ({"b", "a"}, ["a", "b"]),
        ([frozenset({2, 1})], [["1", "2"]]),
        (b"\xff", "b'\\xff'"),
        (Unspeakable(), "<Unspeakable>"),
        ([Unspeakable()], ["<Unspeakable>"]),
        ({(1,): Unspeakable()}, "<dict>"),
    ],
)
def test_an_odd_value_still_makes_a_line(value, written):
    assert json.loads(line_of(extra={"reason": value}))["reason"] == written
    assert "model.loaded" in line_of("text", extra={"reason": value})


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_lone_surrogate_is_escaped(style):
    line = line_of(style, extra={"reason": "a\udc80"}, message="m\udc80")
    assert "\\udc80" in line
    assert line.isascii()


def test_unfitting_arguments_keep_the_line():
    assert json.loads(line_of(message="%d items", args=("many",)))["event"] == "%d items"


def test_a_field_cannot_hide_the_lines_own():
    fields = json.loads(line_of(extra={"level": 9, "event": "x", "time": 0}))
    assert (fields["level"], fields["event"]) == ("info", "model.loaded")
    assert (fields["level_"], fields["event_"], fields["time_"]) == (9, "x", 0)


@pytest.mark.parametrize("style", ["json", "text"])
def test_an_exception_is_told_with_its_cause(style):
    error = ValueError("bad \x1b[31m")
    error.__cause__ = OSError("disk")
    line = line_of(style, exc_info=error)
    told = json.loads(line)["exception"] if style == "json" else line
    assert "OSError: disk" in told
    assert "ValueError: bad" in told
    assert "\x1b" not in line


def test_text_is_for_people():
    line = line_of("text", extra={"model_id": "fraud", "reason": "a b\nc=d", "bytes": 7})
    time, rest = line.split(" ", 1)
    assert len(time) == len("12:34:56.789")
    assert rest == 'info    model.loaded model_id=fraud reason="a b\\nc=d" bytes=7'


@pytest.mark.parametrize(
    ("style", "stream", "is_json"),
    [
        ("auto", io.StringIO, True),
        ("auto", Terminal, False),
        ("json", Terminal, True),
        ("text", io.StringIO, False),
    ],
)
def test_auto_is_text_on_terminal_and_json_elsewhere(style, stream, is_json):
    out = stream()
    setup_logging("info", style, out)
    logging.getLogger("a").info("model.loaded")
    assert out.getvalue().startswith("{") is is_json


def test_level_counts_for_every_logger():
    out = io.StringIO()
    setup_logging("warning", "json", out)
    logging.getLogger("adapter").info("model.loaded")
    logging.getLogger("aiohttp.access").error("GET /ping")
    assert out.getvalue() == ""
    logging.getLogger("third.party").warning("triton.exited")
    assert json.loads(out.getvalue())["level"] == "warning"


def test_grpcs_log_of_leaving_callers_is_dropped():
    stream = io.StringIO()
    setup_logging("info", "text", stream)
    setup_logging("info", "text", stream)
    core = logging.getLogger("grpc._cython.cygrpc")
    core.error("ExecuteBatchError raised in core by servicer method [/a.B/C]")
    core.error("%s raised in core by servicer method [%s]", "ExecuteBatchError", "/a.B/C")
    assert stream.getvalue() == ""
    core.error("KeyError raised in core by servicer method [/a.B/C]")
    core.error("Unexpected [ExecuteBatchError] raised by servicer method [/a.B/C]")
    assert len(stream.getvalue().splitlines()) == 2


TRITON = 'I1122 11:34:49.726474 17015 model_lifecycle.cc:839] "successfully loaded \'a\\"b\'"'


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (TRITON, "successfully loaded 'a\"b'"),
        ("W1122 11:34:46.515223 17015 metrics.cc:798] not quoted", "not quoted"),
        ('E1122 11:34:46.515223     7 a.cc:1] "broken', '"broken'),
        ('"mine"', '"mine"'),
        ("I1122 of a model's own", "I1122 of a model's own"),
        ("\x1b[31mred\rx", "\\u001b[31mred\\rx"),
        ("ends in blanks   ", "ends in blanks"),
    ],
)
def test_tritons_lines_for_people_are_bare(line, shown):
    text = line_of("text", message="triton.log", extra={"line": line})
    assert text.split(" ", 1)[1] == f"info    triton | {shown}"
    assert json.loads(line_of("json", message="triton.log", extra={"line": line}))["line"] == line


def coloured_line(monkeypatch, terminal: type[io.StringIO], **environ: str) -> str:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = terminal()
    setup_logging("info", "text", stream)
    logging.getLogger("adapter").warning("model.load_failed")
    return stream.getvalue()


def test_the_level_has_a_colour_on_a_terminal(monkeypatch):
    line = coloured_line(monkeypatch, Terminal)
    assert " \x1b[33mwarning\x1b[0m model.load_failed\n" in line
