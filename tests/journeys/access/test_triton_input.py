"""What Triton is handed of a request: nothing that ends it, and no region of others' memory."""

import gzip
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.cases import rows
from tests.grpc_calls import calls_to
from tests.journeys.v2.test_grpc_service import BEYOND
from tests.processes import tritonserver
from tests.running import Client, Reply, RunningAdapter, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

HTTP, GRPC = ("http", "http_data"), ("grpc", "grpc_data")
TARGET = {"X-Amzn-SageMaker-Target-Model": "varying"}
LARGE_BYTES = 2**19
# SCORES and TEXT are as long as their config says; VARYING has no elements where MORE has none
THREE_OUTPUTS = """\
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        values = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        parameters = np.array([request.parameters()], dtype=object)
        scores = pb_utils.Tensor("SCORES", values.reshape(-1)[:3].copy())
        more = pb_utils.get_input_tensor_by_name(request, "MORE") or scores
        varying = pb_utils.Tensor("VARYING", more.as_numpy().copy())
        text = pb_utils.Tensor("TEXT", parameters)
        return pb_utils.InferenceResponse([scores, varying, text])
"""
CONFIG = """\
backend: "python"
max_batch_size: 0
input [
  { name: "IN" data_type: TYPE_FP32 dims: [-1] },
  { name: "MORE" data_type: TYPE_FP32 dims: [-1] optional: true }
]
output [
  { name: "SCORES" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" },
  { name: "VARYING" data_type: TYPE_FP32 dims: [-1] },
  { name: "TEXT" data_type: TYPE_STRING dims: [1] }
]
"""


def write_model(folder: Path, config: str) -> Path:
    write_python_model(folder, config=config)
    (folder / "1" / "model.py").write_text(THREE_OUTPUTS)
    (folder / "labels.txt").write_text("zero\none\ntwo\n")
    return folder


@pytest.fixture(scope="module")
def open_adapter(tmp_path_factory) -> Iterator[RunningAdapter]:
    """Open all listeners and all of `passthrough`; tell models of headers that begin with X-T.

    The model "m" has an output of strings. The store has the model "varying", which has none.
    """
    folder = write_model(tmp_path_factory.mktemp("models") / "m", CONFIG)
    store = tmp_path_factory.mktemp("store")
    write_model(store / "varying", re.sub(r",\s*{ name: \"TEXT.*", "", CONFIG))
    flags = [f"--passthrough={item}" for item in ("shared_memory", "trace", "log")]
    flags += [f"--{name}=127.0.0.1:0" for name in ("http-data", "grpc-data")]
    flags += [f"--{flag}-header-forward-pattern=^x-t|authorization" for flag in ("http", "grpc")]
    flags = [
        f"--triton-args={flag}" if "pattern" in flag else flag
        for flag in (*flags, f"--model-roots={folder.parent}")
    ]
    flags += [f"--model-store={store}", f"--cache-dir={store}-cache"]
    with embedded_adapter(*flags) as adapter:
        with adapter.client() as client:
            client.load_model("m", folder)
        yield adapter


@pytest.fixture
def alive(open_adapter) -> Iterator[RunningAdapter]:
    """The adapter, whose Triton has to be the same one after the test."""
    before = tritonserver(open_adapter)
    yield open_adapter
    assert tritonserver(open_adapter) == before


def request_of(*outputs: Any, size: int = 3, **more: Any) -> dict[str, Any]:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [size], "data": [0.1, 0.7, 0.2]}
    tensor["data"] = [0.1, 0.7, 0.2, *[0.0] * (size - 3)]
    return {"inputs": [tensor], "outputs": list(outputs), **more}


# the input that has no elements
MORE = {"name": "MORE", "datatype": "FP32", "shape": [0], "data": []}


def classes_of(name: str, count: int = 2) -> dict[str, Any]:
    return {"name": name, "parameters": {"classification": count}}


def post(adapter: RunningAdapter, listener: str, body: Any, **headers: str) -> Reply:
    with Client(adapter.listeners[listener]) as client:
        return client.post("/v2/models/m/infer", body, headers)


@pytest.mark.parametrize("listener", HTTP)
@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/models/m/invoke"])
@pytest.mark.parametrize("value", ["gzip;q=1e999", "deflate;q=1e-999", "identity, gzip;q=1e400"])
def test_accepted_encoding_with_any_weight_leaves_triton_alive(alive, listener, path, value):
    with Client(alive.listeners[listener]) as client:
        body = request_of({"name": "SCORES"})
        assert client.post(path, body, {"Accept-Encoding": value}).status == 200


def binary(output: str, *, is_more_empty: bool = False) -> tuple[bytes, dict[str, str]]:
    """Return a request whose raw tensor is too long for it to be gathered."""
    count = LARGE_BYTES // 4
    tensor = {"name": "IN", "datatype": "FP32", "shape": [count]}
    tensor["parameters"] = {"binary_data_size": LARGE_BYTES}
    inputs = [tensor, MORE] if is_more_empty else [tensor]
    part = json.dumps({"inputs": inputs, "outputs": [classes_of(output)]}).encode()
    return part + bytes(LARGE_BYTES), {"Inference-Header-Content-Length": str(len(part))}


def kind_of(path: str, headers: dict[str, str]) -> dict[str, str]:
    """Return the headers as SageMaker has them: there the media type has the length of the JSON."""
    length = headers.get("Inference-Header-Content-Length")
    if length is None or path.startswith("/v2"):
        return headers
    kind = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    return {"Content-Type": f"{kind}{length}"}


def sizes_of(output: str, *, is_more_empty: bool) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield requests of the classes of an output, each checked in another way."""
    for size in (3, LARGE_BYTES // 5):
        request = request_of(classes_of(output), size=size)
        if is_more_empty:
            request["inputs"].append(MORE)
        text = json.dumps(request).encode()
        yield text, {}
        yield gzip.compress(text), {"Content-Encoding": "gzip"}
    yield binary(output, is_more_empty=is_more_empty)


def spelled(output: str, *, is_more_empty: bool) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield requests of the classes of an output, each in another way."""
    yield from sizes_of(output, is_more_empty=is_more_empty)
    request = request_of(classes_of(output))
    if is_more_empty:
        request = {"outputs": request["outputs"], "inputs": [MORE, *request["inputs"]]}
    text = json.dumps(request)
    yield text.encode(), {}
    yield text.replace("classification", "\\u0063lassi\\u0066ication").encode(), {}
    yield text.replace(f'"{output}"', f'"{output}\\u0000x"').encode(), {}
    yield text.replace('"name": "' + output, f'"name": "{output}", "name": "SCORES').encode(), {}
    yield text.replace('"shape": [0]', '"sh\\u0061pe":[ -0 ], "shape": [1]').encode(), {}


@pytest.mark.parametrize("listener", HTTP)
@pytest.mark.parametrize(("output", "is_more_empty"), [("TEXT", False), ("VARYING", True)])
def test_rest_classification_is_refused_where_it_ends_triton(
    alive, listener, output, is_more_empty
):
    """However it is spelled, and whatever the size of the body."""
    for body, headers in spelled(output, is_more_empty=is_more_empty):
        reply = post(alive, listener, body, **headers)
        assert reply.status == 400, (body[:300], headers, reply)
        assert "classification of " in reply.error


@pytest.mark.parametrize("listener", HTTP)
@pytest.mark.parametrize(
    "path", ["/endpoints/any/invocations", "/models/varying/invoke", "/v2/models/varying/infer"]
)
def test_rest_classification_of_varying_dims_needs_elements(alive, listener, path):
    """The endpoint loads the model."""
    with Client(alive.listeners[listener]) as client:
        for body, headers in sizes_of("VARYING", is_more_empty=False):
            reply = client.post(path, body, TARGET | kind_of(path, headers))
            assert reply.status == 200, (body[:300], headers, reply)
        asked = request_of(classes_of("VARYING"))
        answer = client.post(path, asked, TARGET).json()
        assert answer["outputs"][0]["data"] == ["0.700000:1", "0.200000:2"]
        for body, headers in sizes_of("VARYING", is_more_empty=True):
            reply = client.post(path, body, TARGET | kind_of(path, headers))
            assert reply.status in {400, 424}, (body[:300], headers, reply)
            assert b"classification of " in reply.body


@pytest.mark.parametrize("listener", HTTP)
def test_rest_classification_is_served_with_labels(alive, listener):
    reply = post(alive, listener, request_of(classes_of("SCORES"), {"name": "TEXT"}))
    assert reply.data == ["0.700000:1:one", "0.200000:2:two"]
    body, headers = binary("SCORES", is_more_empty=True)
    assert post(alive, listener, body, **headers).status == 200
    text = request_of({"name": "TEXT"}, id="classification", parameters={"classification": 1})
    assert post(alive, listener, text).status == 200


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
    assert "shared_memory_region is not taken here" in reply.error
    assert "not taken here" not in post(alive, "http", {"inputs": [tensor]}).error
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


@rows("method", BEYOND)
def test_grpc_data_serves_inference_alone_with_passthrough(open_adapter, method):
    with calls_to(open_adapter.listeners["grpc_data"]) as calls:
        code, text = calls.refused(method, getattr(pb, f"{method}Request")())
    assert code == "PERMISSION_DENIED"
    assert "serves inference alone" in text


def told(adapter: RunningAdapter, listener: str, headers: dict[str, str]) -> str:
    """Return the parameters that the model was told."""
    if listener in HTTP:
        reply = post(adapter, listener, request_of({"name": "TEXT"}), **headers)
        return str(reply.data)
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
