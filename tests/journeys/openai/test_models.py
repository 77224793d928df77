"""GET /v1/models: what may be called, loaded or not."""

from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.running import COMPLETE, EXAMPLES, Client, embedded_adapter

pytestmark = pytest.mark.triton


def where(client: Client) -> dict[str, tuple[str, str | None]]:
    """The place and state of each model in the list."""
    body = client.get("/v1/models").json()
    assert body["object"] == "list"
    return {model["id"]: (model["where"], model["state"]) for model in body["data"]}


def test_list_has_store_and_what_is_loaded(client: Client):
    assert client.load("identity", EXAMPLES / "identity").status == 200
    client.post("/v1/embeddings", {"model": "batches", "input": "a text"})
    listed = where(client)
    assert listed["identity"] == listed["batches"] == ("memory", "READY")
    assert listed["single"] in {("store", None), ("disk", None)}


def test_model_is_told_alone_as_in_list(client: Client):
    client.post("/v1/embeddings", {"model": "batches", "input": "a text"})
    models = client.get("/v1/models").json()["data"]
    assert models
    for model in models:
        assert client.get(f"/v1/models/{quote(model['id'], safe='')}").json() == model
        assert model["object"] == "model"
        assert model["created"] > 0


def test_unknown_model_is_not_found(client: Client):
    reply = client.get("/v1/models/nobody")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["team/a/m", "team%2Fa%2Fm", "team/a%2Fm", "team/a/m/"])
def test_slash_in_name_need_not_be_encoded(client: Client, path):
    """OpenAI's clients in Go, and people with curl, do not encode it."""
    assert client.load("team/a/m", EXAMPLES / "identity").status == 200
    assert client.get(f"/v1/models/{path}").json()["id"] == "team/a/m"


def test_path_behind_name_is_another_name(client: Client):
    reply = client.get("/v1/models/batches/config")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_model_that_nothing_loads_is_not_found(store: Path, tmp_path: Path):
    """Without on_demand a call does not find what the store has, and neither does the list."""
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path}", COMPLETE)
    with embedded_adapter(*flags) as adapter, closing(adapter.client()) as client:
        assert client.get("/v1/models").json()["data"] == []
        assert client.post("/v1/embeddings", {"model": "batches", "input": "a"}).status == 404
        reply = client.get("/v1/models/batches")
        assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
        assert client.load("identity", EXAMPLES / "identity").status == 200
        assert client.get("/v1/models/identity").json()["where"] == "memory"
