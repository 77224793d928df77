"""Pods that fetch models from a store: what is rendered for them, and such pods as processes."""

import io
import json
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest

from adapter.settings import Settings, load_settings
from adapter.settings.values import variable_of
from tests.buckets import Bucket, s3_server
from tests.chart.chart import NOTES, containers, only, pod_spec, render, values_of, variables
from tests.chart.pod import pod_of, running_containers, running_elsewhere, running_pod, start
from tests.journeys.endpoint.conftest import client_of
from tests.running import Client, RunningAdapter, wait_until
from tests.trees import infer_body, write_python_model

ENDPOINT, KEYS = values_of("endpoint"), values_of("endpoint-keys")
FOLDER = "/var/cache/triton-adapter"
KEYS_FOLDER = "/run/secrets/triton-adapter-keys"
STORE = {"settings": {"model_store": "s3://models"}}
HPA = {"autoscaling": {"hpa": {"enabled": True}}}
KEDA = {"autoscaling": {"keda": {"enabled": True, "serverAddress": "http://p:9090"}}}
CLAIM = {"endpoint": {"cache": {"type": "existingClaim", "existingClaim": "fast"}}}


def volume(values: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [each for each in pod_spec(values)["volumes"] if each["name"] == name]
    return {key: value for key, value in found.items() if key != "name"}


def mounts(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in container["volumeMounts"]}


def settings_of(values: dict[str, Any], environ: dict[str, str] | None = None) -> Settings:
    loaded = load_settings({}, variables(values) | (environ or {}), None)
    assert loaded.warnings == []
    return loaded.settings


# -- what is rendered ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [STORE | {"mode": "single"}, STORE | {"triton": {"enabled": False, "address": "t"}}],
    ids=["single", "elsewhere"],
)
def test_a_pod_of_one_container_has_the_cache_to_write_to(values):
    [container] = containers(pod_spec(values)).values()

    assert mounts(container)["cache"] == {"name": "cache", "mountPath": FOLDER}


@pytest.mark.parametrize("settings", [{"model_store": "s3://a"}, {"endpoints": {"b": "s3://b"}}])
def test_either_kind_of_store_gets_a_cache(settings):
    assert volume({"settings": settings}, "cache") == {"emptyDir": {"sizeLimit": "50Gi"}}


@pytest.mark.parametrize(("size", "limit"), [("200Gi", 180 * 2**30), ("10G", 9 * 10**9)])
def test_cache_limit_is_nine_tenths_of_what_kubelet_lets_the_volume_have(size, limit):
    values = STORE | {"endpoint": {"cache": {"size": size}}}

    assert volume(values, "cache") == {"emptyDir": {"sizeLimit": size}}
    assert settings_of(values).cache_limit == limit


@pytest.mark.parametrize("values", [KEYS, STORE | CLAIM], ids=["ephemeral", "existingClaim"])
def test_of_a_claim_the_adapter_finds_out_itself_what_there_is(values):
    assert "ADAPTER_CACHE_LIMIT" not in variables(values)


def test_old_pod_leaves_claim_before_new_one():
    values = STORE | CLAIM

    assert volume(values, "cache") == {"persistentVolumeClaim": {"claimName": "fast"}}
    assert only("Deployment", values)["spec"]["strategy"] == {"type": "Recreate"}


def test_each_key_has_its_secret_from_where_the_values_say(tmp_path):
    projected = volume(KEYS, "endpoint-keys")["projected"]["sources"]
    for source in projected:
        [item] = source["secret"]["items"]
        (tmp_path / item["path"]).write_text(f"{source['secret']['name']}/{item['key']}\n")

    lines = variables(KEYS)["ADAPTER_ENDPOINT_KEYS"].replace(KEYS_FOLDER, str(tmp_path))
    token = tmp_path / "token"
    token.write_text("the-token-of-the-secret")
    settings = settings_of(
        KEYS, {"ADAPTER_ENDPOINT_KEYS": lines, "ADAPTER_CONTROL_TOKEN": f"file:{token}"}
    )

    assert [line.replace(str(tmp_path), "") for line in settings.endpoint_keys] == [
        "AKIDTEAMA file:/AKIDTEAMA risk/* common.tar.gz",
        "AKIDALL file:/AKIDALL *",
    ]
    assert (tmp_path / "AKIDTEAMA").read_text() == "demo-team-a/secret\n"


def test_stores_of_a_map_arrive_as_endpoints_of_their_names():
    settings = settings_of({"settings": KEYS["settings"]})

    assert [str(each) for each in settings.endpoints] == [
        "team-a=s3://team-a/models",
        "team-b=az://team-b",
    ]


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, field in Settings.model_fields.items()
        if "tuple" in str(field) and name != "triton_args"  # which is the chart's own
    ),
)
def test_a_list_of_two_arrives_as_two(name):
    """Whatever separates them in a variable."""
    two = {
        "endpoints": ["a=s3://a", "b=s3://b"],
        "endpoint_keys": ["A env:SECRET *", "B env:SECRET c/* d"],
        "passthrough": ["trace", "log"],
    }.get(name, ["/a", "/b"] if name == "model_roots" else ["a.example", "b.example"])
    store = {} if name == "endpoints" else {"model_store": "s3://models"}  # some need one
    values = {"settings": {**store, name: two}}

    settings = settings_of(values, {"SECRET": "s"})

    assert [str(each) for each in getattr(settings, name)] == two
    assert variable_of(name) in variables(values)


@pytest.mark.parametrize("scaled", [HPA, KEDA], ids=["hpa", "keda"])
@pytest.mark.parametrize("settings", [{"model_store": "s3://a"}, {"endpoints": {"b": "s3://b"}}])
def test_pods_are_scaled_that_get_their_models_from_a_store(scaled, settings):
    values = {"checkApis": False, "settings": settings, **scaled}

    assert "replicas" not in only("Deployment", values)["spec"]
    assert "each pod has models of its own" not in render({**values, **HPA})[NOTES]


REFUSED = [
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
        STORE | CLAIM | HPA,
        "endpoint.cache.existingClaim: one adapter can use a cache, but there may be 4 pods",
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
    (
        {"adapter": {"extraEnv": [{"name": "ADAPTER_MODEL_STORE", "value": "s3://a"}]}},
        "adapter.extraEnv: ADAPTER_MODEL_STORE would override",
    ),
    (STORE | {"mode": "servingRuntime", "checkApis": False}, "settings.model_store: needs mode="),
    (HPA, "autoscaling: a new pod would have no model"),
]


@pytest.mark.parametrize(("values", "says"), REFUSED, ids=lambda each: str(each)[:60])
def test_what_cannot_be_is_refused_by_its_key(values, says):
    with pytest.raises(helm.HelmRenderError) as refused:
        render(values)

    assert f": {says}" in str(refused.value)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"settings": {"cache_dir": "/tmp"}}, "/settings"),
        ({"settings": {"endpoints": {"a": {"url": "s3://a"}}}}, "/settings/endpoints/a"),
        ({"endpoint": {"cache": {"size": ""}}}, "/endpoint/cache/size"),
        ({"endpoint": {"keys": [{"accessKey": "A B"}]}}, "/endpoint/keys/0"),
    ],
)
def test_what_cannot_be_is_refused_by_the_schema(values, place):
    with pytest.raises(helm.HelmValuesError) as refused:
        render(values)

    assert f"at '{place}" in str(refused.value)


def test_helm_test_of_signed_calls_needs_control_token():
    without = KEYS | {"adapter": {"controlToken": {"existingSecret": ""}}}

    assert "tests/call.yaml" in {name for name, text in render(KEYS).items() if text.strip()}
    assert "tests/call.yaml" not in {name for name, text in render(without).items() if text.strip()}


@pytest.mark.triton
def test_the_helm_test_goes_round_the_signatures_by_its_token(tmp_path):
    (tmp_path / "store").mkdir()
    for name in ("AKIDTEAMA", "AKIDALL", "token"):
        (tmp_path / name).write_text("the-token-of-the-secret")
    values = KEYS | {"settings": {"model_store": str(tmp_path / "store")}}
    [call] = only("Pod", values)["spec"]["containers"]
    lines = variables(values)["ADAPTER_ENDPOINT_KEYS"].replace(KEYS_FOLDER, str(tmp_path))
    environ = {
        "ADAPTER_CACHE_DIR": str(tmp_path / "cache"),
        "ADAPTER_ENDPOINT_KEYS": lines,
        "ADAPTER_CONTROL_TOKEN": f"file:{tmp_path}/token",
    }

    with running_pod(values, environ) as pod:
        words = [sys.executable, "-c", call["args"][0], f"http://{pod.http}", tmp_path / "token"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_the_notes_say_how_a_model_of_the_store_is_called():
    assert "X-Amzn-SageMaker-Target-Model: KEY" in render(ENDPOINT)[NOTES]
    assert "must be signed" in render(KEYS)[NOTES]
    for values in (ENDPOINT, KEYS):
        assert "nothing fills it" not in render(values)[NOTES]


# -- pods as processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """What the values of the recipe name: models/production, in which is fraud/v7.tar.gz."""
    folder = write_python_model(tmp_path_factory.mktemp("model"))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, ".")
    with s3_server() as endpoint:
        bucket = Bucket(endpoint, "models")
        archive = packed.getvalue()
        bucket.put({"production/fraud/v7.tar.gz": archive, "production/cold.tar.gz": archive})
        yield bucket


def invoke(address: str, target: str) -> tuple[list[float], str]:
    """Return the answer, and what the cache had."""
    with closing(client_of(address)) as client:
        answer = client.invoke_endpoint(
            EndpointName="any", TargetModel=target, Body=json.dumps(infer_body(1.0, 2.0))
        )
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    outputs = json.loads(answer["Body"].read())["outputs"]
    return outputs[0]["data"], headers["x-triton-adapter-cache"]


def is_ready(adapter: RunningAdapter) -> bool:
    with closing(Client(adapter.listeners["metrics"])) as metrics:
        return metrics.get("/readyz").status == 200


def end(adapter: RunningAdapter, number: int) -> int:
    adapter.process.send_signal(number)
    return adapter.stop()


def read_only_for_triton(folder: Path) -> list[str]:
    """As its mount is in the container; skips where there are no namespaces."""
    mount = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    inside = ["unshare", "-Urm", "sh", "-c", mount, "sh", str(folder)]
    tried = subprocess.run([*inside, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    return inside


@pytest.mark.triton
@pytest.mark.timeout(400)
def test_recipe_pod_finds_its_cache_after_kill(bucket, tmp_path):
    """Triton cannot write to the cache; the variables of the bucket stand for the role."""
    (cache := tmp_path / "cache").mkdir()
    environ = {
        **bucket.environ,
        "ADAPTER_CACHE_DIR": str(cache),
        "ADAPTER_HTTP_DATA": "127.0.0.1:0",
    }
    with pod_of(ENDPOINT, before=read_only_for_triton(cache), environ=environ) as (_, given, flags):
        first = start(given, *flags)
        try:
            wait_until(lambda: "metrics" in first.listeners and is_ready(first), 60, "it is ready")
            door = first.listeners["http_data"]
            assert invoke(door, "fraud/v7.tar.gz") == ([1.0, 2.0], "hit")  # of preload
            assert invoke(door, "cold.tar.gz") == ([1.0, 2.0], "miss")
            assert pasted(door, tmp_path) == [1.0]
        finally:
            end(first, signal.SIGKILL)
        second = start(given, *flags)
        try:
            wait_until(lambda: "metrics" in second.listeners and is_ready(second), 60, "it is back")
            assert invoke(second.listeners["http_data"], "cold.tar.gz") == ([1.0, 2.0], "disk")
        finally:
            code = end(second, signal.SIGTERM)
    assert code == 0, second.errors
    assert unreadable(cache) == []


def pasted(address: str, folder: Path) -> list[float]:
    """The answer to the curl line of the notes."""
    [line] = [each for each in render(ENDPOINT)[NOTES].splitlines() if "curl" in each]
    here = line.replace("127.0.0.1:8080", address).replace("KEY", "cold.tar.gz")
    (folder / "sample.json").write_text(json.dumps(infer_body(1.0)))
    said = subprocess.check_output(["sh", "-c", here], cwd=folder, timeout=120)
    return json.loads(said)["outputs"][0]["data"]


def unreadable(folder: Path) -> list[Path]:
    """What others cannot read: in a pod Triton is another user than the adapter."""
    return [
        path
        for path in folder.rglob("*")
        if not path.stat().st_mode & (stat.S_IXOTH if path.is_dir() else stat.S_IROTH)
    ]


@pytest.mark.triton
def test_calls_find_models_on_disk_after_tritons_end(bucket, tmp_path):
    environ = {
        **bucket.environ,
        "ADAPTER_CACHE_DIR": str(tmp_path / "cache"),
        "ADAPTER_HTTP_DATA": "127.0.0.1:0",
    }
    with running_containers(ENDPOINT, environ=environ) as (adapter, triton):
        wait_until(lambda: is_ready(adapter), 60, "it is ready")
        door = adapter.listeners["http_data"]
        assert invoke(door, "cold.tar.gz") == ([1.0, 2.0], "miss")

        triton.kill()
        wait_until(lambda: not is_ready(adapter), 30, "it is not ready")
        triton.restart()
        wait_until(lambda: is_ready(adapter), 60, "it is ready again")

        for target in ("fraud/v7.tar.gz", "cold.tar.gz"):
            outputs, cache = invoke(door, target)
            assert (outputs, cache in {"hit", "disk"}) == ([1.0, 2.0], True)


@pytest.mark.triton
def test_an_adapter_alone_uploads_models_of_a_store_to_its_triton(bucket, tmp_path):
    values = values_of("triton-elsewhere") | {
        "models": {},
        "settings": {"model_store": "s3://models/production"},
    }
    environ = {**bucket.environ, "ADAPTER_CACHE_DIR": str(tmp_path / "cache")}
    with running_elsewhere(values, tmp_path, environ) as (adapter, _):
        assert invoke(adapter.http, "cold.tar.gz") == ([1.0, 2.0], "miss")
