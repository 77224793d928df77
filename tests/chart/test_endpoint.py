"""Pods that fetch models from a store: what is rendered for them, and such pods as processes."""

import io
import json
import signal
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from adapter.settings import Settings, load_settings
from adapter.settings.values import variable_of
from tests.buckets import Bucket, s3_server
from tests.chart.chart import NOTES, containers, only, pod_spec, render, values_of, variables
from tests.chart.pod import pod_of, start
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
def test_single_container_pod_can_write_the_cache(values):
    [container] = containers(pod_spec(values)).values()

    assert mounts(container)["cache"] == {"name": "cache", "mountPath": FOLDER}


@pytest.mark.parametrize("settings", [{"model_store": "s3://a"}, {"endpoints": {"b": "s3://b"}}])
def test_either_kind_of_store_gets_a_cache(settings):
    assert volume({"settings": settings}, "cache") == {"emptyDir": {"sizeLimit": "50Gi"}}


@pytest.mark.parametrize(("size", "limit"), [("200Gi", 180 * 2**30), ("10G", 9 * 10**9)])
def test_cache_limit_is_nine_tenths_of_the_volume(size, limit):
    values = STORE | {"endpoint": {"cache": {"size": size}}}

    assert volume(values, "cache") == {"emptyDir": {"sizeLimit": size}}
    assert settings_of(values).cache_limit == limit


@pytest.mark.parametrize("values", [KEYS, STORE | CLAIM], ids=["ephemeral", "existingClaim"])
def test_adapter_measures_a_claim_itself(values):
    assert "ADAPTER_CACHE_LIMIT" not in variables(values)


def test_old_pod_leaves_claim_before_new_one():
    values = STORE | CLAIM

    assert volume(values, "cache") == {"persistentVolumeClaim": {"claimName": "fast"}}
    assert only("Deployment", values)["spec"]["strategy"] == {"type": "Recreate"}


def test_each_key_has_its_secret(tmp_path):
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


def test_map_of_stores_becomes_endpoints():
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
def test_autoscaler_scales_pods_with_a_store(scaled, settings):
    values = {"checkApis": False, "settings": settings, **scaled}

    assert "replicas" not in only("Deployment", values)["spec"]
    assert "each pod has models of its own" not in render({**values, **HPA})[NOTES]


def test_helm_test_of_signed_calls_needs_control_token():
    without = KEYS | {"adapter": {"controlToken": {"existingSecret": ""}}}

    assert "tests/call.yaml" in {name for name, text in render(KEYS).items() if text.strip()}
    assert "tests/call.yaml" not in {name for name, text in render(without).items() if text.strip()}


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
    with pod_of(ENDPOINT, before=read_only_for_triton(cache), environ=environ) as (given, flags):
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
