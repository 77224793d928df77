"""docs/measurements.md shows the figures of docs/fleet.json, which `make fleet` has measured."""

import json

from tests.fleet.figures import DATA, PAGE, with_figures


def test_the_page_shows_the_figures_that_were_measured():
    page = PAGE.read_text()
    assert page == with_figures(page, json.loads(DATA.read_text()))
