"""--single-model: one package, loaded at start and served at /invocations."""

import pytest

from tests.asking import BINARY, binary_request, refusal, sized
from tests.running import COMPLETE, EMBEDDED, EXAMPLES, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton


def test_the_single_model_is_served_at_invocations():
    with (
        embedded_adapter(f"--single-model={EXAMPLES / 'identity'}", COMPLETE) as adapter,
        adapter.client() as client,
    ):
        assert client.get("/ping").status == 200
        invoked = client.post("/invocations", infer_body(1.5))
        assert invoked.data == [1.5]
        assert invoked.json()["model_name"] == "identity"
        body, json_bytes = binary_request(4)
        raw = client.post("/invocations", body, sized(json_bytes))
        assert raw.headers["Content-Type"].startswith(BINARY)
        assert raw.body.endswith(body[json_bytes:])
        assert refusal(client.post("/invocations", b"{"))[0] == 400
        assert refusal(client.post("/invocations", b""))[:2] == (400, "InvalidRequest")
        assert client.get("/models").json()["models"][0]["modelName"] == "identity"
        assert refusal(client.get("/invocations"))[0] == 405


def test_ping_is_503_until_single_model_loads(tmp_path, gate):
    folder = write_python_model(tmp_path / "a b", initialize=gate.statements)
    adapter = RunningAdapter(*EMBEDDED, f"--single-model={folder}")
    try:
        adapter.wait_for("adapter.listening", listener="http")
        with adapter.client() as client, Client(adapter.admin) as admin:
            gate.wait_reached()
            assert client.get("/ping").status == 503
            assert admin.get("/livez").status == 200
            assert "loading" in admin.get("/readyz").json()["reason"]
            assert client.post("/invocations", infer_body(1.0)).status == 503

            gate.open()
            adapter.wait_for("adapter.started")
            assert client.get("/ping").status == 200
            assert client.post("/invocations", infer_body(1.0)).json()["model_name"] == "a b"
    finally:
        gate.open()
        assert adapter.stop() == 0


def test_unloadable_single_model_ends_the_start(tmp_path):
    folder = write_python_model(tmp_path / "bad", initialize='raise ValueError("no weights")')
    adapter = RunningAdapter(*EMBEDDED, f"--single-model={folder}")

    adapter.process.wait(60)

    assert adapter.stop() == 1
    assert "no weights" in adapter.errors
    assert "Traceback" not in adapter.errors
