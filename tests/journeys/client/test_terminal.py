"""What the commands show on a terminal: colours, bars, progress, views that are refreshed."""

import json
import re

import pytest

from tests.cases import rows
from tests.journeys.client.terminal import ESCAPE, Terminal, on_terminal, run
from tests.running import wait_until

pytestmark = pytest.mark.triton
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
OTHER_SCREEN, BACK = f"{ESCAPE}[?1049h", f"{ESCAPE}[?1049l"
CTRL_C = "\x03"


@pytest.fixture
def loaded(environ, packages):
    assert run("load", "echo", str(packages / "echo"), environ=environ).returncode == 0
    return environ


def test_states_have_colours(loaded):
    code, said = on_terminal("ps", environ=loaded)
    assert code == 0
    assert f"{ESCAPE}[32mREADY{ESCAPE}[0m" in said


@rows("argv", [("ps",), ("unload", "none")])
def test_no_color_is_respected(loaded, argv):
    assert COLOUR.search(on_terminal(*argv, environ=loaded)[1])
    assert not COLOUR.search(on_terminal(*argv, environ={**loaded, "NO_COLOR": "1"})[1])


@rows("argv", [("ps",), ("load", "m", "/nowhere")])
def test_a_dumb_terminal_gets_plain_text(loaded, argv):
    assert ESCAPE not in on_terminal(*argv, environ={**loaded, "TERM": "dumb"})[1]


def test_load_shows_what_it_waits_for(environ, packages):
    terminal = Terminal("load", "slow", str(packages / "slow"), environ=environ)
    terminal.until(r"load slow: waiting for Triton \(\d+ s\)")
    (packages / "go").touch()
    terminal.until(r"slow is loaded after")
    assert terminal.end() == 0


def test_a_load_that_nobody_waits_for_goes_on(environ, adapter, packages):
    terminal = Terminal("load", "slow", str(packages / "slow"), environ=environ)
    terminal.until("waiting for Triton")
    terminal.press(CTRL_C)
    terminal.until("load slow: goes on in the adapter; `triton-adapter ps` shows it")
    assert terminal.end() == 1
    (packages / "go").touch()
    with adapter.client() as client:
        wait_until(lambda: client.get("/models/slow").status == 200, 60, "it is loaded")


def test_ps_is_refreshed_in_place_until_ctrl_c(loaded, packages):
    terminal = Terminal("ps", "--watch=0.1", environ=loaded)
    terminal.until(re.escape(OTHER_SCREEN))
    terminal.until("REQ/S")
    assert run("load", "more", str(packages / "echo"), environ=loaded).returncode == 0
    terminal.until("more .*READY")
    assert run("unload", "more", environ=loaded).returncode == 0
    terminal.press(CTRL_C)
    assert terminal.end() == 0
    assert BACK in terminal.said
    assert "Traceback" not in terminal.said


def test_a_view_goes_on_when_nobody_answers(environ):
    terminal = Terminal("ps", "--watch=0.1", environ={"ADAPTER_ADMIN": "127.0.0.1:1"})
    terminal.until("no answer: http://127.0.0.1:1: Connection refused")
    terminal.press(CTRL_C)
    assert terminal.end() == 0


def test_json_is_watched_as_one_object_a_line(loaded):
    terminal = Terminal("ps", "--watch=0.1", "--json", environ=loaded)
    terminal.until("(?s)\n.*\n.*\n")
    terminal.press(CTRL_C)
    assert terminal.end() == 0
    first, second, *_ = terminal.said.splitlines()
    for line in (first, second):
        assert [model["model_id"] for model in json.loads(line)["models"]] == ["echo"]


def test_narrow_terminal_wraps_check_config():
    code, said = on_terminal("check-config", environ={})
    assert code == 0
    assert max(len(line) for line in said.splitlines()) <= 100
    assert re.search(r"(?m)^memory_limit +- +default: all of a GPU; .*\r?\n {50,}", said)


def test_dumb_terminal_gets_the_view_repeatedly(loaded):
    terminal = Terminal("ps", "--watch=0.1", environ={**loaded, "TERM": "dumb"})
    terminal.until("(?s)NAME.*NAME.*NAME")
    terminal.press(CTRL_C)
    assert terminal.end() == 0
    assert ESCAPE not in terminal.said


def test_long_lines_are_cut_to_the_terminal(environ, packages):
    name = "long" * 50
    assert run("load", name, str(packages / "echo"), environ=environ).returncode == 0
    said = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal("ps", environ=environ)[1])
    assert max(len(line) for line in said.splitlines()) <= 100
    assert "…  READY" in said
    run("unload", name, environ=environ)
