"""What the chart makes of each file in ci/ is what Kubernetes and its add-ons take."""

import json
import os
import tomllib
from functools import cache
from pathlib import Path

import helm_python as helm
import pytest
import yaml

from adapter.triton.server.launch import allocator_variables
from tests.cases import rows
from tests.chart.chart import (
    CASES,
    CHART,
    NEWEST,
    ROOT,
    case,
    containers,
    objects,
    only,
    pod_spec,
    runtime_spec,
    values_of,
)

VERSIONS = ["1.29", NEWEST]
NEEDS = {"image": "1.35", "pod-spec": "1.31"}  # what older ones have no fields for
CRDS = {path.stem: path for path in (Path(__file__).parent / "crds").glob("*.json")}
CRDS["ClusterServingRuntime"] = CRDS["ServingRuntime"]
SAME_FILE = "the same as files/"


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once():
    """The package reads its schemas, megabytes of them, for each object."""
    from kubernetes_validate import utils  # here, as jsonschema costs each process of tests seconds

    read = utils.schema_contents
    utils.schema_contents = cache(read)
    yield
    utils.schema_contents = read


def refuse(made: dict, version: str) -> None:
    import jsonschema
    import kubernetes_validate

    if made["kind"] in CRDS:
        jsonschema.validate(made, json.loads(CRDS[made["kind"]].read_text()))
    elif not made["apiVersion"].startswith("gateway."):  # those are in test_fleet.py
        kubernetes_validate.validate(made, version, strict=True)


@rows("path", CASES)
def test_helm_lints_it_without_a_warning(path):
    values = values_of(case(path))

    report = helm.lint(CHART, values, strict=True, kube_version=f"v{NEWEST}.0")

    # 1 is information: that there is no icon
    assert (report["errors"], [m for m in report["messages"] if m["severity"] > 1]) == ([], [])


@pytest.mark.parametrize("version", VERSIONS)
@rows("path", CASES)
def test_every_object_is_what_this_kubernetes_takes(path, version):
    version = max(version, NEEDS.get(case(path), version))
    for made in objects(values_of(case(path)), version):
        refuse(made, version)


@pytest.mark.parametrize("version", ["1.27", "1.28"])
def test_plain_containers_replace_native_sidecars(version):
    for made in objects(values_of("two-containers"), version):
        refuse(made, version)


def same_but_for_files(made: dict) -> dict:
    """Rules and dashboards change in their own files, which have tests of their own."""
    if made["kind"] == "PrometheusRule":
        made["spec"] = f"{SAME_FILE}alerts.yaml, but for what test_alerts.py has"
    if made["metadata"]["name"].endswith("-dashboard"):
        [name] = made["data"]
        made["data"] = {name: f"{SAME_FILE}dashboard.json, but for what test_dashboard.py has"}
    return made


@rows("path", CASES)
def test_it_renders_what_was_looked_at(path):
    """After a change that is meant: WRITE_GOLDEN=1 pytest tests/chart, and read the diff."""
    golden = Path(__file__).parent / "golden" / f"{case(path)}.yaml"
    found = [same_but_for_files(made) for made in objects(values_of(case(path)))]
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(yaml.safe_dump_all(found, sort_keys=False, width=100))

    assert found == list(yaml.safe_load_all(golden.read_text()))


def test_the_version_is_that_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]


@pytest.mark.parametrize(
    "name",
    [
        *("default", "pvc", "ephemeral", "two-containers", "single", "triton-elsewhere", "image"),
        "endpoint-keys",
    ],
)
def test_pods_meet_the_restricted_standard(name):
    """Those of the examples that fetch models, too."""
    values = values_of(name)
    for spec in (pod_spec(values), only("Pod", values)["spec"]):
        assert spec["automountServiceAccountToken"] is False
        for container in containers(spec).values():
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["runAsNonRoot"] is True
            assert security["runAsUser"] > 0
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for volume in spec.get("volumes", []):
            assert set(volume) <= {
                *("name", "emptyDir", "persistentVolumeClaim", "ephemeral", "image"),
                *("secret", "projected"),
            }


def environment(spec, container):
    return {entry["name"]: entry["value"] for entry in containers(spec)[container]["env"]}


def test_triton_gets_the_adapters_allocator_variables():
    runtime = runtime_spec(values_of("serving-runtime"))

    for spec in (pod_spec({}), runtime):
        assert allocator_variables({}).items() <= environment(spec, "triton").items()


@pytest.mark.parametrize("name", ["HOME", "MALLOC_ARENA_MAX", "LD_PRELOAD"])
def test_variable_of_the_values_beats_the_charts(name):
    """An allocator is chosen by one variable, so the chart's own variables of glibc go."""
    values = {"triton": {"extraEnv": [{"name": name, "value": "/srv"}]}}
    own = allocator_variables({}) if name == "HOME" else {"HOME": "/tmp"}
    spec = pod_spec(values)

    assert environment(spec, "triton") == {**own, name: "/srv"}
    assert len(containers(spec)["triton"]["env"]) == len(own) + 1


def test_tmp_of_triton_has_size_of_values():
    volumes = pod_spec({"triton": {"tmpSize": "4Gi"}})["volumes"]

    assert {"name": "triton-tmp", "emptyDir": {"sizeLimit": "4Gi"}} in volumes


def test_a_changed_setting_replaces_the_pods():
    def checksum(values):
        template = only("Deployment", values)["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/settings"]

    assert checksum({}) == checksum({"service": {"http": 80}})
    assert checksum({}) != checksum({"settings": {"log_level": "debug"}})


RECREATE = {"type": "Recreate"}
OLD_GOES_FIRST = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
NEW_GOES_FIRST = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
NO_GPU = {"triton": {"gpu": {"count": 0}}, "settings": {"memory_limit": "8GiB"}}


def scaled_from(replicas: int) -> dict:
    """Return the values of pods that a HorizontalPodAutoscaler scales up from this number."""
    hpa = {"enabled": True, "cpuPercent": 70}
    models = {"type": "existingClaim", "existingClaim": "models", "load": ["*"]}
    return {
        "models": models,
        "autoscaling": {"minReplicas": replicas, "maxReplicas": 4, "hpa": hpa},
    }


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, RECREATE),
        ({"replicaCount": 2}, OLD_GOES_FIRST),
        ({**NO_GPU, "models": {"type": "pvc"}}, RECREATE),
        ({**NO_GPU, "models": {"type": "pvc", "pvc": {"accessModes": ["ReadWriteMany"]}}}, None),
        (NO_GPU, None),
        ({"mode": "single"}, RECREATE),
        ({"triton": {"enabled": False, "address": "t"}}, RECREATE),
        ({"strategy": {"type": "Recreate"}}, RECREATE),
        (values_of("keda"), NEW_GOES_FIRST),
        (scaled_from(1), NEW_GOES_FIRST),
        (scaled_from(2), OLD_GOES_FIRST),
    ],
)
def test_rollout_waits_for_nothing_of_old_pod(values, wanted):
    """That holds a GPU, or a claim."""
    assert only("Deployment", values)["spec"].get("strategy") == wanted


def test_rollout_time_covers_the_startup_probe():
    def deadline(values):
        return only("Deployment", values)["spec"]["progressDeadlineSeconds"]

    probes = [container["startupProbe"] for container in containers(pod_spec({})).values()]
    allowed = sum(probe["periodSeconds"] * probe["failureThreshold"] for probe in probes)

    assert deadline({}) >= allowed + 500
    assert deadline({"settings": {"load_timeout_seconds": 1350}}) == deadline({}) + 1000
    assert deadline({"triton": {"startSeconds": 1300}}) == deadline({}) + 1000
    assert deadline({"progressDeadlineSeconds": 77}) == 77


def test_control_token_is_mounted_only_where_asked_for():
    values = {"adapter": {"controlToken": {"existingSecret": "{{ .Release.Name }}-s", "key": "k"}}}
    for spec, asked in ((pod_spec(values), "adapter"), (only("Pod", values)["spec"], "call")):
        mounted = {
            name
            for name, container in containers(spec).items()
            for mount in container.get("volumeMounts", [])
            if mount["name"] == "control-token"
        }
        [volume] = [each for each in spec["volumes"] if each["name"] == "control-token"]

        assert mounted == {asked}
        secret = {"secretName": "demo-s", "items": [{"key": "k", "path": "token"}]}
        assert volume["secret"] == secret


def test_no_helm_test_where_loads_bring_no_files():
    assert [made["kind"] for made in objects({}) if made["kind"] == "Pod"] == ["Pod"]
    assert [
        made for made in objects({"settings": {"inline_files": "off"}}) if made["kind"] == "Pod"
    ] == []


def test_probes_and_scrapes_use_admin_without_metrics():
    values = {"settings": {"metrics": "off"}, "checkApis": False, "service": {"admin": 9090}}
    adapter = containers(pod_spec(values))["adapter"]
    by_pod = {**values, "metrics": {"podMonitor": {"enabled": True}}}
    by_service = {**values, "metrics": {"serviceMonitor": {"enabled": True}}}

    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert adapter[probe]["httpGet"]["port"] == "admin"
    [pod] = only("PodMonitor", by_pod)["spec"]["podMetricsEndpoints"]
    [service] = only("ServiceMonitor", by_service)["spec"]["endpoints"]
    assert (pod["port"], service["port"]) == ("admin", "admin")


def test_pods_spec_turns_off_a_switch_of_chart():
    off = {"name": "triton", "securityContext": {"readOnlyRootFilesystem": False}}
    security = containers(pod_spec({"podSpec": {"initContainers": [off]}}))["triton"][
        "securityContext"
    ]

    assert (security["readOnlyRootFilesystem"], security["runAsUser"]) == (False, 1000)


def test_pod_labels_beat_common_ones_but_no_selector():
    same = {"team": "a", "app.kubernetes.io/name": "other"}
    values = {"commonLabels": same, "podLabels": {**same, "team": "b"}}
    deployment = only("Deployment", values)
    labels = deployment["spec"]["template"]["metadata"]["labels"]

    assert (deployment["metadata"]["labels"]["team"], labels["team"]) == ("a", "b")
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_names_stay_within_63_characters():
    long = {"fullnameOverride": "x" * 80, **values_of("monitoring")}

    assert {len(made["metadata"]["name"]) for made in objects(long)} == {63}
