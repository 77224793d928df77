"""Calls over gRPC whose metadata name their model too, as a proxy in front of a fleet needs it."""

import asyncio
import importlib.util
import queue
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.grpc.aio import InferenceServerClient as AsyncInferenceServerClient

from tests.grpc_calls import calls_to, infer_request, pb
from tests.journeys.endpoint.folder_store import Caller, Store
from tests.running import COMPLETE, EXAMPLES, embedded_adapter

pytestmark = pytest.mark.triton

PROGRAM = EXAMPLES.parent / "fleet" / "by_model.py"


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Iterator[Caller]:
    """A store of five models, each of which adds its place in the alphabet."""
    folder = tmp_path_factory.mktemp("by-model")
    (folder / "store").mkdir()
    for number, name in enumerate(("a", "team/b", "c", "d", "e"), 1):
        Store(folder / "store").put(f"{name}.tar.gz", number)
    flags = (f"--model-store={folder / 'store'}", f"--cache-dir={folder / 'cache'}")
    with (
        embedded_adapter(*flags, "--on-demand", COMPLETE) as adapter,
        closing(Caller(adapter)) as caller,
    ):
        yield caller


@pytest.fixture(scope="module")
def by_model() -> Any:
    spec = importlib.util.spec_from_file_location("by_model", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensor() -> InferInput:
    value = InferInput("IN", [1], "FP32")
    value.set_data_from_numpy(np.zeros(1, np.float32))
    return value


class Recorded(grpc.GenericRpcHandler):
    """A server that notes the metadata of each call, and answers it with nothing."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, Any]] = {}

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        self.seen[method] = dict(details.invocation_metadata)
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"")


def test_example_client_names_model_of_each_call(by_model):
    assert issubclass(by_model.InferenceServerClient, InferenceServerClient)
    assert issubclass(by_model.AsyncInferenceServerClient, AsyncInferenceServerClient)
    server, recorded = grpc.server(ThreadPoolExecutor(1)), Recorded()
    server.add_generic_rpc_handlers((recorded,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with by_model.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.infer("team/a", [tensor()], headers={"x-mine": "1"})
        client.is_model_ready("b")
        client.get_model_metadata("c")
        client.get_model_config(model_name="d")
        client.is_server_live()
    names = {method: metadata.get("mm-model-id") for method, metadata in recorded.seen.items()}
    assert names == {
        "ModelInfer": "team/a",
        "ModelReady": "b",
        "ModelMetadata": "c",
        "ModelConfig": "d",
        "ServerLive": None,
    }
    assert recorded.seen["ModelInfer"]["x-mine"] == "1"
    server.stop(None)


def test_mesh_models_are_left_to_the_mesh(caller):
    """Its id is in the metadata alone, or is another than the message has."""
    with calls_to(caller.adapter.grpc) as calls:
        for name in ("", "another"):
            request = infer_request(name, 0.0)
            refused = calls.refused("ModelInfer", request, metadata=[("mm-model-id", "a.tar.gz")])
            assert refused[0] == "NOT_FOUND"
        ready = pb.ModelReadyRequest(name="a.tar.gz")
        named = [("mm-model-id", "a.tar.gz")]
        assert not calls.call("ModelReady", ready, metadata=named).ready
    assert caller.loaded() == []


def test_models_named_in_metadata_load_on_demand(caller, by_model):
    with by_model.InferenceServerClient(caller.adapter.grpc) as client:
        for _ in range(2):  # loaded, then there
            assert client.infer("a.tar.gz", [tensor()]).as_numpy("OUT")[0] == 1
        assert client.infer("team/b", [tensor()]).as_numpy("OUT")[0] == 2
        assert client.get_model_metadata("c").name == "c"

    async def ask() -> float:
        async with by_model.AsyncInferenceServerClient(caller.adapter.grpc) as client:
            found = await client.infer("c", [tensor()])
        return float(found.as_numpy("OUT")[0])

    assert asyncio.run(ask()) == 3
    assert caller.loaded() == ["a.tar.gz", "c", "team/b"]


def test_stream_loads_the_model_it_names_first(caller, by_model):
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with by_model.InferenceServerClient(caller.adapter.grpc) as client:
        client.start_stream(
            lambda result, error: answers.put((result, error)), headers={"mm-model-id": "d.tar.gz"}
        )
        client.async_stream_infer("d.tar.gz", [tensor()])
        result, error = answers.get(timeout=60)
        assert error is None
        assert result.as_numpy("OUT")[0] == 4
        client.stop_stream()


def test_the_program_prints_what_a_model_answers(caller):
    command = [sys.executable, PROGRAM, caller.adapter.grpc, "e.tar.gz"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "[6.0, 7.0]\n"), done.stderr


# keep it last: it ends Triton
def test_call_after_tritons_end_loads_named_model(caller, by_model):
    with by_model.InferenceServerClient(caller.adapter.grpc) as client:
        client.infer("a.tar.gz", [tensor()])
        caller.end_triton()
        caller.adapter.wait_for("triton.restarted", 60)
        caller.adapter.wait_for("triton.models_vanished", 60)
        assert client.infer("a.tar.gz", [tensor()]).as_numpy("OUT")[0] == 1
