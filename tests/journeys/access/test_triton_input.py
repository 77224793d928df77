"""What Triton is handed of a request: nothing that ends it, and no region of others' memory."""

import gzip
import json
import struct
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb

from tests.cases import rows
from tests.grpc_calls import calls_to
from tests.processes import tritonserver
from tests.running import Client, Reply, RunningAdapter, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

HTTP, GRPC = ("http", "http_data"), ("grpc", "grpc_data")
LARGE_BYTES = 2**19
# the answer is as long as the output's config says, however long the request is
TWO_OUTPUTS = """\
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        parameters = np.array([request.parameters()], dtype=object)
        scores = pb_utils.Tensor("SCORES", values.reshape(-1)[:3].copy())
        varying = pb_utils.Tensor("VARYING", values.reshape(-1)[:3].copy())
        text = pb_utils.Tensor("TEXT", parameters)
        return pb_utils.InferenceResponse([scores, varying, text])
"""
CONFIG = """\
backend: "python"
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [
  { name: "SCORES" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" },
  { name: "VARYING" data_type: TYPE_FP32 dims: [-1] },
  { name: "TEXT" data_type: TYPE_STRING dims: [1] }
]
"""


@pytest.fixture(scope="module")
def open_adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAdapter]:
    """Open all listeners and all of `passthrough`; tell models of headers that begin with X-T."""
    folder = tmp_path_factory.mktemp("models") / "m"
    write_python_model(folder, config=CONFIG)
    (folder / "1" / "model.py").write_text(TWO_OUTPUTS)
    (folder / "labels.txt").write_text("zero\none\ntwo\n")
    flags = [f"--passthrough={item}" for item in ("shared_memory", "trace", "log")]
    flags += [f"--{name}=127.0.0.1:0" for name in ("http-data", "grpc-data")]
    flags += [f"--{flag}-header-forward-pattern=^x-t|authorization" for flag in ("http", "grpc")]
    flags = [
        f"--triton-args={flag}" if "pattern" in flag else flag
        for flag in (*flags, f"--model-roots={folder.parent}")
    ]
    with embedded_adapter(*flags) as adapter:
        with closing(adapter.client()) as client:
            assert client.load("m", folder).status == 200
        yield adapter


@pytest.fixture
def alive(open_adapter: RunningAdapter) -> Iterator[RunningAdapter]:
    """The adapter, whose Triton has to be the same one after the test."""
    before = tritonserver(open_adapter)
    yield open_adapter
    assert tritonserver(open_adapter) == before


def request_of(*outputs: Any, size: int = 3, **more: Any) -> dict[str, Any]:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [size], "data": [0.1, 0.7, 0.2]}
    tensor["data"] = [0.1, 0.7, 0.2, *[0.0] * (size - 3)]
    return {"inputs": [tensor], "outputs": list(outputs), **more}


def classes_of(name: str, count: int = 2) -> dict[str, Any]:
    return {"name": name, "parameters": {"classification": count}}


def post(adapter: RunningAdapter, listener: str, body: Any, **headers: str) -> Reply:
    with closing(Client(adapter.listeners[listener])) as client:
        return client.post("/v2/models/m/infer", body, headers)


@pytest.mark.parametrize("listener", HTTP)
@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/models/m/invoke"])
@pytest.mark.parametrize("value", ["gzip;q=1e999", "deflate;q=1e-999", "identity, gzip;q=1e400"])
def test_accepted_encoding_with_any_weight_leaves_triton_alive(alive, listener, path, value):
    with closing(Client(alive.listeners[listener])) as client:
        body = request_of({"name": "SCORES"})
        assert client.post(path, body, {"Accept-Encoding": value}).status == 200


def binary(output: str) -> tuple[bytes, dict[str, str]]:
    """Return a request whose raw tensor is too long for it to be gathered."""
    count = LARGE_BYTES // 4
    tensor = {"name": "IN", "datatype": "FP32", "shape": [count]}
    tensor["parameters"] = {"binary_data_size": LARGE_BYTES}
    part = json.dumps({"inputs": [tensor], "outputs": [classes_of(output)]}).encode()
    return part + bytes(LARGE_BYTES), {"Inference-Header-Content-Length": str(len(part))}


def spelled(output: str) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield requests of the classes of an output, each in another way."""
    text = json.dumps(request_of(classes_of(output)))
    yield text.encode(), {}
    yield text.replace("classification", "\\u0063lassi\\u0066ication").encode(), {}
    yield text.replace(f'"{output}"', f'"{output}\\u0000x"').encode(), {}
    yield text.replace('"name": "' + output, f'"name": "{output}", "name": "SCORES').encode(), {}
    yield gzip.compress(text.encode()), {"Content-Encoding": "gzip"}
    yield json.dumps(request_of(classes_of(output), size=LARGE_BYTES // 5)).encode(), {}
    yield binary(output)


@pytest.mark.parametrize("listener", HTTP)
@pytest.mark.parametrize("output", ["TEXT", "VARYING"])
def test_rest_classification_is_refused_where_it_ends_triton(alive, listener, output):
    """However it is spelled, and whatever the size of the body."""
    for body, headers in spelled(output):
        reply = post(alive, listener, body, **headers)
        assert reply.status == 400, (body[:300], headers, reply)
        assert "classification of " in reply.json()["error"]


@pytest.mark.parametrize("listener", HTTP)
def test_rest_classification_is_served_with_labels(alive, listener):
    reply = post(alive, listener, request_of(classes_of("SCORES"), {"name": "TEXT"}))
    assert reply.json()["outputs"][0]["data"] == ["0.700000:1:one", "0.200000:2:two"]
    body, headers = binary("SCORES")
    assert post(alive, listener, body, **headers).status == 200
    text = request_of({"name": "TEXT"}, id="classification", parameters={"classification": 1})
    assert post(alive, listener, text).status == 200


def test_tritonclient_classifies_with_compression(alive):
    address = alive.listeners["http_data"]
    with closing(tritonclient.http.InferenceServerClient(address)) as client:
        given = tritonclient.http.InferInput("IN", [3], "FP32")
        given.set_data_from_numpy(np.array([0.1, 0.7, 0.2], np.float32))
        wanted = [tritonclient.http.InferRequestedOutput("SCORES", class_count=1)]
        answer = client.infer(
            "m",
            [given],
            outputs=wanted,
            request_compression_algorithm="gzip",
            response_compression_algorithm="deflate",
        )
        assert answer.as_numpy("SCORES").tolist() == [b"0.700000:1:one"]


def rpc_of(*outputs: str, size: int = 3) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="IN", datatype="FP32", shape=[size])
    values = struct.pack("<3f", 0.1, 0.7, 0.2)
    request.raw_input_contents.append(values + bytes(4 * (size - 3)))
    for output in outputs:
        request.outputs.add(name=output).parameters["classification"].int64_param = 2
    return request


@pytest.mark.parametrize("listener", GRPC)
@pytest.mark.parametrize("size", [3, LARGE_BYTES // 4])
def test_grpc_classification_of_strings_is_refused(alive, listener, size):
    with calls_to(alive.listeners[listener]) as calls:
        for output in ("TEXT", "TEXT\0x"):
            request = rpc_of("SCORES", output, size=size)
            code, text = calls.refused("ModelInfer", request)
            assert code == "INVALID_ARGUMENT"
            assert "classification of output" in text
            (answer,) = calls.stream([request])
            assert "classification of output" in answer.error_message


@pytest.mark.parametrize("listener", GRPC)
@pytest.mark.parametrize("size", [3, LARGE_BYTES // 4])
def test_grpc_classification_is_served_with_labels(alive, listener, size):
    with calls_to(alive.listeners[listener]) as calls:
        answer = calls.call("ModelInfer", rpc_of("SCORES", "VARYING", size=size))
        assert b"0.700000:1:one" in answer.raw_output_contents[0]
        (streamed,) = calls.stream([rpc_of("SCORES", size=size)])
        assert not streamed.error_message


def test_data_listeners_take_no_regions_of_memory(alive):
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 12}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [3], "parameters": region}
    reply = post(alive, "http_data", {"inputs": [tensor]})
    assert reply.status == 400
    assert "shared_memory_region is not taken here" in reply.json()["error"]
    assert "not taken here" not in post(alive, "http", {"inputs": [tensor]}).json()["error"]
    request = rpc_of()
    request.outputs.add(name="SCORES").parameters["shared_memory_region"].string_param = "r"
    large = rpc_of(size=LARGE_BYTES // 4)
    large.inputs[0].parameters["shared_memory_region"].string_param = "r"
    for message in (request, large):
        with calls_to(alive.listeners["grpc_data"]) as calls:
            code, text = calls.refused("ModelInfer", message)
        assert code == "INVALID_ARGUMENT"
        assert "shared_memory_region is not taken here" in text
        with calls_to(alive.listeners["grpc"]) as calls:
            assert "not taken here" not in calls.refused("ModelInfer", message)[1]


@rows(
    ("method",),
    [
        (f"{kind}SharedMemory{act}",)
        for kind in ("System", "Cuda")
        for act in ("Status", "Register", "Unregister")
    ]
    + [("TraceSetting",), ("LogSettings",)],
)
def test_grpc_data_serves_inference_alone_with_passthrough(open_adapter, method):
    with calls_to(open_adapter.listeners["grpc_data"]) as calls:
        code, text = calls.refused(method, getattr(pb, f"{method}Request")())
    assert code == "PERMISSION_DENIED"
    assert "serves inference alone" in text


def told(adapter: RunningAdapter, listener: str, headers: dict[str, str]) -> str:
    """Return the parameters that the model was told."""
    if listener in HTTP:
        reply = post(adapter, listener, request_of({"name": "TEXT"}), **headers)
        return str(reply.json()["outputs"][0]["data"])
    metadata = [(key.lower(), value) for key, value in headers.items()]
    with calls_to(adapter.listeners[listener]) as calls:
        answer = calls.call("ModelInfer", rpc_of(), metadata=metadata)
    return str(answer.raw_output_contents)


@pytest.mark.parametrize("listener", [*HTTP, *GRPC])
def test_models_are_told_headers_of_the_pattern_alone(open_adapter, listener):
    """The pattern matches Authorization too, which no model is told."""
    headers = {"X-Tenant": "seven", "X-Other": "eight", "Authorization": "Bearer nine"}
    found = told(open_adapter, listener, headers).lower()
    assert "x-tenant" in found
    assert "seven" in found
    assert not any(word in found for word in ("eight", "nine", "authorization"))
