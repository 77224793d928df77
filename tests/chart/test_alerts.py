"""The PrometheusRule: the alerts of files/alerts.yaml, for the pods of one release."""

import re
from typing import Any

import pytest
import yaml

from tests.cases import rows
from tests.chart.chart import CHART, only
from tests.chart.promql import check_queries
from tests.journeys.observability.promtool import needs_promtool

FILE = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
NAMES = [rule["alert"] for group in FILE["groups"] for rule in group["rules"]]


def values(**rule: Any) -> dict[str, Any]:
    return {"metrics": {"prometheusRule": {"enabled": True, **rule}}, "checkApis": False}


def rules(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    [group] = only("PrometheusRule", given)["spec"]["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def expressions(given: dict[str, Any]) -> str:
    return "\n".join(rule["expr"] for rule in rules(given).values())


def pattern_of(given: dict[str, Any]) -> re.Pattern[str]:
    [found] = {*re.findall(r'pod=~"([^"]+)"', expressions(given))}
    return re.compile(found)


def test_selectors_match_only_own_namespace_and_pods():
    selectors = re.findall(r"\w+\{([^}]*)\}", expressions(values()))
    own = 'namespace="serving",pod=~"demo-triton-adapter-[a-z0-9]+-[a-z0-9]+"'

    assert list(rules(values())) == NAMES
    assert len(selectors) == str(FILE).count('pod=~".*"')
    assert {selector[: len(own)] for selector in selectors} == {own}


@pytest.mark.parametrize(
    "name", ["demo", "a-release-with-a-name-of-a-length-that-must-be-cut-off-at-63"]
)
def test_pattern_matches_pods_of_a_deployment(name):
    pattern = pattern_of({**values(), "fullnameOverride": name})
    made = only("Deployment", {**values(), "fullnameOverride": name})["metadata"]["name"]

    # as Kubernetes does: at most 58 characters of the ReplicaSet's name and a hyphen, and five more
    assert pattern.fullmatch(f"{f'{made}-6b7f9d4c8c-'[:58]}x2x4z")
    assert not pattern.fullmatch("demo-canary-6b7f9d4c8c-x2x4z")
    assert not pattern.fullmatch("other-6b7f9d4c8c-x2x4z")


@pytest.mark.parametrize("scope", ["", 'namespace="serving",'])
def test_runtime_rules_select_the_controllers_pods(scope):
    given = {
        **values(),
        "mode": "servingRuntime",
        "settings": {"admin": "[::]:8081"},
        "servingRuntime": {"clusterScoped": not scope},
    }
    selectors = re.findall(r"\w+\{([^}]*)\}", expressions(given))
    own = f'{scope}pod=~"modelmesh-serving-demo-triton-adapter'

    assert {selector[: len(own)] for selector in selectors} == {own}
    # the Deployment, its ReplicaSet, the pod
    assert pattern_of(given).fullmatch("modelmesh-serving-demo-triton-adapter-6b7f9d4c8c-x2x4z")
    assert not pattern_of(given).fullmatch("modelmesh-serving-other-6b7f9d4c8c-x2x4z")


@needs_promtool
def test_release_that_lives_hides_no_other(tmp_path):
    """Beside it, one whose pods are gone has its alert. All thresholds are replaced."""
    thresholds = dict.fromkeys([each for each in NAMES if is_tunable(each)], 0.25)
    other = (
        'triton_adapter_build_info{namespace="serving",pod="other-triton-adapter-1-a",instance="o"}'
    )
    absent = {"labels": '{alertname="TritonAdapterAbsent"}', "value": 1}

    check_queries(
        tmp_path,
        {other: "1x20"},
        {'count by (alertname) (ALERTS{alertstate="firing"})': [absent]},
        rules=only("PrometheusRule", values(thresholds=thresholds))["spec"],
    )


KEDA = {
    "enabled": True,
    "serverAddress": "http://p:9090",
    "triggers": [{"type": "cron", "metadata": {}}],
}


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        ({"autoscaling": {"minReplicas": 0, "keda": KEDA}}, {"TritonAdapterAbsent"}),
        ({"autoscaling": {"minReplicas": 1, "keda": KEDA}, "replicaCount": 0}, set()),
        ({"replicaCount": 0}, {"TritonAdapterAbsent"}),
        (
            {"mode": "servingRuntime", "settings": {"admin": "[::]:8081"}, "models": {}},
            {"TritonAdapterAbsent"},
        ),
    ],
    ids=["keda from 0", "keda from 1", "no replicas", "modelmesh"],
)
def test_absence_alerts_only_where_pods_must_be(given, left_out):
    made = rules({**values(), "models": {"load": ["a"]}, **given})
    assert set(NAMES) - made.keys() == left_out


@needs_promtool
def test_night_without_pods_is_no_alert(tmp_path):
    """Of a pod that is gone there are no series; KEDA makes one again after an hour."""
    scaled = {"autoscaling": {"minReplicas": 0, "keda": KEDA}, "models": {"load": ["a"]}}
    series = {}
    for name, label, evening, morning in (
        ("up", "", "1x60 stale", "_x120 0x1 1x60"),
        ("triton_adapter_build_info", "", "1x60 stale", "_x122 1x60"),
        ("triton_adapter_ready", "", "1x60 0 stale", "_x122 0x4 1x60"),
        ("triton_adapter_triton_live", "", "1x60 stale", "_x122 0x4 1x60"),
        ("triton_adapter_models", ',state="READY"', "1x60 0 stale", "_x122 0x4 1x60"),
        ("process_start_time_seconds", "", "0x60 stale", "_x122 7320x60"),
    ):
        for pod, samples in (("aaaaa", evening), ("bbbbb", morning)):
            pod_name = f"demo-triton-adapter-6b7f9d4c8c-{pod}"
            labels = f'namespace="serving",job="j",pod="{pod_name}",instance="{pod_name}"{label}'
            series[f"{name}{{{labels}}}"] = samples

    check_queries(
        tmp_path,
        series,
        {'ALERTS{alertstate="firing"}': []},
        at_minutes=range(55, 180),
        rules=only("PrometheusRule", {**values(), **scaled})["spec"],
    )


def test_alert_can_be_dropped_labelled_and_linked():
    given = values(
        disabled=["TritonAdapterThrashing"],
        additionalRuleLabels={"team": "a", "severity": "none"},
        runbookBaseUrl="https://wiki.example.com/ops",
    )
    found = rules(given)

    assert set(NAMES) - found.keys() == {"TritonAdapterThrashing"}
    down = found["TritonAdapterDown"]
    assert down["labels"] == {"severity": "warning", "team": "a"}
    assert down["annotations"]["runbook_url"] == "https://wiki.example.com/ops#tritonadapterdown"
    assert "runbook" not in down["annotations"]


def test_a_severity_is_replaced_in_its_alert_alone():
    before, after = rules(values()), rules(values(severities={"TritonAdapterDown": "page"}))

    assert [each for each in NAMES if before[each] != after[each]] == ["TritonAdapterDown"]
    assert before["TritonAdapterDown"]["labels"] == {"severity": "warning"}
    assert after["TritonAdapterDown"]["labels"] == {"severity": "page"}


def is_tunable(alert: str) -> bool:
    return "# threshold" in rules(values())[alert]["expr"]


@rows("alert", NAMES)
def test_a_threshold_is_replaced_in_its_alert_alone(alert):
    if not is_tunable(alert):
        assert not re.search(r"[<>] (?!0\b|600\b)[0-9.]+\s*$", rules(values())[alert]["expr"])
        return
    before, after = rules(values()), rules(values(thresholds={alert: 0.123}))

    assert [each for each in NAMES if before[each] != after[each]] == [alert]
    assert re.search(r"> 0\.123 # threshold$", after[alert]["expr"], re.MULTILINE)


def test_long_start_is_no_alert():
    longer = {**values(), "settings": {"load_timeout_seconds": 1800}}

    assert "< 1980" in rules(longer)["TritonAdapterNotReady"]["expr"]
    assert "< 1980" in rules(longer)["TritonAdapterTritonDown"]["expr"]
    assert rules(longer)["TritonAdapterNoneReady"]["for"] == "1980s"
    assert rules(values())["TritonAdapterNoneReady"]["for"] == "10m"
