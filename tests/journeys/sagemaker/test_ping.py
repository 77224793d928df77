"""GET /ping: well as long as Triton is up, whatever the models do."""

import os
import signal
import socket

import pytest

from tests.asking import refusal
from tests.processes import suspend, tritonserver
from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton


def test_before_triton_is_up_only_the_adapter_lives(tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: whoever calls is refused
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        adapter = RunningAdapter(
            "--triton=external",
            "--http=127.0.0.1:0",
            "--admin=127.0.0.1:0",
            f"--triton-http={address}",
            f"--triton-grpc={address}",
            f"--triton-metrics={address}",
            f"--repository={tmp_path / 'repository'}",
            f"--model-roots={EXAMPLES}",
        )
        try:
            adapter.wait_for("adapter.listening", listener="http")
            adapter.wait_for("adapter.listening", listener="admin")
            with adapter.client() as client, Client(adapter.admin) as admin:
                assert (client.get("/ping").status, client.get("/ping").body) == (503, b"")
                assert admin.get("/livez").status == 200
                for probe in ("/readyz", "/startup"):
                    reply = admin.get(probe)
                    assert reply.status == 503
                    assert "Triton" in reply.json()["reason"]
                loaded = client.load("echo", EXAMPLES / "identity")
                assert refusal(loaded)[:2] == (503, "BackendUnavailable")
                assert refusal(client.unload("echo"))[:2] == (503, "BackendUnavailable")
                assert client.get("/models").json() == {"models": []}
                assert client.invoke("echo").status == 503
        finally:
            assert adapter.stop() == 0


def test_stopped_triton_is_503_until_it_continues():
    with embedded_adapter(COMPLETE) as hurt, hurt.client() as client:
        client.load_model("echo", EXAMPLES / "identity")
        pid = tritonserver(hurt)

        suspend(pid)
        try:
            wait_until(lambda: client.get("/ping").status == 503, 60, "ping notices")
            with Client(hurt.admin) as admin:
                assert admin.get("/livez").status == 200
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: client.get("/ping").status == 200, 60, "ping is well again")

        assert client.get("/models/echo").status == 200
        assert client.invoke("echo").status == 200
        assert hurt.events("triton.restarted") == []
