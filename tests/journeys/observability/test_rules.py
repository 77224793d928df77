"""Alerts and dashboard: every metric in them exists, and alerts fire when they should."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cases import rows
from tests.docs.pages import anchors
from tests.journeys.observability.prometheus import triton_metrics
from tests.journeys.observability.promtool import needs_promtool, promtool
from tests.running import EXAMPLES, Client

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
_ASKING = [panel for panel in _PANELS if "targets" in panel]
_VARIABLES = {"cluster", "namespace", "pod"}


def expressions() -> list[str]:
    shown = [target["expr"] for panel in _ASKING for target in panel["targets"]]
    marked = [note["expr"] for note in _DASHBOARD["annotations"]["list"]]
    return [*(rule["expr"] for rule in _RULES), *shown, *marked]


def shown_by_panel() -> dict[str, list[str]]:
    return {each["title"]: [t["expr"] for t in each["targets"]] for each in _ASKING}


def filled_in(expression: str, window: str) -> str:
    """As Grafana asks when all is chosen."""
    for name in ("__rate_interval", "__range"):
        expression = expression.replace(f"${name}", window)
    for name in _VARIABLES:
        expression = expression.replace(f'"${name}"', '".*"')
    return expression


def names_in(expression: str) -> set[str]:
    """Words that are followed by no parenthesis, label or operator, and stand in no braces."""
    bare = re.sub(r"\{.*?\}|\[.*?\]|\"[^\"]*\"|#.*", " ", expression)
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


@rows("expression", expressions())
def test_every_metric_of_an_expression_exists(expression):
    used = {name for name in names_in(expression) if not name.startswith("nv_")}
    assert used - own_names() - _OF_PROMETHEUS == set()


@pytest.mark.triton
def test_every_metric_of_triton_that_is_shown_exists(adapter, client):
    assert client.load("echo", EXAMPLES / "identity").status == 200  # now its series are there
    with Client(triton_metrics(adapter)) as triton:
        page = triton.get("/metrics").body.decode()
    there = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    used = {name for each in expressions() for name in names_in(each) if name.startswith("nv_")}
    assert used
    assert used - there == set()


@rows("rule", _RULES)
def test_alert_says_what_is_wrong_with_link(rule):
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() - {"holders"} == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)


@needs_promtool
@pytest.mark.timeout(400)
def test_alerts_fire_when_they_should_and_not_otherwise():
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", Path(__file__).parent / "alerts_test.yaml")


_CASES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for case in yaml.safe_load((Path(__file__).parent / "alerts_test.yaml").read_text())["tests"]
}


def fires(case: str) -> set[str]:
    checks = _CASES[case]["promql_expr_test"]
    return set(re.findall(r"TritonAdapter\w+", json.dumps([c.get("exp_samples") for c in checks])))


def listed() -> tuple[dict[str, list[str]], set[str]]:
    """The rows of the table by their alert, and all cases that the page names."""
    section = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    cells = [row.strip("|").split(" | ") for row in re.findall(r"^\| `.*", section, re.MULTILINE)]
    rows = {f"TritonAdapter{row[0].strip(' `')}": row[2:] for row in cells if len(row) == 4}
    return rows, set(re.findall(r"`([^`\n]+)`", section)) & _CASES.keys()


@rows("alert", [rule["alert"] for rule in _RULES])
def test_page_lists_when_each_alert_fires(alert):
    fired, quiet = (re.findall(r"`([^`]+)`", cell) for cell in listed()[0][alert])
    assert [alert in fires(case) for case in fired] == [True]
    assert quiet
    assert [case for case in quiet if alert in fires(case)] == []


def test_every_case_is_on_the_page():
    assert _CASES.keys() - listed()[1] == set()
    assert listed()[0].keys() == {rule["alert"] for rule in _RULES}


@needs_promtool
def test_prometheus_understands_every_expression_of_the_dashboard(tmp_path):
    shown = [filled_in(each, "5m") for each in expressions()]
    assert not any("$" in each for each in shown)
    recorded = [{"record": f"shown:{i}", "expr": each} for i, each in enumerate(shown)]
    rules = tmp_path / "rules.yaml"
    rules.write_text(json.dumps({"groups": [{"name": "shown", "rules": recorded}]}))
    promtool("check", "rules", rules)


def test_every_panel_has_place_and_chosen_source():
    [chosen, *others] = _DASHBOARD["templating"]["list"]
    assert (chosen["type"], chosen["query"]) == ("datasource", "prometheus")
    assert {each["name"] for each in others} == _VARIABLES
    for variable in others:
        assert (
            names_in(variable["definition"].split("(")[1].split("{")[0].split(",")[0])
            <= own_names()
        )
    for panel in _ASKING:
        for part in (panel, *panel["targets"]):
            assert part["datasource"]["uid"] == "${datasource}"
    places = set[tuple[int, int]]()
    for panel in _DASHBOARD["panels"]:
        assert panel["title"]
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        taken = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not taken & places, f"{panel['title']} lies on another"
        places |= taken
    assert len({panel["id"] for panel in _DASHBOARD["panels"]}) == len(_DASHBOARD["panels"])


@rows("expression", [each for exprs in shown_by_panel().values() for each in exprs])
def test_dashboard_selects_only_the_chosen_pods(expression):
    chosen = 'cluster=~"$cluster",namespace=~"$namespace",pod=~"$pod"'
    selectors = re.findall(r"\{([^}]*)\}", expression)
    assert len(selectors) == len(re.findall(r"\b(?:triton_adapter|nv|process)_\w+", expression))
    assert all(selector.startswith(chosen) for selector in selectors)
