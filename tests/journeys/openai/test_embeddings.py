"""POST /v1/embeddings at the models of a store."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.cases import rows
from tests.journeys.openai.models import read_vector, vector_of
from tests.running import Client, Reply, RunningAdapter, wait_until

pytestmark = pytest.mark.triton


def vectors(reply: Reply) -> list[list[float]]:
    """Those of an answer, by their index."""
    assert reply.status == 200, reply.body
    items = sorted(reply.json()["data"], key=lambda item: item["index"])
    return [read_vector(item["embedding"]) for item in items]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
@pytest.mark.parametrize("model", ["batches", "single"])
def test_vectors_are_those_of_the_model(client: Client, model, encoding):
    """The first call loads the model in a task, the second one finds it; the last has more texts
    than one inference takes.
    """
    for texts in (["one"], ["two"], [f"text {number}" for number in range(19)]):
        body = {"model": model, "input": texts, "encoding_format": encoding}
        reply = client.post("/v1/embeddings", body)
        assert vectors(reply) == [vector_of(model, text) for text in texts]


def test_answer_has_form_of_openai(client: Client):
    for _ in range(2):
        reply = client.post("/v1/embeddings", {"model": "batches", "input": "a text"})
        [item] = reply.json()["data"]
        assert reply.json() == {
            "object": "list",
            "model": "batches",
            "usage": {"prompt_tokens": 0, "total_tokens": 0},
            "data": [item],
        }
        assert item.keys() == {"object", "index", "embedding"}
        assert reply.headers["Content-Type"] == "application/json"


@rows(
    ("field", "value", "text"),
    [
        ("model", None, "model must be a string"),
        ("model", "", "empty"),
        ("model", "a\0b", "NUL"),
        ("input", None, "tokens"),
        ("input", [], "0 texts"),
        ("input", "", "empty ones"),
        ("input", ["one", ""], "input[1] must be a text; empty ones"),
        ("input", [1, 2, 3], "tokens are not accepted: see docs/openai.md"),
        ("input", [[1, 2], [3]], "tokens are not accepted"),
        ("input", ["a"] * 2049, "2049 texts"),
        ("input", ["a"] * 100_000, "100000"),
        ("input", "\ud800", "Unicode"),
        ("encoding_format", "hex", "encoding_format"),
        ("dimensions", 4, "8"),
        ("dimensions", "8", "8"),
    ],
)
def test_bad_calls_are_refused_in_openais_form(client: Client, field, value, text):
    right = {"model": "batches", "input": "a text"}
    for _ in range(2):
        reply = client.post("/v1/embeddings", {**right, field: value})
        error = reply.json()["error"]
        assert reply.status == 400
        assert error == {
            "message": error["message"],
            "type": "invalid_request_error",
            "param": None,
            "code": "InvalidRequest",
        }
        assert text in error["message"]
        assert client.post("/v1/embeddings", right).status == 200


def test_dimensions_may_be_those_of_the_model(client: Client):
    body = {"model": "batches", "input": "a text", "dimensions": 8}
    assert vectors(client.post("/v1/embeddings", body)) == [vector_of("batches", "a text")]


def test_texts_come_as_they_are(client: Client):
    texts = ["NUL \0 in it", 'quotes " and \\', "ümlaut 漢字 🙂", "line\nbreak"]
    reply = client.post("/v1/embeddings", {"model": "batches", "input": texts})
    assert vectors(reply) == [vector_of("batches", text) for text in texts]


def test_unknown_model_is_not_found(client: Client):
    reply = client.post("/v1/embeddings", {"model": "nobody", "input": "a text"})
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_failed_inference_is_not_retried(client: Client):
    """OpenAI's clients send a call again after any 5xx that does not forbid it."""
    reply = client.post("/v1/embeddings", {"model": "batches", "input": "raise"})
    assert (reply.status, reply.headers["X-Should-Retry"]) == (500, "false")


def test_raising_model_is_error_on_both_paths(client: Client):
    for _ in range(3):
        reply = client.post("/v1/embeddings", {"model": "batches", "input": "raise"})
        assert (reply.status, reply.json()["error"]["code"]) == (500, "InferenceFailed")
        assert "no such text" in reply.json()["error"]["message"]
        reply = client.post("/v1/embeddings", {"model": "batches", "input": "a text"})
        assert vectors(reply) == [vector_of("batches", "a text")]


@pytest.mark.parametrize("text", ["no output", "no numbers"])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_answer_without_rows_fails(client: Client, text, encoding):
    """Triton answers without `data`, and without the length of its JSON where raw bytes lack."""
    body = {"model": "batches", "input": [text, "other"], "encoding_format": encoding}
    for _ in range(2):
        reply = client.post("/v1/embeddings", body)
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (500, "InferenceFailed")
        assert "one row of FP32 is needed for each" in error["message"]


def test_unload_waits_for_model_whose_caller_left(
    adapter: RunningAdapter, client: Client, tmp_path: Path
):
    """The call is made by hand: its model and its config are known."""
    gate = tmp_path / "gate"
    call = {"model": "batches", "input": f"wait for {gate}"}
    for _ in range(2):
        assert client.post("/v1/embeddings", {**call, "input": "a text"}).status == 200
    leaving = HTTPConnection(adapter.http)
    leaving.request("POST", "/v1/embeddings", json.dumps(call))
    wait_until(lambda: in_flight(adapter) == 1, 30, "Triton has the call")
    leaving.close()
    with ThreadPoolExecutor(1) as pool, closing(adapter.client()) as other:
        unloading = pool.submit(other.delete, "/models/batches")
        wait_until(lambda: state_of(adapter) == "UNLOADING", 30, "the unload has begun")
        assert not unloading.done()
        gate.touch()
        assert unloading.result(60).status == 200
    reply = client.post("/v1/embeddings", {"model": "batches", "input": "a text"})
    assert vectors(reply) == [vector_of("batches", "a text")]


def in_flight(adapter: RunningAdapter) -> int:
    """The requests of the model that Triton works on."""
    return sum(model["in_flight"] for model in models_of(adapter))


def state_of(adapter: RunningAdapter) -> str:
    """The state of the model."""
    return next((model["state"] for model in models_of(adapter)), "absent")


def models_of(adapter: RunningAdapter) -> list[dict[str, Any]]:
    """The model in the internal state, if it is there."""
    return [model for model in adapter.state()["models"] if model["model_id"] == "batches"]
