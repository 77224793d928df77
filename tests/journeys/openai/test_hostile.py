"""Bodies that no client of OpenAI's sends get an error in its form, and the adapter goes on."""

import gzip
import json
from typing import Any

import pytest

from tests.cases import rows
from tests.running import Client, Reply

pytestmark = pytest.mark.triton

RIGHT = {"model": "batches", "input": "a text"}
PATHS = ("/v1/embeddings", "/v1/classify", "/v1/completions")


def error_of(reply: Reply) -> dict[str, Any]:
    """The error of an answer, which has all members of OpenAI's."""
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert reply.headers["Content-Type"] == "application/json"
    return error


@rows(
    ("body", "status"),
    [
        (b"", 400),
        (b"\0", 400),
        (b"\x93NUMPY\x01\0", 400),
        (b"one,two\n1,2\n", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b"{" * 10_000, 400),
        (b"[" * 200_000, 400),
        (b'{"model": "batches", "input": ', 400),
        (b'{"model": "batches", "input": {"a": 1}, "prompt": {"a": 1}}', 400),
        (b'{"model": ["batches"], "input": "a text"}', 400),
        (b'{"model": "' + b"m" * 100_000 + b'", "input": "a text"}', 400),
        (b'{"model": "../batches", "input": "a text", "prompt": "a text"}', 404),
        (b'{"model": "batches", "input": ' + b"9" * 5000 + b"}", 400),
        (json.dumps({**RIGHT, "input": ["a"] * 100_000}).encode(), 400),
        (json.dumps({**RIGHT, "input": list(range(10_000))}).encode(), 400),
        (json.dumps({**RIGHT, "input": "a" * 50_000_000}).encode(), 413),
    ],
)
def test_hostile_body_gets_error_in_openais_form(client: Client, body, status):
    for path in PATHS:
        reply = client.post(path, body)
        assert reply.status == status, (path, reply.body[:500])
        assert error_of(reply)["type"] == "invalid_request_error"
    assert client.post("/v1/embeddings", RIGHT).status == 200


def test_large_texts_are_answered(client: Client):
    """A body too large to be answered without a task."""
    texts = ["word " * 30_000, "other " * 30_000]
    reply = client.post("/v1/embeddings", {"model": "batches", "input": texts})
    assert reply.status == 200
    assert len(reply.json()["data"]) == 2


def test_compressed_body_is_refused(client: Client):
    body = gzip.compress(json.dumps(RIGHT).encode())
    for encoding in ("gzip", "br"):
        reply = client.post("/v1/embeddings", body, {"Content-Encoding": encoding})
        assert reply.status == 400
        assert "compressed" in error_of(reply)["message"]


def test_chunked_body_is_answered(client: Client):
    pieces = iter([b'{"model": "batches", ', b'"input": "a text"}'])
    reply = client.request("POST", "/v1/embeddings", pieces)
    assert reply.status == 200


def test_unknown_paths_and_methods_have_openais_form(client: Client):
    assert error_of(client.post("/v1/responses", RIGHT))["code"] == "InvalidRequest"
    reply = client.get("/v1/embeddings")
    assert (reply.status, error_of(reply)["code"]) == (405, "MethodNotAllowed")
    assert reply.headers["Allow"] == "POST"
