"""With endpoint_keys nobody goes round the endpoint over TCP, but with the control_token."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from adapter.frontends.routes import ROUTES
from tests.cases import rows
from tests.grpc_calls import calls_to, infer_request
from tests.journeys.access.test_control_token import (
    METHODS,
    RIGHT,
    TOKEN,
    call,
)
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

# What says nothing of any model; all other calls are refused, lists and metadata of models too.
ABOUT_THE_SERVER = {"/ping", "/v2", "/v2/health/live", "/v2/health/ready", "/openapi.json"}
CALLS = [
    (route.method, route.path.format(model_name="echo", version="1", region="r"))
    for route in ROUTES
    if route.contract in {"sagemaker", "v2"} and route.path != "/"
]
METHODS_ABOUT_THE_SERVER = {"ServerLive", "ServerReady", "ServerMetadata"}


def started(root: Path, *flags: str, **environ: str):
    keys = "AKID env:SECRET *"
    flags = (
        f"--model-roots={root}",
        f"--endpoint-keys={keys}",
        f"--model-store={root}",
        f"--cache-dir={root.parent}/cache-{uuid4()}",
        *flags,
    )
    return embedded_adapter(*flags, COMPLETE, environ={"SECRET": "a secret", **environ})


@pytest.fixture(scope="module")
def keyed(root) -> Iterator[RunningAdapter]:
    """Nobody has a token: what is loaded is loaded at the start."""
    flags = (
        f"--load-at-start=echo={root / 'echo'}",
        "--grpc-data=127.0.0.1:0",
        "--http-data=127.0.0.1:0",
    )
    with started(root, *flags) as adapter:
        adapter.wait_for("adapter.models_loaded")
        yield adapter


@pytest.mark.parametrize("listener", ["http", "http_data"])
@rows(("method", "path"), CALLS)
def test_only_server_routes_are_open_unsigned(keyed, method, path, listener):
    is_open = method == "GET" and path in ABOUT_THE_SERVER
    body = infer_body(1.0) if method == "POST" else None
    with Client(keyed.listeners[listener]) as client:
        status = client.request(method, path, body).status
    if is_open and listener == "http":
        assert status == 200
    else:
        assert status == 403 or (is_open and status == 200)


@pytest.mark.parametrize("listener", ["grpc", "grpc_data"])
@rows("method", METHODS)
def test_only_server_methods_are_open_unsigned(keyed, method, listener):
    code, _ = call(keyed, listener, method)
    is_there = listener == "grpc" or method[0] != "mmesh.ModelRuntime"
    if method[1] in METHODS_ABOUT_THE_SERVER:
        assert code != "PERMISSION_DENIED"
    elif code != "UNIMPLEMENTED":
        assert (code, is_there) == ("PERMISSION_DENIED", True)
    else:
        assert listener == "grpc_data"


def test_all_plain_calls_are_asked_too(keyed):
    """Those that are planned elsewhere."""
    with keyed.client() as client:
        for path in ("/models/echo/invoke", "/v2/models/echo/infer"):
            for _ in range(2):
                reply = client.post(path, infer_body(1.0))
                assert (reply.status, reply.code) == (403, "Forbidden")


@pytest.mark.parametrize("listener", ["grpc", "grpc_data"])
def test_direct_inferences_need_a_signature_too(keyed, listener):
    with calls_to(keyed.listeners[listener]) as calls:
        for _ in range(2):
            code, text = calls.refused_infer("echo", 1.0)
            assert (code, "endpoint_keys" in text) == ("PERMISSION_DENIED", True)


def test_the_token_opens_what_keys_have_closed(root):
    with started(root, ADAPTER_CONTROL_TOKEN=TOKEN) as adapter, adapter.client() as client:
        loading = {"model_name": "echo", "url": str(root / "echo")}
        assert client.post("/models", loading).status == 401
        assert client.post("/models", loading, RIGHT).status == 200
        for path in ("/models/echo/invoke", "/v2/models/echo/infer"):
            assert client.post(path, infer_body(1.0)).status == 403
            assert client.post(path, infer_body(1.0), RIGHT).status == 200
            wrong = {"Authorization": f"Bearer {TOKEN}x"}
            assert client.post(path, infer_body(1.0), wrong).status == 403
        with calls_to(adapter.grpc) as calls:
            assert calls.refused_infer("echo", 1.0)[0] == "PERMISSION_DENIED"
            metadata = [("authorization", f"Bearer {TOKEN}")]
            assert calls.call("ModelInfer", infer_request("echo", 1.0), metadata=metadata)


def test_sockets_of_the_file_system_are_open(root, tmp_path):
    socket = tmp_path / "grpc.sock"
    with started(root, f"--grpc=unix:{socket}", f"--load-at-start=echo={root / 'echo'}") as adapter:
        method = ("inference.GRPCInferenceService", "ModelInfer", "")
        adapter.listeners["grpc"] = f"unix:{socket}"
        code, text = call(adapter, "grpc", method)
    assert code == "INVALID_ARGUMENT", text
