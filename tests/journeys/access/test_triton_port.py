"""The HTTP port of an embedded Triton, to which a page in a browser can send as well."""

import base64
import json
from collections.abc import Iterator

import pytest

from tests.cases import rows
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

PAGE = {"Origin": "http://evil.example", "Content-Type": "text/plain;charset=UTF-8"}
CODE = base64.b64encode(b"raise SystemExit").decode()
LOAD = {"parameters": {"config": json.dumps({"backend": "python"}), "file:1/model.py": CODE}}


@pytest.fixture(scope="module")
def opened() -> Iterator[RunningAdapter]:
    """Let everything pass that Triton's port takes from the adapter alone."""
    items = [f"--passthrough={item}" for item in ("shared_memory", "trace", "log")]
    with embedded_adapter(*items, COMPLETE) as adapter:
        yield adapter


@rows(
    ("method", "path", "body"),
    [
        ("POST", "/v2/repository/models/evil/load", LOAD),
        ("POST", "/v2/repository/models/evil/unload", {}),
        ("POST", "/v2/repository/index", {}),
        ("POST", "/v2/systemsharedmemory/unregister", {}),
        ("POST", "/v2/cudasharedmemory/unregister", {}),
        ("POST", "/v2/trace/setting", {"trace_file": "/tmp/x"}),
        ("POST", "/v2/logging", {"log_file": "/tmp/x"}),
    ],
)
def test_port_takes_no_restricted_call_of_others(opened, method, path, body):
    with Client(opened.http_address) as client:
        reply = client.request(method, path, body, PAGE)
    assert (reply.status, "restricted" in reply.body.decode()) == (403, True)


@rows(
    "path",
    ["/v2/systemsharedmemory/status", "/v2/trace/setting", "/v2/logging", "/v2/models/stats"],
)
def test_adapter_passes_restricted_calls_on(opened, path):
    """Its own key goes with them, whatever the caller says."""
    with opened.client() as client:
        assert client.get(path).status == 200
        assert client.get(path, **{"Triton-Adapter-Key": "mine"}).status == 200


def test_restriction_in_triton_args_replaces_the_own():
    """Two that name the same API would end Triton."""
    own = "--triton-args=--http-restricted-api=model-repository,statistics:mine=1"
    with embedded_adapter(own) as adapter, Client(adapter.http_address) as client:
        assert client.post("/v2/repository/index", {}).status == 403
        assert client.get("/v2/models/stats").status == 403
        assert client.get("/v2/logging").status == 200
