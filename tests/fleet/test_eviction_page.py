"""docs/measurements.md shows what `make simulation` has found of evictions, and it is so."""

import json

import pytest

from scripts.simulation.eviction import DATA, PAGE, measure, with_table
from scripts.simulation.traffic import KINDS

ROWS = json.loads(DATA.read_text(encoding="utf-8"))
LRU = 1.02


def test_table_is_that_of_the_data():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, ROWS) == page
    assert [row["kind"] for row in ROWS] == [kind.name for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cost_policy_waits_between_lru_and_hindsight(kind):
    found = measure(kind, 0)
    assert found["offline"] <= found["cost"] <= LRU * found["lru"]
