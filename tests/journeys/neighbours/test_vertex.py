"""Vertex AI's contract for containers, route by route: the real command with AIP_* variables."""

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.asking import binary_request, refusal
from tests.ports import free_ports
from tests.running import (
    COMPLETE,
    EXAMPLES,
    Client,
    Reply,
    RunningAdapter,
    embedded_adapter,
    wait_until,
)
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

# as the platform names them by default
PREDICT = "/v1/endpoints/123/deployedModels/456:predict"
HEALTH = "/v1/endpoints/123/deployedModels/456"
BINARY = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
REDIRECT = "X-Vertex-Ai-Triton-Redirect"
AIP = {"AIP_MODE": "PREDICTION", "AIP_PREDICT_ROUTE": PREDICT, "AIP_HEALTH_ROUTE": HEALTH}


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[RunningAdapter]:
    """One model by default, `other` beside it."""
    root = tmp_path_factory.mktemp("models")
    write_python_model(root / "other", answer="values = 2 * values")
    flags = (f"--model-roots={root}", f"--load-at-start={root / 'other'}", COMPLETE)
    one = f"--single-model={EXAMPLES / 'identity'}"
    with embedded_adapter(*flags, one, environ=AIP) as adapter:
        with closing(adapter.client()) as client:
            wait_until(lambda: client.get("/ping").status == 200, 60, "its models are loaded")
        yield adapter


@pytest.fixture
def client(running: RunningAdapter) -> Iterator[Client]:
    with closing(running.client()) as client:
        yield client


def redirected(client: Client, target: str, body: object = None) -> Reply:
    return client.post(PREDICT, {} if body is None else body, {REDIRECT: target})


def test_health_is_200_once_models_are_loaded_and_takes_get_alone(client):
    assert (client.get(HEALTH).status, client.get(HEALTH).body) == (200, b"")
    assert client.request("HEAD", HEALTH).status == 200
    assert refusal(client.post(HEALTH, {}))[0] == 405


def test_a_prediction_is_an_inference_of_the_default_model(client):
    reply = client.post(PREDICT, infer_body(1.5))
    assert reply.status == 200
    assert reply.json()["outputs"][0]["data"] == [1.5]
    assert reply.json()["model_name"] == "identity"
    assert refusal(client.get(PREDICT))[0] == 405
    assert refusal(client.post(PREDICT, b"{"))[0] == 400


def test_raw_tensors_are_told_by_the_media_type_of_the_platform(client):
    body, json_bytes = binary_request(4)
    for headers in ({}, {REDIRECT: "v2/models/identity/infer"}):
        reply = client.post(PREDICT, body, {"Content-Type": f"{BINARY}{json_bytes}"} | headers)
        assert reply.status == 200
        size = int(reply.headers["Inference-Header-Content-Length"])
        assert json.loads(reply.body[:size])["model_name"] == "identity"
        assert reply.body[size:] == body[json_bytes:]


def test_a_body_that_is_empty_is_triton_s_to_judge_as_in_v2(client):
    for path in (PREDICT, "/v2/models/identity/infer"):
        reply = client.post(path, b"")
        assert (reply.status, reply.json()["outputs"][0]["shape"]) == (200, [0])


def test_one_slash_behind_a_route_means_nothing(client):
    assert client.get(f"{HEALTH}/").status == 200
    reply = client.post(f"{PREDICT}/", infer_body(1.5))
    assert (reply.status, reply.json()["outputs"][0]["data"]) == (200, [1.5])
    assert refusal(client.post(f"{PREDICT}//", infer_body(1.5)))[0] == 400


@pytest.mark.parametrize("size", ["", "abc", "-1", "99999999"])
def test_a_size_that_is_none_is_refused(client, size):
    reply = client.post(PREDICT, infer_body(1.5), {"Content-Type": f"{BINARY}{size}"})
    assert refusal(reply)[:2] == (400, "InvalidRequest")


@pytest.mark.parametrize("path", ["v2/models/other/infer", "/v2/models/other/versions/1/infer"])
def test_the_header_chooses_a_model(client, path):
    reply = redirected(client, path, infer_body(1.5))
    assert (reply.status, reply.json()["outputs"][0]["data"]) == (200, [3.0])


def test_the_header_leads_to_what_generates(client):
    assert redirected(client, "v2/models/other/generate", {"IN": 1.5}).json()["OUT"] == 3.0


@pytest.mark.parametrize(
    "path",
    [
        *("v2", "v2/health/live", "v2/health/ready", "v2/models/other", "v2/models/stats"),
        *("v2/models/other/ready", "v2/models/other/config", "v2/models/other/versions/1"),
    ],
)
def test_the_header_leads_to_what_v2_says_by_get(client, path):

    def is_the_same() -> bool:
        by_get, reply = client.get(f"/{path}"), redirected(client, path)
        assert reply.status == by_get.status == 200
        return reply.body == by_get.body

    # Triton counts an inference, of the test before, when it has answered it
    wait_until(is_the_same, 30, "the same answer")


def test_the_header_leads_to_statistics_and_the_index(client):
    told = redirected(client, "v2/models/other/stats").json()["model_stats"]
    assert [each["name"] for each in told] == ["other"]
    index = redirected(client, "v2/repository/index").json()
    assert [each["name"] for each in index] == ["identity", "other"]


@pytest.mark.parametrize(
    "path",
    [
        *("v2/repository/models/other/unload", "v2/repository/models/other/load"),
        *("v2/repository/models/other/unload/", "//v2/repository/models/other/unload"),
        *("v2/systemsharedmemory/status", "v2/logging", "v2/trace/setting"),
        *("v2/models/other/trace/setting", "v2/systemsharedmemory/region/a/register"),
    ],
)
def test_the_header_loads_and_changes_nothing(client, path):
    reply = redirected(client, path)
    assert refusal(reply)[:2] == (403, "NotPassedThrough")
    assert "inferences and reads only: call that path itself" in reply.json()["error"]
    assert client.get("/v2/models/other/ready").status == 200


@pytest.mark.parametrize(
    "path",
    ["", "v2/nothing", "models/other/invoke", "metrics", "ping", "v3", "v2/models/\xff/infer"],
)
def test_the_header_leads_nowhere_else(client, path):
    assert refusal(redirected(client, path))[0] == 400


def test_the_port_is_that_of_the_platform_and_a_model_in_storage_is_loaded_by_a_call(tmp_path):
    """Its bucket is a folder here."""
    write_python_model(tmp_path / "storage" / "stored")
    [port] = free_ports(1)
    environ = AIP | {"AIP_HTTP_PORT": str(port), "AIP_STORAGE_URI": str(tmp_path / "storage")}
    flags = ("--triton=embedded", "--admin=127.0.0.1:0", f"--cache-dir={tmp_path / 'cache'}")
    ports = (
        "--triton-http=127.0.0.1:0",
        "--triton-grpc=127.0.0.1:0",
        "--triton-metrics=127.0.0.1:0",
    )
    adapter = RunningAdapter(*flags, *ports, COMPLETE, "--vertex-model=stored", environ=environ)
    try:
        adapter.wait_for("adapter.started")
        with closing(Client(f"127.0.0.1:{port}")) as client:
            assert client.get(HEALTH).status == 200
            reply = client.post(PREDICT, infer_body(1.5))
            assert (reply.status, reply.json()["outputs"][0]["data"]) == (200, [1.5])
    finally:
        assert adapter.stop() == 0, adapter.errors


def test_health_is_503_until_the_model_is_loaded(tmp_path, gate):
    write_python_model(tmp_path / "slow", initialize=gate.statements)
    flags = (f"--single-model={tmp_path / 'slow'}", "--triton=embedded", "--admin=127.0.0.1:0")
    ports = ("--http=127.0.0.1:0", "--triton-http=127.0.0.1:0", "--triton-grpc=127.0.0.1:0")
    adapter = RunningAdapter(*flags, *ports, "--triton-metrics=127.0.0.1:0", environ=AIP)
    try:
        adapter.wait_for("adapter.listening", listener="http")
        with closing(adapter.client()) as client:
            gate.wait_reached()
            assert client.get(HEALTH).status == 503
            gate.open()
            adapter.wait_for("adapter.started")
            assert client.get(HEALTH).status == 200
    finally:
        gate.open()
        assert adapter.stop() == 0, adapter.errors


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[RunningAdapter]:
    """Without AIP_MODE the other variables mean nothing."""
    with embedded_adapter(environ=AIP | {"AIP_MODE": ""}) as adapter:
        yield adapter


@pytest.mark.parametrize("path", [PREDICT, HEALTH])
def test_without_the_mode_there_are_no_such_routes(plain, path):
    with closing(plain.client()) as client:
        assert refusal(client.get(path))[0] == 400


def test_a_prediction_without_a_model_says_how_to_name_one():
    with embedded_adapter(environ=AIP) as adapter, closing(adapter.client()) as client:
        reply = client.post(PREDICT, infer_body(1.5))
    assert refusal(reply)[:2] == (400, "InvalidRequest")
    assert REDIRECT in reply.json()["error"]
    assert "--vertex-model" in reply.json()["error"]
