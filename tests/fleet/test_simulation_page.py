"""docs/measurements.md shows what `make simulation` has found."""

import json

import pytest

from scripts.simulation.__main__ import DATA, PAGE
from scripts.simulation.page import with_tables
from scripts.simulation.study import PAUSE_SECONDS, Load, Run

FOUND = json.loads(DATA.read_text(encoding="utf-8"))


def test_the_tables_of_the_page_are_those_of_the_data():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, FOUND) == page
    assert with_tables(page, {**FOUND, "shares": FOUND["shares"][:1]}) != page


def test_the_page_shows_each_plot_that_is_drawn(tmp_path):
    from scripts.simulation import plot  # here, as it imports matplotlib

    plot.draw(FOUND, tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert len(drawn) == 3
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in drawn if f"](images/{name})" not in page] == []
    assert [name for name in drawn if not (PAGE.parent / "images" / name).exists()] == []


def test_callers_call_again_after_a_pause():
    """Half of the calls find their model in memory at least: so each takes little but the pause."""
    seen = Run(Load("few", 20), 0).seen(400)
    assert seen["hits"] > 0.5
    assert seen["calls_per_second"] == pytest.approx(20 / PAUSE_SECONDS, rel=0.3)


def test_calls_of_a_hot_model_are_the_share_that_was_asked_for_and_those_of_its_rank():
    hot = Run(Load("hot", 20, hot=0.9), 0).seen(400)
    assert hot["hits"] > 0.95
