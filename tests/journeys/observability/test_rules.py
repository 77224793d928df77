"""Alerts and dashboard: every metric in them exists, and alerts fire when they should."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.pages import anchors
from tests.journeys.observability.promtool import needs_promtool, promtool
from tests.running import EXAMPLES, Client, RunningAdapter

ROOT = Path(__file__).parents[3]
FILES = ROOT / "charts" / "triton-adapter" / "files"
ALERTS = FILES / "alerts.yaml"

# what Prometheus makes itself of each scrape
_OF_PROMETHEUS = {"up"}

_RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
_DASHBOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())
_PANELS = [panel for panel in _DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    shown = [target["expr"] for panel in _PANELS for target in panel["targets"]]
    marked = [note["expr"] for note in _DASHBOARD["annotations"]["list"]]
    return [*(rule["expr"] for rule in _RULES), *shown, *marked]


def names_in(expression: str) -> set[str]:
    """Words that are followed by no parenthesis, label or operator, and stand in no braces."""
    bare = re.sub(r"\{.*?\}|\[.*?\]|\"[^\"]*\"", " ", expression)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", bare)
    words = re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\(|\w)", bare)
    return set(words) - {"and", "or", "unless", "e6"}


def own_names() -> set[str]:
    """As docs/metrics.md has them, which is written from the code."""
    found = set()
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\|.*", text, re.MULTILINE):
        name, kind = (cell.strip(" `") for cell in row.split("|")[1:3])
        ends = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        found |= {name + end for end in ends}
    return found


def test_the_names_of_an_expression_are_found():
    found = names_in('sum by (le) (rate(a_b{c="d_e"}[5m])) / x_y > 0.1 and on (i) z unless up')
    assert found == {"a_b", "x_y", "z", "up"}


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_of_an_expression_exists(expression):
    used = {name for name in names_in(expression) if not name.startswith("nv_")}
    assert used - own_names() - _OF_PROMETHEUS == set()


@pytest.mark.triton
def test_every_metric_of_triton_that_is_shown_exists(adapter: RunningAdapter, client: Client):
    assert client.load("echo", EXAMPLES / "identity").status == 200  # now its series are there
    said = "\n".join(event["line"] for event in adapter.events("triton.log"))
    [address] = re.findall(r"Started Metrics Service at ([\w.:]+)", said)
    with closing(Client(address)) as triton:
        page = triton.get("/metrics").body.decode()
    there = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    used = {name for each in expressions() for name in names_in(each) if name.startswith("nv_")}
    assert used
    assert used - there == set()


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_where_to_read_on(rule):
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)


@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_seen_to_fire(rule):
    tested = (Path(__file__).parent / "alerts_test.yaml").read_text()
    assert f'alertname="{rule["alert"]}"' in tested


@needs_promtool
def test_alerts_fire_when_they_should_and_not_otherwise():
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", Path(__file__).parent / "alerts_test.yaml")


@needs_promtool
def test_prometheus_understands_every_expression_of_the_dashboard(tmp_path):
    shown = [each.replace("$__rate_interval", "5m") for each in expressions()]
    recorded = [{"record": f"shown:{i}", "expr": each} for i, each in enumerate(shown)]
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps({"groups": [{"name": "shown", "rules": recorded}]}))
    promtool("check", "rules", rules)


def test_every_panel_asks_the_data_source_that_is_chosen_and_has_its_place():
    assert _PANELS
    [chosen, instance] = _DASHBOARD["templating"]["list"]
    assert (chosen["type"], chosen["query"]) == ("datasource", "prometheus")
    assert names_in(instance["definition"].split("(")[1].split(",")[0]) <= own_names()
    places = set()
    for panel in _PANELS:
        assert panel["title"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"]["uid"] == "${datasource}"
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
    assert len(places) == len(_PANELS)
    assert len({panel["id"] for panel in _DASHBOARD["panels"]}) == len(_DASHBOARD["panels"])
