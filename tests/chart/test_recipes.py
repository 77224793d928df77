"""The recipes of docs/helm.md: what each file of values is for holds in its render."""

import json
import re
import subprocess
from contextlib import closing, suppress

import pytest
import yaml

from adapter.settings import load_settings
from adapter.triton.memory.metrics_page import TritonMetrics
from tests.chart.chart import (
    ROOT,
    containers,
    objects,
    only,
    pod_spec,
    render,
    values_of,
    variables,
)
from tests.chart.pod import pod_of, running_pod
from tests.chart.promql import check_queries, query_of
from tests.journeys.observability.promtool import needs_promtool
from tests.running import Client, wait_until
from tests.trees import CONFIG, write_python_model

PAGE = ROOT / "docs" / "helm.md"
RECIPES = PAGE.read_text().partition("\n## Recipes\n")[2]
RULE = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus-adapter.yaml").read_text())
GIB = 2**30


def names_of_the_page() -> list[str]:
    return re.findall(r"ci/([a-z0-9-]+)-values\.yaml", RECIPES)


def settings_of(values):
    return load_settings({}, variables(values), None).settings


def test_each_recipe_has_values_that_are_rendered():
    recipes = {*names_of_the_page()}

    assert recipes >= {"openshift", "istio", "ipv6", "mig", "shared-gpu", "nvml", "image", "pvc"}
    for name in recipes:
        assert render({**values_of(name), "checkApis": False})


def test_openshift_objects_name_no_user_or_group():
    text = json.dumps(objects(values_of("openshift")))

    assert not re.search(r"runAsUser|runAsGroup|fsGroup\"", text)
    assert text.count('"runAsNonRoot": true') == 4


@pytest.mark.triton
def test_triton_serves_as_a_user_that_nobody_knows(tmp_path):
    as_nobody = ["unshare", "-U", "--map-user=1000710000", "--map-group=0"]
    tried = subprocess.run([*as_nobody, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    who = "import os; values[:] = [float(os.getuid())]"
    write_python_model(tmp_path / "who", answer=who, config=CONFIG.replace("FP32", "FP64"))

    with (
        running_pod(values_of("openshift"), tmp_path, before=as_nobody) as adapter,
        closing(adapter.client()) as client,
    ):
        assert client.load("who", tmp_path / "who").status == 200
        body = {"name": "IN", "datatype": "FP64", "shape": [1], "data": [0.0]}
        answer = client.post("/models/who/invoke", {"inputs": [body]})

    assert answer.json()["outputs"][0]["data"] == [1000710000.0]


def test_envoy_outlives_the_drain_within_grace():
    values = values_of("istio")
    annotations = only("Deployment", values)["spec"]["template"]["metadata"]["annotations"]
    envoy = yaml.safe_load(annotations["proxy.istio.io/config"])["terminationDrainDuration"]
    settings = settings_of(values)
    [arguments] = [
        c["args"] for c in containers(pod_spec(values)).values() if c["name"] == "triton"
    ]
    [exit_seconds] = [a.partition("=")[2] for a in arguments if "exit-timeout" in a]

    seconds = int(envoy.removesuffix("s"))
    assert seconds > settings.drain_timeout_seconds
    assert seconds + int(exit_seconds) <= pod_spec(values)["terminationGracePeriodSeconds"]


def scraped(address: str) -> bytes:
    """Nothing while nobody listens: Triton opens its metrics last."""
    with closing(Client(address)) as scraper, suppress(OSError):
        return scraper.get("/metrics").body
    return b""


@pytest.mark.triton
async def test_tritons_metrics_are_read_and_scraped_over_ipv6(tmp_path):
    with pod_of(values_of("ipv6"), tmp_path) as (environ, flags):
        [given] = [each.partition("=")[2] for each in flags if "--triton-metrics=" in each]
        settings = load_settings({"triton_metrics": given}, environ, None).settings
        address = str(settings.triton_metrics)
        assert address.startswith("[::1]:")
        wait_until(lambda: b"nv_cpu_utilization" in scraped(address), 60, "Triton has metrics")
        reader = TritonMetrics(address, timeout_seconds=60)
        await reader.read()
        await reader.close()
    assert reader.why == "Triton reports no GPU"  # so it was there


def test_autoscaler_metric_comes_from_our_rule():
    rule = RULE["rules"]["custom"][0]
    hpa = only("HorizontalPodAutoscaler", values_of("single-model"))["spec"]
    asked = hpa["metrics"][0]["pods"]["metric"]["name"]

    assert rule["name"]["as"] == asked
    assert f'__name__="{asked}"' in rule["seriesQuery"]
    assert f"| `{asked}` |" in (ROOT / "docs" / "metrics.md").read_text()


@needs_promtool
def test_rule_gives_each_pod_its_requests_in_flight(tmp_path):
    rule = RULE["rules"]["custom"][0]
    metric = rule["name"]["as"]
    series = {
        f'{metric}{{namespace="serving",pod="a",frontend="v2"}}': "3x20",
        f'{metric}{{namespace="serving",pod="a",frontend="sagemaker"}}': "4x20",
        f'{metric}{{namespace="serving",pod="b",frontend="v2"}}': "1x20",
        f'{metric}{{namespace="other",pod="a",frontend="v2"}}': "9x20",
    }
    sums = [{"labels": '{pod="a"}', "value": 7}, {"labels": '{pod="b"}', "value": 1}]

    check_queries(tmp_path, series, {query_of(rule, metric): sums})
