"""Columns, durations, bars and tensors, as a terminal shows them."""

import io
import json
import struct

import pytest
from rich.console import Console
from rich.text import Text

from adapter.cli import text
from adapter.cli.text import columns, duration, printable
from adapter.tools.client import models
from adapter.tools.client.invoke import as_text, tensors_of
from adapter.tools.client.live import _escaped, _fitting
from adapter.tools.client.memory import _lines
from adapter.tools.client.models import _Table


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.9, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (12_000, "3h20m"), (187_200, "2d4h")],
)
def test_a_duration_has_two_units_at_most(seconds, said):
    assert duration(seconds) == said


def test_columns_stand_below_each_other_whatever_the_letters_take():
    rows = [["a", "1"], ["模型", "22"], ["e\u0301", "333"]]
    assert columns(rows, frozenset({1})) == ["a       1", "模型   22", "e\u0301     333"]


def test_the_first_column_gives_way_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr(text, "width", lambda: 20)
    assert columns([["a" * 30, "READY"], ["b", "READY"]]) == [
        "aaaaaaaaaaaa…  READY",
        "b              READY",
    ]
    assert columns([["模" * 30, "READY"]]) == ["模模模模模模…  READY"]
    assert columns([["a", "b" * 50]]) == ["a  bbbbbbbbbbbbbbbb…"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [("模型 é", "模型 é"), ("a\nb", "a\\nb"), ("\x1b[2J", "\\x1b[2J"), ("\u202e", "\\u202e")],
)
def test_what_would_move_the_cursor_is_escaped(given, shown):
    assert printable(given) == shown


def test_a_view_is_cut_to_the_lines_of_the_terminal():
    console = Console(width=20, height=5, file=io.StringIO())
    lines = [f"line {number}" for number in range(9)]
    assert _fitting(lines, console).plain.splitlines() == [*lines[:3], "... 6 more lines"]
    assert _fitting(lines[:4], console).plain.splitlines() == lines[:4]


def test_a_name_is_no_markup():
    assert Text.from_markup(_escaped("load [red]a[/red]")).plain == "load [red]a[/red]"


# -- memory -------------------------------------------------------------------------------------


def device(**figures):
    zero = dict.fromkeys(
        ("limit_bytes", "used_bytes", "free_bytes", "reserved_bytes", "held_bytes"), 0
    )
    return {**zero, "headroom_bytes": 0, **figures}


def bar(**figures):
    return _lines({"source": "nvml", "devices": {"GPU-1": device(**figures)}})[2].strip()


def test_the_bar_has_what_is_held_reserved_in_other_use_free_and_kept_free():
    found = bar(
        limit_bytes=400, held_bytes=100, reserved_bytes=50, free_bytes=150, headroom_bytes=20
    )
    assert found == "[" + "#" * 10 + "+" * 5 + "=" * 8 + "." * 15 + "-" * 2 + "]"


def test_the_bar_never_gets_longer_than_the_device():
    assert bar(limit_bytes=400, held_bytes=500, free_bytes=0) == "[" + "#" * 40 + "]"


def test_each_device_has_its_bar():
    devices = {"GPU-1": device(limit_bytes=10, free_bytes=10), "GPU-2": device(limit_bytes=10)}
    lines = _lines({"source": "nvml", "devices": devices})
    assert [line.split()[0] for line in lines[1:5:2]] == ["GPU-1", "GPU-2"]
    assert [line.strip()[:2] for line in lines[2:5:2]] == ["[.", "[="]


def test_memory_that_nothing_accounts_for_has_a_line():
    devices = {"GPU-1": device(limit_bytes=10, unaccounted_bytes=3 * 2**20), "GPU-2": device()}
    said = _lines({"source": "nvml", "devices": devices})
    assert [line for line in said if "unaccounted" in line] == ["unaccounted for on GPU-1: 3.0 MiB"]


def test_without_a_device_the_setting_is_named_that_gives_a_limit():
    said = _lines({"source": None, "devices": {}})
    assert said == ["memory is not measured: set memory_limit; see docs/memory.md#limits"]


def test_what_is_not_known_is_no_figure():
    row = _lines({"source": None, "devices": {"host": device(limit_bytes=10, used_bytes=None)}})[1]
    assert row.split()[3] == "-"


# -- models -------------------------------------------------------------------------------------


def model(name, **given):
    idle = {"in_flight": 0, "served": 0, "idle_seconds": None, "waits_for": None, "basis": None}
    return {"model_id": name, "bytes": {"GPU-1": 2**20, "GPU-2": 2**20}} | idle | given


def rows(table, *found):
    return [
        line.split("  ")
        for line in table.lines({"models": found, "on_demand": None, "failures": []})
    ]


def test_models_are_sorted_and_say_how_long_they_are_in_a_state():
    found = rows(
        _Table(),
        model("c", state="DEAD", state_seconds=60),
        model("b", state="UNLOADING", state_seconds=5, waits_for="requests"),
        model("a", state="READY", state_seconds=7200, idle_seconds=3, basis="learned"),
    )
    assert [[cell for cell in map(str.strip, row) if cell] for row in found[1:]] == [
        ["a", "READY", "2.0 MiB", "learned", "0", "3s", "2h0m"],
        ["b", "UNLOADING 5s, waiting for requests", "2.0 MiB", "-", "0", "-", "-"],
        ["c", "DEAD 1m", "2.0 MiB", "-", "0", "-", "-"],
    ]


def test_a_size_that_nobody_has_measured_and_no_device_has_is_unknown():
    for basis in None, "disk", "declared", "default":
        [_, row] = rows(_Table(), model("a", state="READY", state_seconds=1, basis=basis, bytes={}))
        assert [cell for cell in map(str.strip, row) if cell][2:4] == ["unknown", "-"]


def test_requests_a_second_are_those_since_the_last_look(monkeypatch):
    times = iter([100.0, 102.0])
    monkeypatch.setattr(models.time, "monotonic", lambda: next(times))
    table, ready = _Table(), {"state": "READY", "state_seconds": 1}
    assert rows(table, model("a", **ready, served=10))[0][-1] == "LOADED FOR"
    later = rows(table, model("a", **ready, served=50), model("b", **ready, served=6))
    assert [row[-1].strip() for row in later] == ["REQ/S", "20", "3"]


def test_a_word_that_this_version_does_not_know_is_shown_as_it_came():
    [_, row] = rows(_Table(), model("a", state="LOADING", state_seconds=1, waits_for="sunrise"))
    assert "LOADING 1s, sunrise" in map(str.strip, row)


# -- tensors ------------------------------------------------------------------------------------


def raw_tensor(datatype, raw, shape):
    output = {"name": "A", "datatype": datatype, "shape": shape}
    answer = {"outputs": [output | {"parameters": {"binary_data_size": len(raw)}}]}
    (tensor,) = tensors_of(answer, raw)
    return tensor


@pytest.mark.parametrize(
    ("datatype", "raw", "values"),
    [
        ("BOOL", b"\x01\x00", [True, False]),
        ("INT8", b"\xff\x01", [-1, 1]),
        ("UINT16", b"\x01\x01", [257]),
        ("INT64", struct.pack("<q", -5), [-5]),
        ("FP16", struct.pack("<2e", 0.5, 2), [0.5, 2]),
        ("BF16", b"\x80\x3f\x00\xc0", [1.0, -2.0]),
        ("FP64", struct.pack("<d", 0.1), [0.1]),
        ("BYTES", b"\x02\x00\x00\x00ab\x00\x00\x00\x00\x01\x00\x00\x00\xff", ["ab", "", "\\xff"]),
    ],
)
def test_raw_tensors_are_read(datatype, raw, values):
    assert raw_tensor(datatype, raw, [len(values)]).values == values


@pytest.mark.parametrize(("datatype", "raw"), [("FP32", b"abc"), ("FP7", b"abc")])
def test_raw_bytes_that_are_no_tensor_are_told(datatype, raw):
    with pytest.raises(ValueError, match=datatype):
        raw_tensor(datatype, raw, [1])


def test_each_output_has_its_part_of_the_raw_bytes():
    outputs = [
        {"name": n, "datatype": "INT8", "shape": [1], "parameters": {"binary_data_size": 1}}
        for n in "ab"
    ]
    json_one = {"name": "c", "datatype": "INT8", "shape": [1, 1], "data": [[7]]}
    found = tensors_of({"outputs": [outputs[0], json_one, outputs[1]]}, b"\x01\x02")
    assert [(tensor.name, tensor.values) for tensor in found] == [
        ("a", [1]),
        ("c", [7]),
        ("b", [2]),
    ]


def test_a_tensor_is_shown_by_rows_and_cut_to_the_terminal():
    data = [[number / 3 for number in range(30)]] * 25
    output = {"name": "A", "datatype": "FP32", "shape": [25, 30], "data": data}
    (tensor,) = tensors_of(json.loads(json.dumps({"outputs": [output]})), b"")
    lines = list(as_text(tensor, 40))
    assert lines[0] == "A  FP32 [25, 30]"
    assert lines[1] == "  0 0.333333 0.666667 1 1.33333 1.66667 …"
    assert lines[-1] == "  ... 5 more rows"
    assert len(lines) == 22


def test_strings_of_a_tensor_are_quoted_and_escaped():
    output = {"name": "A", "datatype": "BYTES", "shape": [2], "data": ["a b", "\x1b[2J"]}
    (tensor,) = tensors_of({"outputs": [output]}, b"")
    assert list(as_text(tensor, 80))[1] == '  "a b" "\\u001b[2J"'
