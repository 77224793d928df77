"""One question put to each contract: which status, code and header refuse it."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from adapter._proto import model_runtime_pb2 as mesh
from adapter.core.calls import NOT_STARTED, RPC_NOT_STARTED
from tests.asking import Gate
from tests.constants import LOAD_WAIT
from tests.grpc_calls import NO_LIMITS, SERVICE, calls_to, infer_request, pb
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

LIMIT = 2**20
FLAGS = (
    f"--max-body-bytes={LIMIT}",
    "--model-wait-seconds=1",  # a store that is asked on a busy machine answers in time
    COMPLETE,
)

# status of HTTP or gRPC, code of the error, and the header or trailer of a call that was not begun
Answer = tuple[int | str, str, str | None]


@dataclass
class Models:
    """`greedy` runs out of memory in inferences, `bloated` in its load; `slow` loads at a gate."""

    root: Path
    gate: Gate

    @contextmanager
    def served(self, name: str) -> Iterator[RunningAdapter]:
        """Speak every contract; the models are also the endpoint's store."""
        flags = (
            f"--model-roots={self.root}",
            f"--model-store={self.root}",
            f"--cache-dir={self.root.with_name(name)}",
        )
        with embedded_adapter(*flags, *FLAGS, constants={LOAD_WAIT: 0.1}) as adapter:
            yield adapter


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("refusals")
    gate, root = Gate(folder / "gate.open"), folder / "models"
    write_python_model(root / "greedy", answer="raise MemoryError")
    write_python_model(root / "bloated", initialize="raise MemoryError")
    write_python_model(root / "slow", initialize=gate.statements)
    write_python_model(root / "late")
    write_python_model(root / "neighbour")
    yield Models(root, gate)
    gate.open()


@pytest.fixture(scope="module")
def adapter(models) -> Iterator[RunningAdapter]:
    with (
        models.served("cache") as adapter,
        ThreadPoolExecutor(1) as pool,
        adapter.client() as client,
    ):
        client.load_model("greedy", models.root / "greedy")
        # beside another model no failure means that greedy is too large
        client.load_model("neighbour", models.root / "neighbour")
        loading = pool.submit(client.load, "slow", models.root / "slow")
        models.gate.wait_reached()
        yield adapter
        models.gate.open()
        assert loading.result(60).status == 200


@pytest.fixture(scope="module")
def drained(models) -> Iterator[RunningAdapter]:
    with models.served("drained") as adapter:
        with Client(adapter.admin) as admin:
            admin.post("/drain?timeout=0")
        yield adapter


def http(method: str, path: str, **headers: str) -> Callable[..., Answer]:
    """Ask at a path, in which {} is the name of the model, as in the headers."""

    def ask(adapter: RunningAdapter, name: str, body: Any = None, root: Path = Path()) -> Answer:
        fields = {key.replace("_", "-"): value.format(name) for key, value in headers.items()}
        if path == "/models":
            body = {"model_name": name, "url": str(root / name)}
        with adapter.client() as client:
            reply = client.request(method, path.format(name), body or infer_body(1.0), fields)
        found = reply.json()
        if original := found.get("OriginalStatusCode"):
            return reply.status, f"{found['ErrorCode']} {original}", reply.headers[NOT_STARTED]
        code = reply.headers["x-amzn-ErrorType"] or found["code"]
        return reply.status, code, reply.headers[NOT_STARTED]

    return ask


def rpc(path: str, request_of: Callable[[str, Path], Message], mesh_id: bool = False) -> Any:
    """Call a method of gRPC, which may name the model in ModelMesh's metadata."""

    def ask(adapter: RunningAdapter, name: str, body: Any = None, root: Path = Path()) -> Answer:
        message = request_of(name, root).SerializeToString()
        if body:
            message += pb.ModelInferRequest(raw_input_contents=[body]).SerializeToString()
        metadata = [("mm-model-id", name)] if mesh_id else []
        with calls_to(adapter.grpc, NO_LIMITS) as calls, pytest.raises(grpc.RpcError) as raised:
            calls.channel.unary_unary(path)(message, timeout=60, metadata=metadata)
        error: Any = raised.value
        code = re.search(r"(?:^|; )(\w+): ", error.details())
        return (
            error.code().name,
            code[1] if code else "",
            dict(error.trailing_metadata()).get(RPC_NOT_STARTED),
        )

    return ask


def infer_of(name: str, _: Path) -> Message:
    return infer_request(name, 1.0)


ENDPOINT = http("POST", "/endpoints/any/invocations", X_Amzn_SageMaker_Target_Model="{}")
V2 = "/v2/repository/models/{}/load"
INFER = {
    "sagemaker": http("POST", "/models/{}/invoke"),
    "v2": http("POST", "/v2/models/{}/infer"),
    "grpc": rpc(f"/{SERVICE}/ModelInfer", infer_of),
    "endpoint": ENDPOINT,
    "modelmesh": rpc(f"/{SERVICE}/ModelInfer", infer_of, mesh_id=True),
}
LOAD = {
    "sagemaker": http("POST", "/models"),
    "v2": http("POST", V2),
    "grpc": rpc(
        f"/{SERVICE}/RepositoryModelLoad",
        lambda name, _: pb.RepositoryModelLoadRequest(model_name=name),
    ),
    "endpoint": ENDPOINT,
    "modelmesh": rpc(
        "/mmesh.ModelRuntime/loadModel",
        lambda name, root: mesh.LoadModelRequest(modelId=name, modelPath=str(root / name)),
    ),
}
NOWHERE = {
    "sagemaker": http("POST", "/models/{}/other"),
    "v2": http("POST", "/v2/models/{}/other"),
    "grpc": rpc(f"/{SERVICE}/Other", infer_of),
    "endpoint": http("POST", "/endpoints/any/other"),
    "modelmesh": rpc("/mmesh.ModelRuntime/other", infer_of),
}
LARGE = bytes(LIMIT + 1)

# question: how it is put, to which model, with which body
QUESTIONS: dict[str, tuple[dict[str, Callable[..., Answer]], str, bytes | None]] = {
    "not loaded": (INFER, "nobody", None),
    "being loaded": (INFER, "slow", None),
    "out of memory": (INFER, "greedy", None),
    "too large": (INFER, "greedy", LARGE),
    "no such route": (NOWHERE, "greedy", None),
    "load of nothing": (LOAD, "nothing", None),
    "load out of memory": (LOAD, "bloated", None),
    "drained": (LOAD, "late", None),
}

EXPECTED: dict[str, dict[str, Answer]] = {
    "not loaded": {
        "sagemaker": (404, "ModelNotFound", None),
        "v2": (404, "ModelNotFound", None),
        "grpc": ("NOT_FOUND", "ModelNotFound", None),
        "endpoint": (400, "ValidationError", None),
        "modelmesh": ("NOT_FOUND", "ModelNotFound", None),
    },
    "being loaded": {
        "sagemaker": (503, "ModelNotReady", None),
        "v2": (503, "ModelNotReady", None),
        "grpc": ("UNAVAILABLE", "ModelNotReady", None),
        "endpoint": (429, "ModelNotReadyException", None),
        "modelmesh": ("UNAVAILABLE", "ModelNotReady", None),
    },
    "out of memory": {
        "sagemaker": (507, "OutOfMemory", None),
        "v2": (507, "OutOfMemory", None),
        "grpc": ("RESOURCE_EXHAUSTED", "OutOfMemory", None),
        "endpoint": (424, "INTERNAL_FAILURE_FROM_MODEL 507", None),
        "modelmesh": ("RESOURCE_EXHAUSTED", "OutOfMemory", None),
    },
    "too large": {
        "sagemaker": (413, "PayloadTooLarge", None),
        "v2": (413, "PayloadTooLarge", None),
        "grpc": ("RESOURCE_EXHAUSTED", "PayloadTooLarge", None),
        "endpoint": (400, "ValidationError", None),
        "modelmesh": ("RESOURCE_EXHAUSTED", "PayloadTooLarge", None),
    },
    "no such route": {
        "sagemaker": (400, "InvalidRequest", None),
        "v2": (400, "InvalidRequest", None),
        "grpc": ("UNIMPLEMENTED", "", None),
        "endpoint": (404, "UnknownOperationException", None),
        "modelmesh": ("UNIMPLEMENTED", "", None),
    },
    "load of nothing": {
        "sagemaker": (404, "SourceMissing", None),
        "v2": (404, "SourceMissing", None),
        "grpc": ("INVALID_ARGUMENT", "SourceMissing", None),
        "endpoint": (400, "ValidationError", None),
        "modelmesh": ("INVALID_ARGUMENT", "SourceMissing", None),
    },
    "load out of memory": {
        "sagemaker": (507, "OutOfMemory", None),
        "v2": (507, "OutOfMemory", None),
        "grpc": ("RESOURCE_EXHAUSTED", "OutOfMemory", None),
        "modelmesh": ("RESOURCE_EXHAUSTED", "OutOfMemory", None),
    },
    "drained": {
        "sagemaker": (503, "BackendUnavailable", "1"),
        "v2": (503, "BackendUnavailable", "1"),
        "grpc": ("UNAVAILABLE", "BackendUnavailable", "1"),
        "endpoint": (503, "ServiceUnavailable", "1"),
        "modelmesh": ("UNAVAILABLE", "BackendUnavailable", "1"),
    },
}
CELLS = [(question, contract) for question, row in EXPECTED.items() for contract in row]


@pytest.mark.parametrize(("question", "contract"), CELLS)
def test_a_refusal(question, contract, request, models):
    asked = request.getfixturevalue("drained" if question == "drained" else "adapter")
    ways, name, body = QUESTIONS[question]
    found = ways[contract](asked, name, body, models.root)
    assert found == EXPECTED[question][contract]
