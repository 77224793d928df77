"""`inference_type`: SageMaker's invocations as calls of Triton's generate extension."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.asking import binary_request, quoted, refusal, sized
from tests.grpc_calls import write_decoupled_model
from tests.running import COMPLETE, Client, Reply, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

VARIABLE = "SAGEMAKER_TRITON_INFERENCE_TYPE"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_python_model(root / "plain")
    write_python_model(root / "raises", answer="raise ValueError('no such luck')")
    write_decoupled_model(root / "twice", answer="send(values); send(2 * values)")
    return root


def serving(models: Path, kind: str) -> RunningAdapter:
    """As SageMaker starts it: one model at /invocations, and others by name."""
    flags = (f"--model-roots={models}", f"--single-model={models / 'plain'}", COMPLETE)
    store = (f"--model-store={models}", f"--cache-dir={models.parent / f'cache-{kind}'}")
    return embedded_adapter(*flags, *store, environ={VARIABLE: kind})


@pytest.fixture(scope="module")
def adapter(models) -> Iterator[RunningAdapter]:
    """`models` is its store, too."""
    with serving(models, "generate") as adapter:
        yield adapter


@pytest.fixture(scope="module")
def streaming(models) -> Iterator[RunningAdapter]:
    with serving(models, "generate_stream") as adapter, adapter.client() as client:
        client.load_model("twice", models / "twice")
        client.load_model("two times", models / "twice")
        yield adapter


def events(reply: Reply) -> list[dict]:
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    said = reply.body.decode().removesuffix("\n\n").split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in said]


def test_invocations_are_generate_of_the_single_model(client):
    answer = {"OUT": 1.5, "model_name": "plain", "model_version": "1"}
    reply = client.post("/invocations", {"IN": 1.5})
    assert (reply.status, reply.json()) == (200, answer)
    assert reply.headers["Content-Type"] == "application/json"
    # with a type as SageMaker's clients send it
    raw = client.post("/invocations", {"IN": 1.5}, {"Content-Type": "application/octet-stream"})
    assert raw.json() == answer


@pytest.mark.parametrize("name", ["named", "a name"])
def test_invoke_is_generate_under_the_callers_name(client, models, name):
    client.load_model(name, models / "plain")
    path = f"/models/{quoted(name)}"
    assert client.post(f"{path}/invoke", {"IN": 2.5}).json() == {
        "OUT": 2.5,
        "model_name": name,
        "model_version": "1",
    }
    assert client.delete(path).status == 200
    assert client.post(f"{path}/invoke", {"IN": 2.5}).status == 404


def test_endpoint_calls_may_be_generate(client):
    for value in (1.5, 2.5):
        reply = client.call_endpoint("plain", {"IN": value})
        assert (reply.status, reply.json()["OUT"]) == (200, value)


def test_generate_is_what_triton_answers_itself(client, adapter):
    with Client(adapter.http_address) as raw:
        for body in ({"IN": 1.5}, {"IN": [1.5, 2.5]}, {"IN": 1.5, "id": "seven"}):
            theirs = raw.post("/v2/models/plain/generate", body)
            ours = client.post("/invocations", body)
            assert (ours.status, ours.json()) == (theirs.status, theirs.json())


def test_v2_takes_inference_requests_and_generate_does_not(client):
    assert refusal(client.post("/invocations", infer_body(1.5)))[0] == 400
    assert client.post("/v2/models/plain/infer", infer_body(1.5)).status == 200
    assert client.post("/v2/models/plain/generate", {"IN": 1.5}).status == 200


def test_generate_refuses_raw_tensors(client):
    body, json_bytes = binary_request(4)
    reply = client.post("/invocations", body, sized(json_bytes))
    assert refusal(reply)[:2] == (400, "InvalidRequest")
    assert "inference_type" in reply.error
    packed = gzip.compress(b'{"IN": 1.5}')
    assert refusal(client.post("/invocations", packed, {"Content-Encoding": "gzip"}))[0] == 400


def test_generate_with_two_answers_is_an_error(client, models):
    """Triton 2.51 says 200 with the error as the body."""
    client.load_model("twice", models / "twice")
    reply = client.post("/models/twice/invoke", {"IN": 1.5})
    assert refusal(reply) == (400, "InvalidRequest", "twice")
    assert "exactly 1 response" in reply.error
    client.unload_model("twice")


def test_raising_model_is_an_error_with_text(client, models):
    client.load_model("raises", models / "raises")
    reply = client.post("/models/raises/invoke", {"IN": 1.5})
    assert (reply.status, "no such luck" in reply.error) == (400, True)
    client.unload_model("raises")


@pytest.mark.parametrize("name", ["twice", "two times"])
def test_each_decoupled_answer_is_an_event(streaming, name):
    with streaming.client() as client:
        found = events(client.post(f"/models/{quoted(name)}/invoke", {"IN": 1.5}))
    assert [(each["model_name"], each["OUT"]) for each in found] == [(name, 1.5), (name, 3.0)]


def test_an_ordinary_model_streams_its_one_answer(streaming):
    with streaming.client() as client:
        [event] = events(client.post("/invocations", {"IN": 1.5}))
    assert (event["OUT"], event["model_name"]) == (1.5, "plain")


def test_unknown_type_ends_start_with_known_types(models):
    adapter = RunningAdapter(f"--single-model={models / 'plain'}", environ={VARIABLE: "stream"})
    adapter.process.wait(60)
    assert adapter.stop() == 2
    assert f"{VARIABLE}: 'stream'" in adapter.errors
    assert "'generate_stream'" in adapter.errors
