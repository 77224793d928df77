"""What the chart makes of each file in ci/ is what Kubernetes and its add-ons take."""

import json
import os
import shlex
import tomllib
from functools import cache
from pathlib import Path

import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

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
    values_of,
)

VERSIONS = ["1.29", NEWEST]
CRDS = {path.stem: path for path in (Path(__file__).parent / "crds").glob("*.json")}
CRDS["ClusterServingRuntime"] = CRDS["ServingRuntime"]
SAME_FILE = "the same as files/"


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once():
    """The package reads its schemas, megabytes of them, for each object."""
    read = utils.schema_contents
    utils.schema_contents = cache(read)
    yield
    utils.schema_contents = read


def refuse(made: dict, version: str) -> None:
    if made["kind"] in CRDS:
        jsonschema.validate(made, json.loads(CRDS[made["kind"]].read_text()))
    else:
        kubernetes_validate.validate(made, version, strict=True)


@pytest.mark.parametrize("path", CASES, ids=case)
def test_helm_lints_it_without_a_warning(path):
    values = values_of(case(path))

    report = helm.lint(CHART, values, strict=True, kube_version=f"v{NEWEST}.0")

    # 1 is information: that there is no icon
    assert (report["errors"], [m for m in report["messages"] if m["severity"] > 1]) == ([], [])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", CASES, ids=case)
def test_every_object_is_what_this_kubernetes_takes(path, version):
    for made in objects(values_of(case(path)), version):
        refuse(made, version)


@pytest.mark.parametrize("version", ["1.27", "1.28"])
def test_two_plain_containers_are_for_clusters_without_native_sidecars(version):
    for made in objects(values_of("two-containers"), version):
        refuse(made, version)


@pytest.mark.parametrize("name", ["serving-runtime", "serving-runtime-gpu"])
def test_the_containers_of_a_runtime_are_what_a_pod_takes(name):
    [runtime] = objects(values_of(name))

    pod = {"containers": runtime["spec"]["containers"]}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "m"}, "spec": pod},
        NEWEST,
        strict=True,
    )


def test_the_schemas_find_a_misspelt_field():
    broken = only("ScaledObject", values_of("keda"))
    broken["spec"]["maxReplicas"] = 3

    with pytest.raises(jsonschema.ValidationError, match="maxReplicas"):
        refuse(broken, NEWEST)


def same_but_for_files(made: dict) -> dict:
    """Rules and dashboards change in their own files, which have tests of their own."""
    if made["kind"] == "PrometheusRule":
        assert made["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
        made["spec"] = f"{SAME_FILE}alerts.yaml"
    if made["metadata"]["name"].endswith("-dashboard"):
        text = (CHART / "files" / "dashboard.json").read_text()
        [(name, found)] = made["data"].items()
        assert json.loads(found) == json.loads(text)
        made["data"] = {name: f"{SAME_FILE}dashboard.json"}
    return made


@pytest.mark.parametrize("path", CASES, ids=case)
def test_it_renders_what_was_looked_at(path):
    """After a change that is meant: WRITE_GOLDEN=1 pytest tests/chart, and read the diff."""
    golden = Path(__file__).parent / "golden" / f"{case(path)}.yaml"
    found = [same_but_for_files(made) for made in objects(values_of(case(path)))]
    if "WRITE_GOLDEN" in os.environ:
        golden.write_text(yaml.safe_dump_all(found, sort_keys=False, width=100))

    assert found == list(yaml.safe_load_all(golden.read_text()))


def test_there_is_no_golden_render_without_its_case():
    known = {case(path) for path in CASES}
    assert {path.stem for path in (Path(__file__).parent / "golden").glob("*")} == known


def test_the_example_of_modelmesh_is_what_the_chart_makes():
    example = yaml.safe_load((ROOT / "examples" / "modelmesh" / "runtime.yaml").read_text())
    [made] = objects(values_of("serving-runtime"))
    for container in [*example["spec"]["containers"], *made["spec"]["containers"]]:
        container.pop("imagePullPolicy", None)
    for runtime in (example, made):
        triton = containers(runtime["spec"])["triton"]
        triton["args"] = " ".join(triton["args"]).split()

    assert made["spec"] == example["spec"]
    assert made["kind"] == example["kind"]
    assert made["metadata"]["annotations"] == example["metadata"]["annotations"]


def test_an_argument_of_tritonserver_comes_through_the_shell_of_a_runtime_as_it_is():
    values = values_of("serving-runtime-gpu")
    [runtime] = objects(values)

    words = shlex.split(containers(runtime["spec"])["triton"]["args"][1])
    assert words[-1:] == values["triton"]["extraArgs"]


def test_the_version_is_that_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]


def test_triton_is_started_before_the_adapter_and_ended_after_it():
    """Of native sidecars Kubernetes starts each before, and ends it after the main containers."""
    [triton] = pod_spec({})["initContainers"]

    assert (triton["name"], triton["restartPolicy"]) == ("triton", "Always")
    assert "startupProbe" in triton
    assert [c["name"] for c in pod_spec({})["containers"]] == ["adapter"]


def test_only_the_adapter_has_ports_unless_tritons_metrics_are_asked_for():
    quiet, open_ = (containers(pod_spec(v))["triton"] for v in ({}, values_of("monitoring")))

    assert "ports" not in quiet
    assert "--metrics-address=127.0.0.1" in quiet["args"]
    assert [port["containerPort"] for port in open_["ports"]] == [8002]
    for arguments in (quiet["args"], open_["args"]):
        assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1"} <= set(arguments)


def test_both_containers_see_repository_and_models_at_one_path():
    for name in ("default", "pvc", "host-path", "two-containers"):
        both = containers(pod_spec(values_of(name)))
        triton, adapter = (
            {(m["name"], m["mountPath"]) for m in both[who]["volumeMounts"]}
            for who in ("triton", "adapter")
        )
        shared = {m for m in triton if m[0] in {"repository", "models"}}
        assert len(shared) == 2
        assert shared <= adapter
        assert f"--model-repository={dict(shared)['repository']}" in both["triton"]["args"]


@pytest.mark.parametrize("name", ["default", "pvc", "two-containers"])
def test_the_pods_keep_the_standard_restricted_of_pod_security(name):
    values = values_of(name) | {"extraInitContainers": []}
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
            assert set(volume) <= {"name", "emptyDir", "persistentVolumeClaim"}


def test_the_adapter_is_user_65532_on_a_read_only_root():
    security = containers(pod_spec({}))["adapter"]["securityContext"]

    assert (security["runAsUser"], security["readOnlyRootFilesystem"]) == (65532, True)
    assert containers(pod_spec({}))["triton"]["securityContext"]["runAsUser"] == 1000


def test_a_changed_setting_replaces_the_pods():
    def checksum(values):
        template = only("Deployment", values)["spec"]["template"]
        return template["metadata"]["annotations"]["checksum/settings"]

    assert checksum({}) == checksum({"service": {"http": 80}})
    assert checksum({}) != checksum({"settings": {"log_level": "debug"}})


def test_image_names_put_registry_tag_and_digest_together():
    image = containers(pod_spec(values_of("names")))["adapter"]["image"]
    triton = containers(pod_spec(values_of("names")))["triton"]["image"]

    assert image.startswith("registry.example.com:5000/triton-adapter@sha256:0123")
    assert triton == "registry.example.com:5000/nvidia/tritonserver:25.08-py3"


def test_pods_have_no_number_of_their_own_where_something_scales_them():
    assert "replicas" not in only("Deployment", values_of("single-model"))["spec"]
    assert "replicas" not in only("Deployment", values_of("keda"))["spec"]
    assert only("Deployment", {})["spec"]["replicas"] == 1


def test_the_network_policy_never_opens_tritons_http_and_grpc_ports():
    rules = only("NetworkPolicy", values_of("network-policy"))["spec"]["ingress"]
    peers = {port["port"]: rule["from"] for rule in rules for port in rule["ports"]}

    assert set(peers) == {8080, 8085, 8086, 8081, 8002}
    assert peers[8080][0] == {"podSelector": {"matchLabels": {"app": "platform"}}}
    assert peers[8080][1]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    assert peers[8086] == [{"namespaceSelector": {}}]
    assert peers[8081] == peers[8002]


def test_labels_of_a_pod_beat_common_ones_and_never_those_it_is_found_by():
    same = {"team": "a", "app.kubernetes.io/name": "other"}
    values = {"commonLabels": same, "podLabels": {**same, "team": "b"}}
    deployment = only("Deployment", values)
    labels = deployment["spec"]["template"]["metadata"]["labels"]

    assert (deployment["metadata"]["labels"]["team"], labels["team"]) == ("a", "b")
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_names_stay_within_63_characters():
    long = {"fullnameOverride": "x" * 80, **values_of("monitoring")}

    assert {len(made["metadata"]["name"]) for made in objects(long)} == {63}
