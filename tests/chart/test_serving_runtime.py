"""What the chart makes for ModelMesh's controller is a runtime that it takes."""

import shlex

import pytest
import yaml

from tests.chart.chart import (
    NEWEST,
    ROOT,
    containers,
    objects,
    only,
    runtime_spec,
    values_of,
)

RUNTIMES = ["serving-runtime", "serving-runtime-gpu", "serving-runtime-monitored"]


@pytest.mark.parametrize("name", RUNTIMES)
def test_runtime_avoids_the_controllers_own_names(name):
    """Its rules: controllers/servingruntime_validator.go of kserve/modelmesh-serving 0.12."""
    spec = runtime_spec(values_of(name))

    assert {v["name"] for v in spec["volumes"]}.isdisjoint(
        {"storage-config", "etcd-config", "tc-config", "domain-socket", "models-dir"}
    )
    for container in spec["containers"]:
        assert container["name"] not in {"mm", "puller", "rest-proxy"}
        assert {"readinessProbe", "lifecycle"}.isdisjoint(container)
        for port in container.get("ports", []):
            assert port["name"] not in {"grpc", "http", "prometheus"}
            assert port["containerPort"] not in {8080, 8085, 8089, 8090, *range(11881, 11900)}


def test_monitor_of_one_namespace_follows_the_service_name():
    """By the labels of config/internal/base/deployment.yaml.tmpl of the controller."""
    values = values_of("serving-runtime-monitored")
    values["servingRuntime"] = {"clusterScoped": False, "serviceName": "mesh"}
    monitor = only("PodMonitor", values)["spec"]

    assert monitor["selector"]["matchLabels"]["name"] == "mesh-demo-triton-adapter"
    assert "namespaceSelector" not in monitor


@pytest.mark.parametrize("name", RUNTIMES)
def test_runtime_containers_match_a_pod(name):
    spec = runtime_spec(values_of(name))

    pod = {"containers": spec["containers"], "volumes": spec["volumes"]}
    import kubernetes_validate

    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "m"}, "spec": pod},
        NEWEST,
        strict=True,
    )


def test_modelmesh_example_matches_the_chart():
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


def test_tritonservers_argument_comes_through_the_runtimes_shell():
    values = values_of("serving-runtime-gpu")
    [runtime] = objects(values)

    words = shlex.split(containers(runtime["spec"])["triton"]["args"][1])
    assert words[-1:] == values["triton"]["extraArgs"]
