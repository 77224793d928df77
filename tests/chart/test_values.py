"""Wrong values are refused with a text that names the key, and every key is explained."""

import helm_python as helm
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.cases import rows
from tests.chart.chart import APIS, CASES, CHART, case, only, render, values_of

HPA = {"autoscaling": {"hpa": {"enabled": True}}}
KEDA = {"autoscaling": {"keda": {"enabled": True, "serverAddress": "http://p:9090"}}}
RUNTIME = {"mode": "servingRuntime"}
SINGLE = {"mode": "single"}
STORE = {"settings": {"model_store": "s3://models"}}
KEYS = values_of("endpoint-keys")
CLAIM = {"endpoint": {"cache": {"type": "existingClaim", "existingClaim": "fast"}}}
MONITORED = {"metrics": {"podMonitor": {"enabled": True}}}


def elsewhere(**triton):
    return {"triton": {"enabled": False, "address": "triton.serving.svc", **triton}}


# what the schema knows, one of each kind: where, and what is said of it
BY_SCHEMA = [
    ({"replicas": 2}, "''", "'replicas' not allowed"),
    ({"adapter": {"resource": {}}}, "'/adapter'", "'resource' not allowed"),
    ({"settings": {"triton_http": "triton:8000"}}, "'/settings'", "'triton_http' not allowed"),
    ({"settings": {"log_level": "loud"}}, "'/settings/log_level'", "value must be one of"),
    ({"settings": {"http": 8080}}, "'/settings/http'", "want string"),
    ({"settings": {"endpoints": {"a": {"url": "s3://a"}}}}, "'/settings/endpoints/a'", ""),
    ({"replicaCount": -1}, "'/replicaCount'", "minimum"),
    ({"image": {"digest": "sha256:12"}}, "'/image/digest'", "does not match pattern"),
    ({"adapter": {"extraArgs": "--log-level=debug"}}, "'/adapter/extraArgs'", "want array"),
    ({"endpoint": {"keys": [{"accessKey": "A B"}]}}, "'/endpoint/keys/0", ""),
]

# what _validate.tpl knows: how its text begins
BY_RULE = [
    (
        {"terminationGracePeriodSeconds": 48, "settings": {"drain_timeout_seconds": 18.1}},
        "terminationGracePeriodSeconds: 48 is too short",
    ),
    ({"adapter": {"preStop": {"exec": {"command": ["true"]}}}}, "adapter.preStopSeconds: "),
    (
        {"settings": {"drain_min_seconds": 20}},
        "settings.drain_min_seconds: must not exceed settings.drain_timeout_seconds",
    ),
    ({"settings": {"admin": "off", "metrics": "off"}}, "settings.admin: must be HOST:PORT"),
    ({"settings": {"listen_host": "127.0.0.1"}}, "settings.listen_host: 127.0.0.1 cannot be"),
    ({"settings": {"http": "localhost:8080"}}, "settings.http: localhost:8080 cannot be"),
    ({"service": {"grpcData": 8086}}, "service.grpcData: settings.grpc_data is off"),
    (
        {"networkPolicy": {"enabled": True, "inference": [{"podSelector": {}}]}},
        "networkPolicy.inference: needs settings.http_data",
    ),
    ({"settings": {"http": "unix:/tmp/s"}}, "service.http: settings.http is off"),
    ({"service": {"http": 0, "grpc": 0}}, "service: at least one of http"),
    ({"service": {"clusterIP": "None", "type": "NodePort"}}, "service.clusterIP: None needs"),
    ({"metrics": {"serviceMonitor": {"enabled": True}}}, "metrics.serviceMonitor.enabled: needs"),
    (
        {"metrics": {"prometheusRule": {"disabled": ["TritonDown"]}}},
        "metrics.prometheusRule.disabled: files/alerts.yaml has no alert TritonDown",
    ),
    (
        {"metrics": {"prometheusRule": {"severities": {"TritonDown": "page"}}}},
        "metrics.prometheusRule.severities: files/alerts.yaml has no alert TritonDown",
    ),
    (
        {"metrics": {"prometheusRule": {"thresholds": {"TritonAdapterDown": 1}}}},
        "metrics.prometheusRule.thresholds: files/alerts.yaml has no alert",
    ),
    (
        {**RUNTIME, "metrics": {"prometheusRule": {"enabled": True}}},
        "metrics.prometheusRule.enabled: with mode=servingRuntime nothing scrapes 127.0.0.1:8081",
    ),
    (
        {**RUNTIME, **MONITORED, "settings": {"metrics": "127.0.0.1:8082"}},
        "metrics.podMonitor.enabled: settings.metrics must be reachable",
    ),
    (
        {**RUNTIME, "fullnameOverride": "x" * 46},
        f"fullnameOverride: modelmesh-serving-{'x' * 46} exceeds 63 characters",
    ),
    (
        {"triton": {"gpu": {"count": 0}, "resources": {"limits": {"memory": None}}}},
        "settings.memory_limit: required without a GPU",
    ),
    (
        {"triton": {"gpu": {"count": 0}}, "settings": {"memory_limit": "8388609 KiB"}},
        "settings.memory_limit: 8388609 KiB exceeds triton.resources.limits.memory, 8Gi",
    ),
    (
        {"triton": {"gpu": {"count": 0}, "shmSize": "9Gi"}},
        "triton.shmSize: must not exceed triton.resources.limits.memory",
    ),
    (
        {"models": {"load": ["a"]}, "settings": {"load_at_start": ["b"]}},
        "models.load: settings.load_at_start is set too",
    ),
    ({**RUNTIME, "models": {"load": ["a"]}}, "models.load: needs mode=pod"),
    (
        {
            "service": {"admin": 8081},
            "metrics": {"podMonitor": {"enabled": True}, "serviceMonitor": {"enabled": True}},
        },
        "metrics.serviceMonitor.enabled: metrics.podMonitor.enabled scrapes",
    ),
    ({"fleet": {"enabled": True}}, "fleet.enabled: every pod must be able to fetch every model"),
    ({"fleet": {"patch": True}}, "fleet.patch: needs fleet.enabled"),
    (
        {**STORE, "fleet": {"enabled": True}, "service": {"http": 0, "grpc": 0, "metrics": 8082}},
        "fleet.enabled: the Gateway needs a port of the Service",
    ),
    (
        {
            "autoscaling": {"hpa": {"enabled": True, "noRoomPerSecond": 1}},
            "models": {"load": ["*"]},
        },
        "autoscaling.hpa: evictionsPerSecond and noRoomPerSecond need a store",
    ),
    (KEDA, "autoscaling: a new pod would have no model"),
    (
        {"autoscaling": {**KEDA["autoscaling"], "minReplicas": 0}, "models": {"load": ["*"]}},
        "autoscaling.minReplicas: with 0 nothing starts pods",
    ),
    ({"replicaCount": 2, "models": {"type": "pvc"}}, "models.pvc.accessModes: 2 pods may run on"),
    (
        {"adapter": {"extraEnv": [{"name": "ADAPTER_HTTP", "value": "off"}]}},
        "adapter.extraEnv: ADAPTER_HTTP would override",
    ),
    ({"service": {"externalTrafficPolicy": "Local"}}, "service.externalTrafficPolicy: needs"),
    ({"service": {"loadBalancerSourceRanges": ["::/0"]}}, "service.loadBalancerSourceRanges: "),
    ({"triton": {"enabled": False}}, "triton.address: triton.enabled=false needs Triton's host"),
    ({"triton": {"address": "triton"}}, "triton.address: needs triton.enabled=false"),
    ({**SINGLE, "triton": {"enabled": False}}, "triton.enabled: false needs mode=pod"),
    (elsewhere(extraArgs=["--log-verbose=1"]), "triton.extraArgs: needs a Triton in the pod"),
    (
        {**elsewhere(), "settings": {"staging": "copy"}},
        "settings.staging: copy needs a repository shared with Triton",
    ),
    ({**elsewhere(), "replicaCount": 2}, "replicaCount: a Triton takes one adapter"),
    (
        {**SINGLE, "settings": {"staging": "upload"}},
        "settings.staging: upload is for an external",
    ),
    (
        {**SINGLE, "triton": {"exposeMetrics": True, "metricsAddress": "ipv6:::"}},
        "triton.metricsAddress: mode=single allows 0.0.0.0 only",
    ),
    ({"models": {"type": "existingClaim"}}, "models.existingClaim: "),
    ({"models": {"type": "image"}}, "models.image.reference: models.type=image needs"),
    (
        {"triton": {"resourceClaims": [{"name": "gpu"}]}},
        "triton.gpu.count: must be 0 with triton.resourceClaims",
    ),
    (
        {"podSpec": {"terminationGracePeriodSeconds": 5}},
        "podSpec.terminationGracePeriodSeconds: the chart sets this",
    ),
    (
        {"podSpec": {"tolerations": []}, "tolerations": [{"operator": "Exists"}]},
        "podSpec.tolerations: this would replace",
    ),
    (
        {"podSpec": {"containers": [{"name": "shipper", "image": "a"}]}},
        "podSpec.containers: the chart has no shipper",
    ),
    (
        {
            "podSpec": {
                "initContainers": [
                    {"name": "triton", "securityContext": {"capabilities": {"drop": []}}}
                ]
            }
        },
        "podSpec.initContainers.triton.securityContext.capabilities.drop: this would replace",
    ),
    ({"models": {"type": "hostPath"}}, "models.hostPath: "),
    ({"models": {"mountPath": "/models"}}, "models.mountPath: /models overlaps"),
    ({"autoscaling": {**HPA["autoscaling"], **KEDA["autoscaling"]}}, "autoscaling: hpa.enabled"),
    (
        {"autoscaling": {"hpa": {"enabled": True, "requestsInFlight": 0}}},
        "autoscaling.hpa: needs requestsInFlight",
    ),
    ({"autoscaling": {"keda": {"enabled": True}}}, "autoscaling.keda.serverAddress: "),
    ({"autoscaling": {"minReplicas": 5}}, "autoscaling.minReplicas: must not exceed"),
    (
        {"autoscaling": {**HPA["autoscaling"], "minReplicas": 0}, "models": {"load": ["a"]}},
        "autoscaling.minReplicas: 0 needs autoscaling.keda",
    ),
    ({"pdb": {"enabled": True, "minAvailable": 1, "maxUnavailable": 1}}, "pdb: minAvailable and"),
    (
        {"networkPolicy": {"enabled": False, "egress": [{}]}},
        "networkPolicy.egress: needs networkPolicy.enabled",
    ),
    ({**RUNTIME, "settings": {"grpc": False}}, "settings.grpc: cannot be off"),
    (
        {**RUNTIME, "settings": {"grpc_data": "127.0.0.1:8085"}},
        "settings.grpc_data: port 8085 belongs",
    ),
    ({**RUNTIME, "settings": {"admin": "unix:/a"}}, "settings.admin: must be HOST:PORT"),
    (
        {**RUNTIME, "triton": {"resources": {"requests": {"memory": None}}}},
        "triton.resources.requests.memory: ",
    ),
    (
        {"endpoint": {"credentials": {"existingSecret": "s"}}},
        "endpoint.credentials.existingSecret: needs a store",
    ),
    ({"endpoint": KEYS["endpoint"] | {"credentials": {}}}, "endpoint.keys: needs a store"),
    (CLAIM, "endpoint.cache.existingClaim: needs a store"),
    (
        STORE | {"endpoint": {"cache": {"type": "existingClaim"}}},
        "endpoint.cache.existingClaim: endpoint.cache.type=existingClaim needs the name",
    ),
    (
        STORE | CLAIM | {"replicaCount": 2},
        "endpoint.cache.existingClaim: one adapter can use a cache, but there may be 2 pods",
    ),
    (
        STORE | {"endpoint": {"cache": {"type": "ephemeral", "size": "1Gi"}}},
        "endpoint.cache.size: 1Gi leaves no room: the adapter keeps 1Gi of the volume free",
    ),
    (
        {"settings": {"model_store": "s3://a", "cache_limit": "1GiB"}},
        "settings.cache_limit: the chart derives it from endpoint.cache.size",
    ),
    (
        {"settings": {"model_store": "a", "endpoint_keys": ["A env:B *"]}}
        | {"endpoint": {"keys": KEYS["endpoint"]["keys"]}},
        "endpoint.keys: settings.endpoint_keys is set too",
    ),
    (
        STORE | {"endpoint": {"keys": [KEYS["endpoint"]["keys"][0]] * 2}},
        "endpoint.keys: the access key AKIDTEAMA occurs twice",
    ),
]

NEEDS_API = [
    ({"metrics": {"podMonitor": {"enabled": True}}}, "metrics.podMonitor.enabled", APIS[0]),
    (
        {"metrics": {"serviceMonitor": {"enabled": True}}, "service": {"metrics": 8082}},
        "metrics.serviceMonitor.enabled",
        APIS[0],
    ),
    ({"metrics": {"prometheusRule": {"enabled": True}}}, "metrics.prometheusRule.enabled", APIS[0]),
    ({**KEDA, "models": {"load": ["a"]}}, "autoscaling.keda.enabled", APIS[1]),
    (RUNTIME, "mode=servingRuntime", APIS[2]),
    ({**STORE, "fleet": {"enabled": True}}, "fleet.enabled", APIS[3]),
]


@rows(("values", "place", "says"), BY_SCHEMA)
def test_the_schema_refuses_it_and_says_where(values, place, says):
    with pytest.raises(helm.HelmValuesError) as refused:
        render(values)

    assert f"at {place}" in str(refused.value)
    assert says in str(refused.value)


@rows(("values", "says"), BY_RULE)
def test_rule_about_two_keys_names_one(values, says):
    with pytest.raises(helm.HelmRenderError) as refused:
        render(values, api_versions=APIS)

    assert f": {says}" in str(refused.value)


@rows(("values", "key", "api"), NEEDS_API)
def test_add_ons_object_needs_the_add_on(values, key, api):
    with pytest.raises(helm.HelmRenderError, match=f"{key}: the cluster has no {api}"):
        render(values)

    assert render(values, api_versions=[api])
    assert render({**values, "checkApis": False})


@pytest.mark.parametrize("version", ["1.27", "1.28"])
def test_native_sidecars_are_refused_where_kubernetes_has_none(version):
    with pytest.raises(helm.HelmRenderError, match=r"triton.nativeSidecar: needs Kubernetes 1.29"):
        render({}, kube_version=version)


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("image", "1.30", r"models.type: image needs Kubernetes 1.31"),
        ("image", "1.34", r"needs the feature gate ImageVolume.*models.image.imageVolumeGate=true"),
        ("pod-spec", "1.30", r"triton.resourceClaims: needs Kubernetes 1.31"),
    ],
)
def test_what_kubernetes_has_no_field_for_is_refused(name, version, says):
    with pytest.raises(helm.HelmRenderError, match=says):
        render(values_of(name), kube_version=version)


def test_image_volume_needs_a_version_with_subpaths():
    image = {"reference": "registry.example.com/models/fraud:7", "imageVolumeGate": True}
    models = {"type": "image", "image": image}

    assert render({"models": models}, kube_version="1.31")
    with pytest.raises(helm.HelmRenderError, match=r"models.subPath: .* needs Kubernetes 1.33"):
        render({"models": {**models, "subPath": "models"}}, kube_version="1.32")


@rows("path", [CHART / "values.yaml", CHART / "Chart.yaml", *CASES])
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


@rows("limit", ["8GiB", "8Gi", "8.5GB", "8388608kib", "8589934592b", 8589934592])
def test_memory_limit_up_to_the_containers_is_taken(limit):
    assert render({"triton": {"gpu": {"count": 0}}, "settings": {"memory_limit": limit}})


@pytest.mark.parametrize("values", [{}, elsewhere()], ids=["gpu", "triton elsewhere"])
def test_foreign_memory_limit_is_not_compared(values):
    assert render({**values, "settings": {"memory_limit": "24GiB"}})


def test_numbers_that_yaml_reads_as_floats_stay_numbers():
    data = only("ConfigMap", {"settings": {"memory_limit": 68719476736, "size_factor": 1.5}})[
        "data"
    ]

    assert data["ADAPTER_MEMORY_LIMIT"] == "68719476736"
    assert data["ADAPTER_SIZE_FACTOR"] == "1.5"
