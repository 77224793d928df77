"""OpenAI's paths where access is bounded, requests are traced, and in the metrics."""

import secrets
from contextlib import closing
from pathlib import Path

import pytest

from tests.fakes.collector import collector
from tests.journeys.openai.models import vector_of
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
CALL = {"model": "batches", "input": "a text"}


def test_calls_are_counted_by_operation(adapter: RunningAdapter, client: Client):
    for _ in range(3):
        assert client.post("/v1/embeddings", CALL).status == 200
    with closing(Client(adapter.admin)) as admin:
        page = admin.get("/metrics").body.decode()
    assert 'frontend="openai",method="embeddings"' in page


def test_list_is_not_at_listener_for_inference(store: Path, tmp_path: Path):
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path}", "--on-demand")
    with (
        embedded_adapter(*flags, "--http-data=127.0.0.1:0", COMPLETE) as adapter,
        closing(Client(adapter.listeners["http_data"])) as data,
    ):
        reply = data.get("/v1/models")
        assert (reply.status, reply.json()["error"]["code"]) == (403, "InferenceOnly")
        assert data.post("/v1/embeddings", CALL).status == 200
        assert data.get("/v1/models/batches").json()["state"] == "READY"


def test_traced_call_is_answered_with_spans(store: Path, tmp_path: Path):
    """A request with a span has a task, whose handler does what is done by hand otherwise."""
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path}", "--on-demand", COMPLETE)
    trace = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}
    with collector() as (found, endpoint):
        environ = {ENDPOINT: endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with embedded_adapter(*flags, environ=environ) as adapter, closing(adapter.client()) as one:
            for _ in range(2):
                reply = one.post("/v1/embeddings", CALL, headers)
                [item] = reply.json()["data"]
                assert item["embedding"] == vector_of("batches", "a text")
        spans = found.of(trace, "triton-adapter", "server")
    assert {span.name for span in spans} == {"POST /v1/embeddings"}


def test_keys_of_endpoint_close_paths_without_token(store: Path, tmp_path: Path):
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path}", "--on-demand", COMPLETE)
    environ = {"SECRET": "a secret", "ADAPTER_CONTROL_TOKEN": "a-token-of-these-tests"}
    with (
        embedded_adapter(*flags, "--endpoint-keys=AKID env:SECRET *", environ=environ) as adapter,
        closing(adapter.client()) as client,
    ):
        for path in ("/v1/embeddings", "/v1/classify", "/v1/completions"):
            reply = client.post(path, CALL, {"Authorization": "Bearer none"})
            assert (reply.status, reply.json()["error"]["code"]) == (403, "Forbidden")
        right = {"Authorization": "Bearer a-token-of-these-tests"}
        assert client.post("/v1/embeddings", CALL, right).status == 200


def test_body_limit_holds_on_both_paths(store: Path, tmp_path: Path):
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path}", "--on-demand", COMPLETE)
    with (
        embedded_adapter(*flags, "--max-body-bytes=1KiB") as adapter,
        closing(adapter.client()) as client,
    ):
        for _ in range(2):
            assert client.post("/v1/embeddings", CALL).status == 200
            reply = client.post("/v1/embeddings", {**CALL, "input": "a" * 1025})
            assert (reply.status, reply.json()["error"]["code"]) == (413, "PayloadTooLarge")


def test_call_is_told_the_page_without_on_demand(store: Path, tmp_path: Path):
    """The store has the model, and calls do not load it: the page says which setting does."""
    flags = (f"--model-store={store}", f"--cache-dir={tmp_path}", COMPLETE)
    with embedded_adapter(*flags) as adapter, adapter.client() as client:
        for path, text in (("embeddings", "input"), ("completions", "prompt")):
            reply = client.post(f"/v1/{path}", {"model": "batches", text: "a text"})
            error = reply.json()["error"]
            assert (reply.status, error["code"]) == (404, "model_not_found")
            assert error["message"] == "model 'batches' is not loaded; see docs/openai.md"
