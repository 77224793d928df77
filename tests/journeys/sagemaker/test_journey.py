"""The main line: load, list, get, invoke, unload."""

import pytest

from tests.running import EXAMPLES, Client, RunningAdapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton


def test_a_model_is_loaded_listed_invoked_and_unloaded(
    client: Client, adapter: RunningAdapter
) -> None:
    url = str(EXAMPLES / "identity")
    described = {"modelName": "echo", "modelUrl": url}

    loaded = client.load("echo", url)
    listed = client.get("/models")
    got = client.get("/models/echo")
    invoked = client.post("/models/echo/invoke", infer_body(1.5, -2.0))
    unloaded = client.delete("/models/echo")

    assert (loaded.status, loaded.json()) == (200, described)
    assert (listed.status, listed.json()) == (200, {"models": [described]})
    assert (got.status, got.json()) == (200, described)
    assert invoked.status == 200
    assert invoked.json()["model_name"] == "echo"
    assert invoked.json()["outputs"][0]["data"] == [1.5, -2.0]
    assert unloaded.status == 200
    assert client.get("/models").json() == {"models": []}
    assert list(adapter.repository.iterdir()) == []
