"""POST /v1/completions at models that take a text and answer with texts."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.processes import tritonserver
from tests.running import Client, Reply, RunningAdapter, wait_until

pytestmark = pytest.mark.triton


def events(reply: Reply) -> list[dict]:
    """Those of a stream; the last one must be [DONE]."""
    assert reply.headers["Content-Type"] == "text/event-stream"
    *pieces, done, rest = reply.body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


@pytest.mark.parametrize("model", ["words", "other"])
def test_completion_is_all_answers_in_one(client: Client, model):
    """Its tensors have the names of Triton's backends for language models, or are the only ones."""
    reply = client.post("/v1/completions", {"model": model, "prompt": "one two three"})
    assert reply.status == 200, reply.body
    body = reply.json()
    assert body["choices"] == [
        {"index": 0, "text": "ONE TWO THREE ", "logprobs": None, "finish_reason": "stop"}
    ]
    assert (body["object"], body["model"]) == ("text_completion", model)


def test_model_of_one_answer_completes_too(client: Client):
    reply = client.post("/v1/completions", {"model": "text", "prompt": ["one two three"]})
    assert reply.json()["choices"][0]["text"] == "3 words, the longest is three"


def test_sampling_reaches_inputs_of_its_names(client: Client):
    body = {"model": "words", "prompt": "one two three", "max_tokens": 2, "temperature": 0.5}
    reply = client.post("/v1/completions", body)
    assert reply.json()["choices"][0]["text"] == "ONE TWO "


def test_stream_has_event_for_each_answer(client: Client):
    body = {"model": "words", "prompt": "one two", "stream": True}
    pieces = events(client.post("/v1/completions", body))
    choices = [piece["choices"][0] for piece in pieces]
    assert [choice["text"] for choice in choices] == ["ONE ", "TWO ", ""]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert len({piece["id"] for piece in pieces}) == 1


def test_text_outside_utf8_gets_replacement_character(client: Client):
    """Triton puts the bytes of a model into its JSON as they are."""
    text = "caf\N{REPLACEMENT CHARACTER} TWO "
    body = {"model": "words", "prompt": "bytes two"}
    reply = client.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert reply.json()["choices"][0]["text"] == text
    pieces = events(client.post("/v1/completions", {**body, "stream": True}))
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text


def test_null_field_counts_as_absent(client: Client):
    """OpenAI's API lets each of these be null."""
    fields = ("max_tokens", "n", "suffix", "stop", "logprobs", "seed", "stream", "user")
    body = {"model": "words", "prompt": "one two", **dict.fromkeys(fields)}
    reply = client.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    assert reply.json()["choices"][0]["text"] == "ONE TWO "


def test_completion_above_limit_needs_stream(client: Client):
    """A whole completion is in memory; each of its pieces is not."""
    body = {"model": "words", "prompt": "long long"}
    reply = client.post("/v1/completions", body)
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (500, "InferenceFailed")
    assert '"stream": true' in error["message"]
    pieces = events(client.post("/v1/completions", {**body, "stream": True}))
    assert sum(len(piece["choices"][0]["text"]) for piece in pieces) == 2 * 5 * 2**20


def test_failure_before_first_answer_is_error(client: Client):
    """Answer with the status that V2's generate has for it."""
    for stream in (False, True):
        body = {"model": "words", "prompt": "fail", "stream": stream}
        reply = client.post("/v1/completions", body)
        assert (reply.status, reply.json()["error"]["code"]) == (400, "InvalidRequest")
        assert "no such word" in reply.json()["error"]["message"]


def test_failure_in_stream_is_its_last_event(client: Client):
    body = {"model": "words", "prompt": "one fail", "stream": True}
    reply = client.post("/v1/completions", body)
    first, last, rest = reply.body.decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "ONE "
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["type"], "no such word" in error["message"]) == ("server_error", True)
    assert rest == ""


def test_killed_triton_is_last_event_of_stream(adapter: RunningAdapter, tmp_path: Path):
    restarts = len(adapter.events("triton.restarted")) + 1
    body = {"model": "killed", "prompt": f"one wait:{tmp_path / 'gate'}", "stream": True}
    with closing(HTTPConnection(adapter.http, timeout=100)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        reply = connection.getresponse()
        assert b"ONE" in reply.readline()
        os.kill(tritonserver(adapter), signal.SIGKILL)
        error = json.loads(reply.read().strip().removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"]) == ("server_error", "BackendUnavailable")
    adapter.wait_for("triton.restarted", restarts=restarts)


def test_killed_triton_is_error_of_whole_completion(adapter: RunningAdapter, tmp_path: Path):
    """It dies after the first piece of the text."""
    restarts = len(adapter.events("triton.restarted")) + 1
    gate = tmp_path / "gate"
    body = {"model": "killed", "prompt": f"one wait:{gate}"}
    with ThreadPoolExecutor(1) as pool, closing(adapter.client()) as client:
        call = pool.submit(client.post, "/v1/completions", body)
        wait_until(gate.exists, 60, "the model has sent the first piece")
        os.kill(tritonserver(adapter), signal.SIGKILL)
        reply = call.result()
    assert (reply.status, reply.json()["error"]["code"]) == (503, "BackendUnavailable")
    adapter.wait_for("triton.restarted", restarts=restarts)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("echo", True),
        ("logprobs", 5),
        ("suffix", "end"),
        ("tools", [{"type": "function"}]),
        ("messages", [{"role": "user", "content": "a"}]),
        ("prompt", ["one", "two"]),
        ("prompt", [1, 2]),
        ("prompt", None),
        ("prompt", ""),
    ],
)
def test_unsupported_fields_are_refused_by_name(client: Client, field, value):
    reply = client.post("/v1/completions", {"model": "words", "prompt": "one", field: value})
    assert reply.status == 400, reply.body
    assert field in reply.json()["error"]["message"]


def test_chat_is_refused_with_the_reason(client: Client):
    body = {"model": "words", "messages": [{"role": "user", "content": "a"}]}
    reply = client.post("/v1/chat/completions", body)
    assert reply.status == 400
    assert "chat template" in reply.json()["error"]["message"]


def test_model_without_text_is_refused(client: Client):
    reply = client.post("/v1/completions", {"model": "batches", "prompt": "one"})
    assert reply.status == 400
    assert "0 outputs of TYPE_STRING" in reply.json()["error"]["message"]
