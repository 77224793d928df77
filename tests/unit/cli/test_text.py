"""Columns, durations, devices and models, as a terminal shows them."""

import pytest

from adapter.cli import models, text
from adapter.cli.models import ModelTable, fit_lines, format_devices
from adapter.cli.text import escape, format_columns, format_duration


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.9, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (12_000, "3h20m"), (187_200, "2d4h")],
)
def test_a_duration_has_two_units_at_most(seconds, said):
    assert format_duration(seconds) == said


def test_columns_stand_below_each_other_whatever_letters_take():
    rows = [["a", "1"], ["模型", "22"], ["e\u0301", "333"]]
    assert format_columns(rows, frozenset({1})) == ["a       1", "模型   22", "e\u0301     333"]


def test_first_column_gives_way_in_narrow_terminal(monkeypatch):
    monkeypatch.setattr(text, "terminal_width", lambda: 20)
    assert format_columns([["a" * 30, "READY"], ["b", "READY"]]) == [
        "aaaaaaaaaaaa…  READY",
        "b              READY",
    ]
    assert format_columns([["模" * 30, "READY"]]) == ["模模模模模模…  READY"]
    assert format_columns([["a", "b" * 50]]) == ["a  bbbbbbbbbbbbbbbb…"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [("模型 é", "模型 é"), ("a\nb", "a\\nb"), ("\x1b[2J", "\\x1b[2J"), ("\u202e", "\\u202e")],
)
def test_what_would_move_the_cursor_is_escaped(given, shown):
    assert escape(given) == shown


def test_view_is_cut_to_lines_of_terminal():
    lines = [f"line {number}" for number in range(9)]
    assert fit_lines(lines, 4).plain.splitlines() == [*lines[:3], "... 6 more lines"]
    assert fit_lines(lines[:4], 4).plain.splitlines() == lines[:4]


# -- devices ------------------------------------------------------------------------------------


def device(**figures):
    names = (
        "limit_bytes",
        "used_bytes",
        "free_bytes",
        "memory_reserve_bytes",
        "not_attributed_bytes",
    )
    return {**dict.fromkeys(names, 0), **figures}


def test_ps_shows_a_row_for_each_device():
    first = device(
        limit_bytes=9 * 2**20,
        used_bytes=3 * 2**20,
        free_bytes=2**20,
        memory_reserve_bytes=5 * 2**20,
        not_attributed_bytes=2 * 2**20,
    )
    head, *lines = format_devices({"devices": {"GPU-1": first, "GPU-2": device()}})
    assert head.split() == ["DEVICE", "USED", "FREE", "RESERVE", "LIMIT", "NOT", "ATTRIBUTED"]
    assert [line.split()[0] for line in lines] == ["GPU-1", "GPU-2"]
    assert lines[0].split()[1::2] == ["3.0", "1.0", "5.0", "9.0", "2.0"]


def test_ps_names_memory_limit_without_device():
    lines = format_devices({"devices": {}})
    assert lines == ["memory is not measured: set memory_limit; see docs/memory.md#limits"]


def test_ps_shows_a_dash_for_unknown_memory():
    unknown = device(used_bytes=None, free_bytes=None, not_attributed_bytes=None, limit_bytes=10)
    [_, line] = format_devices({"devices": {"host": unknown}})
    assert line.split() == ["host", "-", "-", "0", "bytes", "10", "bytes", "-"]


# -- models -------------------------------------------------------------------------------------


def model(name, **given):
    unset = ("idle_seconds", "waits_for", "basis", "gpu", "hanging_seconds")
    return {
        "model_id": name,
        "bytes": {"GPU-1": 2**20, "GPU-2": 2**20},
        "in_flight": 0,
        "served": 0,
        "is_pinned": False,
        "awaits": [],
        **dict.fromkeys(unset),
        **given,
    }


def rows(table, *found):
    state = {"models": found, "on_demand": None, "forgotten": [], "failures": []}
    return [line.split("  ") for line in table.format(state)]


def test_models_are_sorted_with_state_times():
    found = rows(
        ModelTable(),
        model("c", state="DEAD", state_seconds=60),
        model("b", state="UNLOADING", state_seconds=5, waits_for="requests"),
        model("a", state="READY", state_seconds=7200, idle_seconds=3, basis="learned"),
    )
    assert [[cell for cell in map(str.strip, row) if cell] for row in found[1:]] == [
        ["a", "READY", "2.0 MiB", "learned", "0", "3s", "2h0m"],
        ["b", "UNLOADING 5s, waiting for requests", "2.0 MiB", "-", "0", "-", "-"],
        ["c", "DEAD 1m", "2.0 MiB", "-", "0", "-", "-"],
    ]


def test_lost_models_are_named_with_the_reason():
    lost = {"time": "2026-01-02T03:04:05+00:00", "is_given_up": False, "reason": "it went"}
    forgotten = [lost | {"model_id": name} for name in "ab"]
    forgotten.append(lost | {"model_id": "c", "is_given_up": True, "reason": "it kills"})
    state = {"models": [], "on_demand": None, "forgotten": forgotten, "failures": []}
    [both, killer] = ModelTable().format(state)[-2:]
    assert both.startswith("lost at ")
    assert both.endswith(": it went: a, b")
    assert killer.startswith("given up at ")
    assert killer.endswith(": it kills: c")


def test_unmeasured_size_is_unknown():
    for basis in None, "disk", "declared":
        [_, row] = rows(
            ModelTable(), model("a", state="READY", state_seconds=1, basis=basis, bytes={})
        )
        assert [cell for cell in map(str.strip, row) if cell][2:4] == ["unknown", "-"]


def test_request_rate_is_that_since_last_poll(monkeypatch):
    times = iter([100.0, 100.0, 102.0, 102.0])
    monkeypatch.setattr(models.time, "monotonic", lambda: next(times))
    table, ready = ModelTable(), {"state": "READY", "state_seconds": 1}
    assert rows(table, model("a", **ready, served=10))[0][-1] == "LOADED FOR"
    later = rows(table, model("a", **ready, served=50), model("b", **ready, served=6))
    assert [row[-1].strip() for row in later] == ["REQ/S", "20", "3"]


def test_unknown_word_is_shown_as_it_came():
    [_, row] = rows(ModelTable(), model("a", state="LOADING", state_seconds=1, waits_for="sunrise"))
    assert "LOADING 1s, sunrise" in map(str.strip, row)


@pytest.mark.parametrize("state", ["READY", "PREPARING", "LOST", "STUCK"])
def test_line_of_any_state_is_coloured(state):
    """A state without a colour of its own once ended `ps` with a KeyError."""
    line = models._colour_state(f"name  {state} 3s", state)
    assert state in line
