"""`http_data` infers, and tells what health and metadata tell; all else is refused there."""

from collections.abc import Iterator

import pytest

from adapter.frontends.routes import ADMIN_ROUTES
from tests.cases import rows
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

NAME = "echo"
INFERENCE = infer_body(1.0)
# Every route of the listener `http`, by whether `http_data` has it.
SERVED = (
    ("GET", "/", None),
    ("GET", "/ping", None),
    ("POST", f"/models/{NAME}/invoke", INFERENCE),
    ("GET", "/openapi.json", None),
    ("GET", "/v2", None),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/health/ready", None),
    ("GET", "/v2/models/stats", None),
    ("GET", f"/v2/models/{NAME}", None),
    ("GET", f"/v2/models/{NAME}/versions/1", None),
    ("GET", f"/v2/models/{NAME}/config", None),
    ("GET", f"/v2/models/{NAME}/stats", None),
    ("GET", f"/v2/models/{NAME}/ready", None),
    ("POST", f"/v2/models/{NAME}/infer", INFERENCE),
    ("POST", f"/v2/models/{NAME}/versions/1/infer", INFERENCE),
)
REFUSED = (
    ("GET", "/models"),
    ("HEAD", "/models"),
    ("POST", "/models"),
    ("GET", f"/models/{NAME}"),
    ("GET", "/models/nobody"),
    ("DELETE", f"/models/{NAME}"),
    ("DELETE", f"/models/{NAME}/"),
    ("DELETE", "/models/nobody"),
    ("POST", "/v2/repository/index"),
    ("POST", f"/v2/repository/models/{NAME}/load"),
    ("POST", "/v2/repository/models/nobody/load"),
    ("POST", f"/v2/repository/models/{NAME}/unload"),
    ("POST", f"/%762/repository/models/{NAME}/unload"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("GET", f"/v2/models/{NAME}/trace/setting"),
    ("POST", f"/v2/models/{NAME}/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/r/register"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/region/r/status"),
    ("POST", "/v2/cudasharedmemory/region/r/unregister"),
)
OF_ADMIN = {each.path for each in ADMIN_ROUTES.values()} - {path for _, path, _ in SERVED}


@pytest.fixture(scope="module")
def running(root) -> Iterator[RunningAdapter]:
    flags = (f"--model-roots={root}", "--http-data=127.0.0.1:0")
    opened = {"ADAPTER_PASSTHROUGH": "shared_memory,trace,log"}
    with embedded_adapter(*flags, COMPLETE, environ=opened) as adapter:
        with adapter.client() as client:
            client.load_model(NAME, root / NAME)
        yield adapter


@pytest.fixture
def data(running) -> Iterator[Client]:
    with Client(running.listeners["http_data"]) as client:
        yield client


@rows(("method", "path", "body"), SERVED)
def test_inference_health_and_metadata_are_as_at_http(running, data, method, path, body):
    with running.client() as client:
        expected = client.request(method, path, body)
    found = data.request(method, path, body)

    assert found.status == expected.status == 200
    if not path.endswith(("stats", "/v2")):
        assert found.body == expected.body


@rows(("method", "path"), REFUSED)
def test_other_calls_are_403_whatever_the_model(running, data, method, path):
    with running.client() as client:
        known = client.request("OPTIONS", path)
    assert known.status == 405, "no route of the listener http"

    reply = data.request(method, path, None if method in {"GET", "HEAD"} else {})

    assert reply.status == 403
    if method != "HEAD":
        told = reply.json()
        assert told["code"] == "InferenceOnly"
        assert "http_data, serves inference alone" in told["error"]
    assert [model["state"] for model in running.state()["models"]] == ["READY"]


@rows("path", sorted(OF_ADMIN))
def test_nothing_of_admin_is_there(data, path):
    assert data.get(path).status == 400


def test_listed_extensions_are_served(data):
    told = set(data.get("/v2").json()["extensions"])
    assert not {"model_repository", "system_shared_memory", "trace", "logging"} & told
    assert "binary_tensor_data" in told


def test_its_refusals_and_connections_bear_its_name(running, data):
    def refused() -> None:
        assert data.unload("of-the-log").status == 403

    line = running.line_of(refused, "request.failed", model_id="of-the-log")
    assert (line["listener"], line["status"]) == ("http_data", 403)
    with Client(running.admin) as admin:
        page = admin.get("/metrics").body.decode()
    assert 'triton_adapter_connections{listener="http_data"} 1.0' in page
