"""A fleet's objects: strictly of Envoy Gateway's own types, and of one mind with deploy/fleet.

What Envoy Gateway makes of them is in tests/nightly/test_envoy_gateway.py.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builds import build, built
from tests.chart.chart import (
    CASES,
    NOTES,
    ROOT,
    case,
    containers,
    objects,
    only,
    pod_spec,
    render,
    values_of,
    variables,
)
from tests.chart.promql import check_queries, query_of
from tests.journeys.observability.promtool import needs_promtool

SOURCE = Path(__file__).parent / "gateway_types"
FLEET, PATCHED = values_of("fleet"), values_of("fleet-patch")
BOTH = pytest.mark.parametrize("values", [FLEET, PATCHED], ids=["headers", "patched"])
ROUTES = {"http": "HTTPRoute", "grpc": "GRPCRoute"}


@pytest.fixture(scope="module")
def decoder(pytestconfig: pytest.Config) -> Path:
    """A program that reads objects into the types of github.com/envoyproxy/gateway."""
    folder, is_built = built(pytestconfig, SOURCE, "go")
    if not is_built:
        build(folder, SOURCE, "go", "build", "-o", str(folder / "decode"), ".")
    return folder / "decode"


def misfits(decoder: Path, found: Sequence[dict[str, Any]]) -> list[str]:
    done = subprocess.run(
        [decoder], input=json.dumps(found), capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stderr
    return done.stdout.splitlines()


def of_gateways(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [made for made in objects(values) if made["apiVersion"].startswith("gateway.")]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_gateway_objects_match_envoy_gateways_schema(decoder):
    found = [made for path in CASES for made in of_gateways(values_of(case(path)))]

    assert {made["kind"] for made in found} == {
        *("Gateway", "HTTPRoute", "GRPCRoute", "HTTPRouteFilter"),
        *("ClientTrafficPolicy", "BackendTrafficPolicy", "EnvoyPatchPolicy"),
    }
    assert misfits(decoder, found) == []


@pytest.mark.parametrize(
    ("settings", "service", "ports"),
    [
        ({}, {}, {"http": 8080, "grpc": 8085}),
        ({"http_data": "[::]:8083"}, {"httpData": 80}, {"http": 80, "grpc": 8085}),
        ({"grpc_data": "[::]:8086"}, {"grpcData": 443, "http": 0}, {"grpc": 443}),
    ],
    ids=["control", "data", "grpc alone"],
)
def test_calls_go_to_the_inference_listener(settings, service, ports):
    values = {
        "checkApis": False,
        "fleet": {"enabled": True, "patch": True},
        "settings": {"model_store": "s3://models", **settings},
        "service": service,
    }

    listeners = {
        each["name"]: each["port"] for each in only("Gateway", values)["spec"]["listeners"]
    }
    assert listeners == ports
    for name, kind in ROUTES.items():
        routes = [made["spec"] for made in objects(values) if made["kind"] == kind]
        assert len(routes) == (name in ports)
        for route in routes:
            assert [ref["sectionName"] for ref in route["parentRefs"]] == [name]
            rule, *_ = route["rules"]
            assert rule["backendRefs"] == [{"name": "demo-triton-adapter", "port": ports[name]}]
    targets = {each["kind"] for each in only("BackendTrafficPolicy", values)["spec"]["targetRefs"]}
    assert targets == {ROUTES[name] for name in ports}
    patched = only("EnvoyPatchPolicy", values)["spec"]["jsonPatches"]
    assert {each["name"].rpartition("/")[2] for each in patched} == {*ports, "0"}


@BOTH
def test_readiness_is_asked_at_the_probe_listener(values):
    active = only("BackendTrafficPolicy", values)["spec"]["healthCheck"]["active"]
    adapter = containers(pod_spec(values))["adapter"]
    ports = {port["name"]: port["containerPort"] for port in adapter["ports"]}
    probe = adapter["readinessProbe"]["httpGet"]

    assert active["http"]["path"] == probe["path"]
    assert active["overrides"]["port"] == ports[probe["port"]]


@BOTH
def test_only_the_gateways_envoys_are_let_in(values):
    gateway = only("Gateway", values)["metadata"]
    peers = [
        (rule["ports"], peer)
        for rule in only("NetworkPolicy", values)["spec"]["ingress"]
        for peer in rule["from"]
        if "namespaceSelector" in peer
    ]
    [(ports, peer)] = peers
    own = variables(values)
    listeners = ("HTTP_DATA", "GRPC_DATA", "METRICS") if values is FLEET else ("HTTP", "METRICS")
    wanted = {int(own.get(f"ADAPTER_{name}", "[::]:8080").rpartition(":")[2]) for name in listeners}

    assert {each["port"] for each in ports} == wanted
    assert peer["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "envoy-gateway-system"
    }
    assert peer["podSelector"]["matchLabels"] == {
        "gateway.envoyproxy.io/owning-gateway-namespace": gateway["namespace"],
        "gateway.envoyproxy.io/owning-gateway-name": gateway["name"],
    }


def test_notes_give_callers_address_and_credentials():
    (by_header, patched) = (render(values)[NOTES] for values in (FLEET, PATCHED))

    for notes in (by_header, patched):
        assert "kubectl --namespace serving get gateway demo-triton-adapter" in notes
    for header in only("BackendTrafficPolicy", FLEET)["spec"]["loadBalancer"]["consistentHash"][
        "headers"
    ]:
        assert header["name"] in by_header
    assert "every call must have one of the headers" not in patched
    assert "get envoypatchpolicy demo-triton-adapter" in patched


# -- the same as without Kubernetes ----------------------------------------------------------------


def own() -> dict[str, Any]:
    """The routes, their retries, and the cluster of deploy/fleet/envoy.yaml."""
    resources = yaml.safe_load((ROOT / "deploy/fleet/envoy.yaml").read_text())["static_resources"]
    [listener] = resources["listeners"]
    [manager] = listener["filter_chains"][0]["filters"]
    [host] = manager["typed_config"]["route_config"]["virtual_hosts"]
    cluster = next(each for each in resources["clusters"] if each["name"] == "http")
    return {"listener": listener, "cluster": cluster, **host}


def patches(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        each["operation"]["path"].strip("/"): each["operation"]["value"]
        for each in only("EnvoyPatchPolicy", values)["spec"]["jsonPatches"]
        if each["name"].startswith(name)
    }


def test_patch_gives_routes_as_in_deploy_fleet():
    found = patches(PATCHED, "serving/")
    retry = own()["retry_policy"]

    assert [found["hash_policy"]] == [
        each["route"]["hash_policy"]
        for each in own()["routes"]
        if each["match"].get("path") == "/ping"
    ]
    assert found["retry_on"] == retry["retry_on"]
    assert found["retriable_headers"] == retry["retriable_headers"]
    assert found["host_selection_retry_max_attempts"] == str(
        retry["host_selection_retry_max_attempts"]
    )
    policy = only("BackendTrafficPolicy", PATCHED)["spec"]["retry"]
    assert policy["numRetries"] == retry["num_retries"]


def test_open_paths_match_deploy_fleet():
    [calls, lists] = only("HTTPRoute", FLEET)["spec"]["rules"]
    [methods] = only("GRPCRoute", FLEET)["spec"]["rules"]
    by_method = [each["method"] for each in methods["matches"]]
    paths = [each["path"]["value"].rstrip("/") for each in calls["matches"]]

    routed = [each["match"] for each in own()["routes"] if "route" in each]
    assert [*("/" + each["service"] + "/" + each["method"] for each in by_method), *paths] == [
        each.get("path") or each.get("prefix", "").rstrip("/") or each["safe_regex"]["regex"]
        for each in routed
    ]
    assert {each["path"]["type"] for each in lists["matches"]} == {"Exact"}
    assert "backendRefs" not in lists
    refused = [each for each in own()["routes"] if "direct_response" in each]
    assert [each["match"] for each in refused] == [
        {"safe_regex": {"regex": "/v2/models/stats/?"}},
        {"prefix": "/"},
    ]
    reply = only("HTTPRouteFilter", FLEET)["spec"]["directResponse"]
    assert reply["statusCode"] == refused[0]["direct_response"]["status"]


def test_patch_treats_507_as_deploy_fleet_does():
    found = patches(PATCHED, "serving/")[
        "default_filter_chain/filters/0/typed_config/local_reply_config"
    ]
    [manager] = own()["listener"]["filter_chains"][0]["filters"]

    assert found["mappers"] == manager["typed_config"]["local_reply_config"]["mappers"]


def test_patch_gives_clusters_as_in_deploy_fleet():
    found = patches(PATCHED, "httproute/")
    cluster = own()["cluster"]
    [policy] = found["load_balancing_policy"]["policies"]
    maglev = policy["typed_extension_config"]["typed_config"]

    assert maglev["@type"].endswith(".Maglev")
    assert maglev["table_size"] == cluster["maglev_lb_config"]["table_size"]
    assert (
        maglev["consistent_hashing_lb_config"]
        == (cluster["common_lb_config"]["consistent_hashing_lb_config"])
    )
    assert found["outlier_detection"] == cluster["outlier_detection"]
    [check] = cluster["health_checks"]
    assert found["health_checks/0/no_traffic_interval"] == check["no_traffic_interval"]


@BOTH
def test_health_and_limits_are_those_of_deploy_fleet(values):
    spec = only("BackendTrafficPolicy", values)["spec"]
    active, cluster = spec["healthCheck"]["active"], own()["cluster"]
    [check] = cluster["health_checks"]

    assert (active["http"]["path"], active["http"]["hostname"]) == (
        *(check["http_health_check"]["path"], check["http_health_check"]["host"]),
    )
    for ours, theirs in (
        *(("interval", "interval"), ("timeout", "timeout")),
        *(("healthyThreshold", "healthy_threshold"), ("unhealthyThreshold", "unhealthy_threshold")),
    ):
        assert active[ours] == check[theirs]
    [limits] = cluster["circuit_breakers"]["thresholds"]
    assert set(spec["circuitBreaker"].values()) == set(limits.values())
    assert spec["timeout"]["tcp"]["connectTimeout"] == cluster["connect_timeout"]
    assert own()["listener"]["per_connection_buffer_limit_bytes"] == 8 * 2**20
    spec = only("ClientTrafficPolicy", values)["spec"]
    assert spec["connection"] == {"bufferLimit": "8Mi"}
    assert spec["http2"] == {
        "initialStreamWindowSize": "8Mi",
        "initialConnectionWindowSize": "32Mi",
    }
    [manager] = own()["listener"]["filter_chains"][0]["filters"]
    assert manager["typed_config"]["http2_protocol_options"] == {
        "initial_stream_window_size": 8 * 2**20,
        "initial_connection_window_size": 32 * 2**20,
    }


def test_fleet_panics_only_without_the_patch():
    """Envoy asks a pod without calls for its health once a minute, unless the patch shortens that.

    With a threshold of 0 no pod would get calls, and a new fleet would answer 503 for that minute.
    """
    own_threshold = own()["cluster"]["common_lb_config"]["healthy_panic_threshold"]["value"]
    patched = only("BackendTrafficPolicy", PATCHED)["spec"]["healthCheck"]
    plain = only("BackendTrafficPolicy", FLEET)["spec"]["healthCheck"]

    assert patched["panicThreshold"] == own_threshold == 0
    assert plain["panicThreshold"] == 1


def test_unpatched_fleet_has_headers_of_deploy_fleet():
    consistent = only("BackendTrafficPolicy", FLEET)["spec"]["loadBalancer"]["consistentHash"]
    hashes = patches(PATCHED, "serving/")["hash_policy"]

    assert [each["name"].lower() for each in consistent["headers"]] == [
        *(
            each["header"]["header_name"]
            for each in hashes
            if ":" not in each["header"]["header_name"]
        )
    ]


# -- replicas by what memory cannot hold -----------------------------------------------------------


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_the_behaviour_that_is_given_is_taken(scaler):
    given = {"scaleDown": {"selectPolicy": "Disabled"}}
    values = values_of("fleet" if scaler == "hpa" else "fleet-patch")
    values["autoscaling"][scaler]["behavior"] = given
    spec = only({"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[scaler], values)["spec"]

    found = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert found == given


@pytest.mark.parametrize("metric", ["evictions", "no_room"])
def test_one_metric_of_memory_scales_alone(metric):
    values = values_of("fleet")
    hpa = values["autoscaling"]["hpa"]
    asked = {"evictions": 0, "no_room": 0} | {metric: 0.5}
    hpa.update(requestsInFlight=0, cpuPercent=0, metrics=[])
    hpa.update(evictionsPerSecond=asked["evictions"], noRoomPerSecond=asked["no_room"])

    metrics = only("HorizontalPodAutoscaler", values)["spec"]["metrics"]

    names = [each["pods"]["metric"]["name"] for each in metrics]
    assert names == [f"triton_adapter_endpoint_{metric}_per_second"]


def rules_of_prometheus_adapter() -> dict[str, dict[str, Any]]:
    path = ROOT / "deploy" / "monitoring" / "prometheus-adapter.yaml"
    custom = yaml.safe_load(path.read_text())["rules"]["custom"]
    return {rule["name"]["as"]: rule for rule in custom}


def test_each_autoscaler_metric_has_an_adapter_rule():
    metrics = only("HorizontalPodAutoscaler", FLEET)["spec"]["metrics"]

    assert {each["pods"]["metric"]["name"] for each in metrics} == {*rules_of_prometheus_adapter()}
    known = (ROOT / "docs" / "metrics.md").read_text()
    for name in rules_of_prometheus_adapter():
        assert f"| `{name.replace('_per_second', '_total')}` |" in known


# one eviction for room in ten seconds of each pod, one call in twenty that found no room
EVICTIONS, NO_ROOM = "triton_adapter_endpoint_evictions", "triton_adapter_endpoint_no_room"
POD = "demo-triton-adapter-5d8f-abcde"


def series(pod: str, namespace: str = "serving") -> dict[str, str]:
    labels = f'namespace="{namespace}",pod="{pod}"'
    return {
        f'{EVICTIONS}_total{{from="memory",reason="room",{labels}}}': "0+6x20",
        f'{EVICTIONS}_total{{from="memory",reason="idle",{labels}}}': "0+9x20",
        f'{EVICTIONS}_total{{from="disk",reason="limit",{labels}}}': "0+9x20",
        f"{NO_ROOM}_total{{{labels}}}": "0+3x20",
    }


@needs_promtool
def test_rules_count_evictions_and_calls_by_pod(tmp_path):
    found = {**series("a"), **series("b"), **series("a", "other")}
    expected = {}
    for name, value in ((EVICTIONS, 0.1), (NO_ROOM, 0.05)):
        rule = rules_of_prometheus_adapter()[f"{name}_per_second"]
        samples = [{"labels": f'{{pod="{pod}"}}', "value": value} for pod in "ab"]
        expected[query_of(rule, f"{name}_total")] = samples

    check_queries(tmp_path, found, expected)


@needs_promtool
def test_keda_asks_for_sums_over_the_releases_pods(tmp_path):
    triggers = only("ScaledObject", PATCHED)["spec"]["triggers"]
    [_, evictions, no_room] = [each["metadata"]["query"] for each in triggers]
    other_pod = POD.replace("abcde", "fghij")
    found = {**series(POD), **series(other_pod), **series("other"), **series(POD, "o")}
    expected = {
        evictions: [{"labels": "{}", "value": 0.2}],
        no_room: [{"labels": "{}", "value": 0.1}],
    }

    check_queries(tmp_path, found, expected)
