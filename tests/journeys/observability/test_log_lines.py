"""What the log of the real command tells of loads, unloads and failed requests, and at debug."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from adapter._proto import model_runtime_pb2 as mesh
from tests.grpc_calls import calls_to
from tests.running import EXAMPLES, RunningAdapter, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

IDENTITY = EXAMPLES / "identity"


def test_failed_http_request_is_logged_with_details(adapter, client):
    asked = [
        ("POST", "/models/none-1/invoke", infer_body(1.0), 404, "none-1"),
        ("DELETE", "/models/none-2", None, 404, "none-2"),
        ("GET", "/v2/models/none-3", None, 404, "none-3"),
    ]
    for method, path, body, status, name in asked:
        ask = partial(client.request, method, path, body)
        line = adapter.line_of(ask, "request.failed", model_id=name)
        assert (line["listener"], line["method"], line["status"]) == ("http", method, status)
        assert (line["path"], line["level"], line["error"]) == (path, "info", "ModelNotFound")
    ask = partial(client.request, "PUT", "/models/none-4")
    line = adapter.line_of(ask, "request.failed", model_id="none-4")
    assert (line["method"], line["status"], line["error"]) == ("PUT", 405, "MethodNotAllowed")


def test_failed_grpc_request_is_logged_with_details(adapter):
    for listener in ("grpc", "grpc_data"):
        with calls_to(adapter.listeners[listener]) as calls:
            ask = partial(calls.refused_infer, f"none-{listener}", 1.0)
            line = adapter.line_of(ask, "request.failed", model_id=f"none-{listener}")
        assert (line["listener"], line["method"]) == (listener, "ModelInfer")
        assert line["status"] == "NOT_FOUND"
    with grpc.insecure_channel(adapter.grpc) as channel:
        call = channel.unary_unary("/mmesh.ModelRuntime/loadModel")

        def refused() -> None:
            with pytest.raises(grpc.RpcError):
                call(mesh.LoadModelRequest(modelPath="/x").SerializeToString(), timeout=60)

        line = adapter.line_of(refused, "request.failed", method="loadModel")
    assert (line["listener"], line["status"]) == ("grpc", "INVALID_ARGUMENT")


def test_refused_or_failed_load_is_logged_once(adapter, client, package):
    (package / "1").mkdir()
    (package / "1" / "model.py").write_text("raise RuntimeError('no')")
    (package / "config.pbtxt").write_text('backend: "python"')
    assert client.load("refused-once", package / "none").status == 404
    assert client.load("failed-once", package).status == 400
    refused = adapter.wait_for("model.load_refused", model_id="refused-once")
    assert (refused["level"], refused["error"]) == ("info", "SourceMissing")
    failed = adapter.wait_for("model.load_failed", model_id="failed-once")
    assert (failed["level"], failed["error"]) == ("warning", "LoadFailed")
    after = partial(client.post, "/models/after/invoke", infer_body(1.0))
    adapter.line_of(after, "request.failed", model_id="after")
    assert [
        line
        for line in adapter.events("request.failed")
        if line.get("model_id") in {"refused-once", "failed-once"}
    ] == []


def test_load_and_unload_are_logged_with_sizes(adapter, client):
    client.load_model("freed", IDENTITY)
    client.unload_model("freed")
    events = ["model.loading", "model.loaded", "model.unloading", "model.unloaded"]
    lines = [adapter.wait_for(event, model_id="freed") for event in events]
    loading, loaded, unloading, unloaded = lines
    assert [adapter.lines.index(line) for line in lines] == sorted(
        adapter.lines.index(line) for line in lines
    )
    assert (loading["url"], unloading["in_flight"]) == (str(IDENTITY), 0)
    assert unloaded["bytes"] >= loaded["bytes"] > 0


@pytest.fixture(scope="module")
def told() -> Iterator[RunningAdapter]:
    """An adapter at debug, after a load, an inference over HTTP, one over gRPC and an unload."""
    with embedded_adapter("--log-level=debug") as adapter:
        with adapter.client() as client, calls_to(adapter.grpc) as calls:
            client.load_model("identity", IDENTITY)
            assert client.invoke("identity").status == 200
            assert calls.infer("identity", 1.0) == [1.0]
            assert client.load("refused-once", "/nowhere").status == 400
            client.unload_model("identity")
        adapter.wait_for("request.answered", method="unload")  # and all lines before it
        yield adapter


def only(lines: list[dict[str, Any]], **fields: object) -> dict[str, Any]:
    (line,) = [line for line in lines if fields.items() <= line.items()]
    return line


def test_debug_log_shows_load_steps_and_admission(told):
    steps = [line for line in told.events("model.step") if line["model_id"] == "identity"]
    assert [line["waits_for"] for line in steps] == [
        *("package", "turn", "files", "triton"),
        *("requests", "triton"),
    ]
    admitted = only(told.events("model.admitted"), model_id="identity")
    assert admitted["basis"] == "disk"
    assert admitted["needed_bytes"].keys() == admitted["free_bytes"].keys()
    assert admitted["level"] == "debug"


def test_debug_log_shows_control_calls_to_triton(told):
    calls = told.events("triton.called")
    for method in ("load_model", "unload_model"):
        line = only(calls, method=method, model_id="identity")
        assert (line["code"], line["level"]) == ("OK", "debug")
        assert line["seconds"] > 0


def test_debug_log_shows_requests_with_tritons_time(told):
    line = told.wait_for("request.answered", frontend="sagemaker", method="invoke")
    assert (line["model_id"], line["status"]) == ("identity", 200)
    assert line["seconds"] >= line["triton_seconds"] > 0
    line = told.wait_for("request.answered", frontend="grpc", method="ModelInfer")
    assert (line["model_id"], line["status"]) == ("identity", "OK")


def test_debug_log_shows_refused_loads_as_requests(told):
    line = told.wait_for("request.failed", model_id="refused-once")
    assert (line["level"], line["status"]) == ("debug", 400)


def test_debug_is_of_the_adapter_alone(told):
    loggers = {line["logger"] for line in told.lines if line["level"] == "debug"}
    assert {name.partition(".")[0] for name in loggers} == {"adapter"}
