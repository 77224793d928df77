"""Calls of the model repository extension, and how to start an adapter that uploads."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.asking import quoted
from tests.running import Client, Reply, RunningAdapter

# for tests whose loads cost more than what they ask: inferences are the same at both listeners
at_one_listener = pytest.mark.parametrize("listener", ["grpc"])

# CONFIG of tests.trees as JSON
CONFIG = {
    "backend": "python",
    "max_batch_size": 0,
    "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}],
}


class Repository:
    """Calls of /v2/repository at an adapter."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def index(self, body: object = None) -> list[dict[str, str]]:
        reply = self.client.post("/v2/repository/index", body)
        assert reply.status == 200, reply.body
        return reply.json()

    def load(self, name: str, **parameters: object) -> Reply:
        body = {"parameters": parameters} if parameters else None
        return self.client.post(f"/v2/repository/models/{quoted(name)}/load", body)

    def load_files(self, name: str, files: Mapping[str, bytes], config: object = CONFIG) -> Reply:
        texts = {f"file:{path}": base64.b64encode(raw).decode() for path, raw in files.items()}
        return self.load(name, config=json.dumps(config), **texts)

    def unload(self, name: str, body: object = None) -> Reply:
        return self.client.post(f"/v2/repository/models/{quoted(name)}/unload", body)

    def infer(self, name: str, *values: float) -> list[float]:
        reply = self.client.invoke(name, *values)
        assert reply.status == 200, reply.body
        return reply.data


UPLOADING = ("--triton=external", "--staging=upload", "--http=127.0.0.1:0", "--admin=127.0.0.1:0")


def uploading_adapter(
    triton: RunningAdapter,
    root: Path,
    *flags: str,
    constants: Mapping[str, float] | None = None,
) -> RunningAdapter:
    """It shares no repository with that Triton."""
    adapter = RunningAdapter(
        *UPLOADING,
        f"--triton-http={triton.http_address}",
        f"--triton-grpc={triton.grpc_address}",
        f"--model-roots={root}",
        *flags,
        constants=constants,
    )
    adapter.wait_for("adapter.started")
    return adapter
