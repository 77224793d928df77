"""Wrong values are refused with a text that names the key, and every key is explained."""

import json
import subprocess
import sys

import helm_python as helm
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.chart.chart import APIS, CASES, CHART, ROOT, case, only, render, values_of

HPA = {"autoscaling": {"hpa": {"enabled": True}}}
KEDA = {"autoscaling": {"keda": {"enabled": True, "serverAddress": "http://p:9090"}}}
RUNTIME = {"mode": "servingRuntime"}

# what the schema knows: where, and what is said of it
BY_SCHEMA = [
    ({"replicas": 2}, "''", "'replicas' not allowed"),
    ({"adapter": {"resource": {}}}, "'/adapter'", "'resource' not allowed"),
    ({"settings": {"memory_limits": "8GiB"}}, "'/settings'", "'memory_limits' not allowed"),
    ({"settings": {"triton": "embedded"}}, "'/settings'", "'triton' not allowed"),
    ({"settings": {"repository": "/models/r"}}, "'/settings'", "'repository' not allowed"),
    ({"settings": {"triton_http": "triton:8000"}}, "'/settings'", "'triton_http' not allowed"),
    ({"settings": {"log_level": "loud"}}, "'/settings/log_level'", "value must be one of"),
    ({"settings": {"load_timeout_seconds": "long"}}, "'/settings/load_timeout_seconds'", "number"),
    ({"settings": {"http": 8080}}, "'/settings/http'", "want string"),
    ({"mode": "sidecar"}, "'/mode'", "value must be one of"),
    ({"replicaCount": "two"}, "'/replicaCount'", "want integer"),
    ({"replicaCount": -1}, "'/replicaCount'", "minimum"),
    ({"image": {"digest": "sha256:12"}}, "'/image/digest'", "does not match pattern"),
    ({"image": {"pullPolicy": "Sometimes"}}, "'/image/pullPolicy'", "value must be one of"),
    ({"models": {"type": "nfs"}}, "'/models/type'", "value must be one of"),
    ({"models": {"mountPath": "models"}}, "'/models/mountPath'", "does not match pattern"),
    ({"models": {"hostPath": "models"}}, "'/models/hostPath'", "does not match pattern"),
    ({"service": {"http": 70000}}, "'/service/http'", "maximum"),
    ({"service": {"clusterIP": "10.0.0.1"}}, "'/service/clusterIP'", "value must be one of"),
    ({"triton": {"nativeSidecar": "yes"}}, "'/triton/nativeSidecar'", "want boolean"),
    ({"triton": {"gpu": {"count": 0.5}}}, "'/triton/gpu/count'", "want integer"),
    ({"triton": {"command": []}}, "'/triton/command'", "minItems"),
    (
        {"terminationGracePeriodSeconds": "60s"},
        "'/terminationGracePeriodSeconds'",
        "want null or integer",
    ),
    ({"adapter": {"extraArgs": "--log-level=debug"}}, "'/adapter/extraArgs'", "want array"),
]

# what _validate.tpl knows: how its text begins
BY_RULE = [
    ({"terminationGracePeriodSeconds": 40}, "terminationGracePeriodSeconds: 40 is too short"),
    (
        {"terminationGracePeriodSeconds": 48, "settings": {"drain_timeout_seconds": 18.1}},
        "terminationGracePeriodSeconds: 48 is too short",
    ),
    ({"adapter": {"preStop": {"exec": {"command": ["true"]}}}}, "adapter.preStopSeconds: "),
    (
        {"settings": {"drain_min_seconds": 20}},
        "settings.drain_min_seconds: is more than settings.drain_timeout_seconds",
    ),
    ({"settings": {"admin": "off"}}, "settings.admin: must be HOST:PORT"),
    ({"settings": {"admin": "127.0.0.1:8081"}}, "settings.admin: 127.0.0.1:8081 cannot be"),
    ({"settings": {"http": "localhost:8080"}}, "settings.http: localhost:8080 cannot be"),
    ({"settings": {"grpc": "[::1]:8085"}}, "settings.grpc: [::1]:8085 cannot be"),
    ({"service": {"grpcData": 8086}}, "service.grpcData: the listener settings.grpc_data is off"),
    (
        {"networkPolicy": {"enabled": True, "inference": [{"podSelector": {}}]}},
        "networkPolicy.inference: is about the port of settings.grpc_data",
    ),
    ({"settings": {"http": "unix:/tmp/s"}}, "service.http: the listener settings.http is off"),
    ({"service": {"http": 0, "grpc": 0}}, "service: at least one of http"),
    ({"service": {"clusterIP": "None", "type": "NodePort"}}, "service.clusterIP: None needs"),
    ({"metrics": {"serviceMonitor": {"enabled": True}}}, "metrics.serviceMonitor.enabled: needs"),
    ({"models": {"type": "existingClaim"}}, "models.existingClaim: "),
    ({"models": {"type": "hostPath"}}, "models.hostPath: "),
    ({"models": {"mountPath": "/models"}}, "models.mountPath: /models holds or is in"),
    ({"autoscaling": {**HPA["autoscaling"], **KEDA["autoscaling"]}}, "autoscaling: hpa.enabled"),
    (
        {"autoscaling": {"hpa": {"enabled": True, "requestsInFlight": 0}}},
        "autoscaling.hpa: needs requestsInFlight",
    ),
    ({"autoscaling": {"keda": {"enabled": True}}}, "autoscaling.keda.serverAddress: "),
    ({"autoscaling": {"minReplicas": 5}}, "autoscaling.minReplicas: is more than"),
    (
        {"autoscaling": {**HPA["autoscaling"], "minReplicas": 0}},
        "autoscaling.minReplicas: 0 needs autoscaling.keda",
    ),
    ({"pdb": {"enabled": True, "minAvailable": 1, "maxUnavailable": 1}}, "pdb: minAvailable and"),
    ({**RUNTIME, "pdb": {"enabled": True}}, "pdb.enabled: needs mode=pod"),
    ({**RUNTIME, **HPA}, "autoscaling.hpa.enabled: needs mode=pod"),
    ({**RUNTIME, "networkPolicy": {"enabled": True}}, "networkPolicy.enabled: needs mode=pod"),
    ({**RUNTIME, "extraContainers": [{"name": "x"}]}, "extraContainers: needs mode=pod"),
    ({**RUNTIME, "settings": {"grpc": False}}, "settings.grpc: cannot be off"),
    ({**RUNTIME, "settings": {"http": "[::]:8080"}}, "settings.http: port 8080 is taken by"),
    ({**RUNTIME, "settings": {"grpc_data": "127.0.0.1:8086"}}, "settings.grpc_data: port 8086 is"),
    ({**RUNTIME, "settings": {"grpc_data": "127.0.0.1:8085"}}, "settings.grpc_data: port 8085 is"),
    ({**RUNTIME, "settings": {"admin": "127.0.0.1:8089"}}, "settings.admin: port 8089 is taken by"),
    ({**RUNTIME, "settings": {"admin": "unix:/a"}}, "settings.admin: must be HOST:PORT"),
    (
        {**RUNTIME, "triton": {"resources": {"requests": {"memory": None}}}},
        "triton.resources.requests.memory: ",
    ),
]

NEEDS_API = [
    ({"metrics": {"podMonitor": {"enabled": True}}}, "metrics.podMonitor.enabled", APIS[0]),
    (
        {"metrics": {"serviceMonitor": {"enabled": True}}, "service": {"admin": 8081}},
        "metrics.serviceMonitor.enabled",
        APIS[0],
    ),
    ({"metrics": {"prometheusRule": {"enabled": True}}}, "metrics.prometheusRule.enabled", APIS[0]),
    (KEDA, "autoscaling.keda.enabled", APIS[1]),
    (RUNTIME, "mode=servingRuntime", APIS[2]),
]


@pytest.mark.parametrize(("values", "place", "says"), BY_SCHEMA, ids=lambda v: str(v)[:60])
def test_the_schema_refuses_it_and_says_where(values, place, says):
    with pytest.raises(helm.HelmValuesError) as refused:
        render(values)

    assert f"at {place}: " in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(("values", "says"), BY_RULE, ids=lambda v: str(v)[:60])
def test_a_rule_of_two_keys_refuses_it_and_names_one(values, says):
    with pytest.raises(helm.HelmRenderError) as refused:
        render(values, api_versions=APIS)

    assert f": {says}" in str(refused.value)


@pytest.mark.parametrize(("values", "key", "api"), NEEDS_API, ids=lambda v: str(v)[:60])
def test_an_object_of_an_add_on_needs_that_add_on(values, key, api):
    with pytest.raises(helm.HelmRenderError, match=f"{key}: the cluster does not know {api}"):
        render(values)

    assert render(values, api_versions=[api])
    assert render({**values, "checkApis": False})


@pytest.mark.parametrize("version", ["1.27", "1.28"])
def test_native_sidecars_are_refused_where_kubernetes_has_none(version):
    with pytest.raises(helm.HelmRenderError, match=r"triton.nativeSidecar: needs Kubernetes 1.29"):
        render({}, kube_version=version)


def test_readme_and_schema_are_those_of_the_values():
    """After a change: python scripts/gen_chart_readme.py."""
    check = subprocess.run(
        [sys.executable, "scripts/gen_chart_readme.py", "--check"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


def test_the_schema_is_one():
    import jsonschema

    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", [CHART / "values.yaml", CHART / "Chart.yaml", *CASES], ids=str)
def test_yamllint_has_nothing_to_say(path):
    rules = "{extends: default, rules: {line-length: disable, document-start: disable, braces: {max-spaces-inside: 0}, truthy: disable}}"  # noqa: E501 - one value
    problems = linter.run(path.read_text(), YamlLintConfig(rules))

    assert [str(problem) for problem in problems] == []


def used(values, given):
    """The paths of leaves in values, as README.md has them."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(given.get(key), dict) and given[key]:
            yield from (f"{key}.{below}" for below in used(value, given[key]))
        else:
            yield key


def test_every_switch_is_on_in_some_case():
    """What can be enabled or replaced in values.yaml is so in at least one file of ci/."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    tried = {path for file in CASES for path in used(values_of(case(file)), defaults)}
    switches = {path for path in used(defaults, defaults) if path.endswith(".enabled")}

    assert switches <= tried


def test_numbers_that_yaml_reads_as_floats_stay_numbers():
    data = only("ConfigMap", {"settings": {"memory_limit": 68719476736, "size_factor": 1.5}})[
        "data"
    ]

    assert data["ADAPTER_MEMORY_LIMIT"] == "68719476736"
    assert data["ADAPTER_SIZE_FACTOR"] == "1.5"
