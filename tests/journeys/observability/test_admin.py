"""The admin listener's look at the inside, and what callers named their requests in the log."""

import secrets
from functools import partial

import grpc
import pytest

from adapter._proto import model_runtime_pb2 as pb
from tests.grpc_calls import calls_to, infer_request
from tests.grpc_calls import pb as v2
from tests.running import EXAMPLES, Client
from tests.trees import infer_body

pytestmark = pytest.mark.triton

ECHO = EXAMPLES / "identity"


def named() -> tuple[dict[str, str], dict[str, str]]:
    """Headers, and the fields of the log that they become."""
    request, trace = secrets.token_hex(4), secrets.token_hex(16)
    headers = {"x-request-id": request, "traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    return headers, {"request_id": request, "trace_id": trace}


def test_settings_in_force_are_shown_with_origin(adapter):
    with Client(adapter.admin) as admin:
        told = admin.get("/debug/config").json()
    assert told["triton"] == {"value": "embedded", "origin": "flag --triton"}
    assert told["drain_min_seconds"] == {"value": 0.0, "origin": "default"}


def test_each_task_tells_where_it_stands(adapter):
    with Client(adapter.admin) as admin:
        told = admin.get("/debug/tasks").body.decode()
    [chain] = [text for text in told.split("\n\n") if text.startswith("housekeeping:")]
    assert "in Housekeeping.run" in chain


def test_http_operations_are_logged_with_request_names(adapter, client):
    for event, method, path, body in (
        ("model.loaded", "POST", "/models", {"model_name": "m", "url": str(ECHO)}),
        ("request.failed", "POST", "/models/none/invoke", infer_body(1.0)),
        ("model.unloaded", "DELETE", "/models/m", None),
        ("model.loaded", "POST", "/v2/repository/models/identity/load", {}),
        ("model.unloaded", "POST", "/v2/repository/models/identity/unload", {}),
    ):
        headers, fields = named()
        reply = client.request(method, path, body, headers)
        assert reply.headers["X-Request-Id"] == headers["x-request-id"]
        adapter.wait_for(event, **fields)


def test_good_inference_returns_its_id_unlogged(adapter, client):
    client.load_model("m", ECHO)
    headers, fields = named()
    for path in ("/models/m/invoke", "/v2/models/m/infer"):
        reply = client.post(path, infer_body(1.0), headers)
        assert (reply.status, reply.headers["X-Request-Id"]) == (200, headers["x-request-id"])
    assert "X-Request-Id" not in client.invoke("m").headers
    assert not [line for line in adapter.lines if fields.items() <= line.items()]


def test_invalid_trace_context_is_not_logged(adapter, client):
    headers, fields = named()
    headers["traceparent"] = "00-shorter-than-it-has-to-be-01"
    ask = partial(client.post, "/models/none/invoke", infer_body(1.0), headers)
    line = adapter.line_of(ask, "request.failed", request_id=fields["request_id"])
    assert "trace_id" not in line


def test_grpc_operations_are_logged_with_request_names(adapter):
    with calls_to(adapter.grpc) as calls:
        for event, method, message in (
            ("model.loaded", "RepositoryModelLoad", v2.RepositoryModelLoadRequest),
            ("model.unloaded", "RepositoryModelUnload", v2.RepositoryModelUnloadRequest),
        ):
            headers, fields = named()
            calls.call(method, message(model_name="identity"), metadata=tuple(headers.items()))
            adapter.wait_for(event, **fields)
        headers, fields = named()
        ask = partial(calls.refused_infer, "none", 1.0, metadata=tuple(headers.items()))
        adapter.line_of(ask, "request.failed", **fields)
        headers, fields = named()
        request, metadata = infer_request("none", 1.0), tuple(headers.items())
        adapter.line_of(
            lambda: list(calls.stream([request], metadata=metadata)), "request.failed", **fields
        )


def test_mesh_operations_are_logged_with_request_names(adapter):
    asks = (
        ("model.loaded", "loadModel", pb.LoadModelRequest(modelId="m", modelPath=str(ECHO))),
        ("model.unloaded", "unloadModel", pb.UnloadModelRequest(modelId="m")),
    )
    with grpc.insecure_channel(adapter.grpc) as channel:
        for event, method, message in asks:
            headers, fields = named()
            call = channel.unary_unary(f"/mmesh.ModelRuntime/{method}")
            metadata = tuple(headers.items())
            call(message.SerializeToString(), metadata=metadata, timeout=60)
            adapter.wait_for(event, frontend="modelmesh", **fields)
