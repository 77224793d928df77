"""GET /ping: well as long as Triton is up, whatever the models do."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.asking import background, refusal
from tests.processes import is_alive, suspend, tritonserver
from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton


def pings_during(adapter: RunningAdapter, work: Callable[[], Any]) -> tuple[set[int], float, float]:
    """The statuses, and the median and the longest time of a ping, in seconds."""
    over = Event()

    def ping(client: Client) -> list[tuple[int, float]]:
        seen = []
        while not over.is_set():
            begun = time.monotonic()
            status = client.get("/ping").status
            seen.append((status, time.monotonic() - begun))
            over.wait(0.005)
        return seen

    with background(adapter, 1) as others:
        pinging = others.ask(ping)
        try:
            work()
        finally:
            over.set()
        seen = pinging.result()[0]
    assert len(seen) > 20
    seconds = sorted(took for _, took in seen)
    return {status for status, _ in seen}, seconds[len(seconds) // 2], seconds[-1]


@pytest.mark.races
def test_ping_is_well_and_quick_during_loads_failed_loads_and_unloads(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    write_python_model(package, initialize='raise ValueError("no")')

    def work() -> None:
        assert client.load("echo", EXAMPLES / "identity").status == 200
        assert client.load("bad", package).status == 400
        assert client.delete("/models/echo").status == 200

    statuses, median, longest = pings_during(adapter, work)

    assert statuses == {200}
    assert median < 0.1
    assert longest < 1  # the platform gives it 2 s; this machine is shared


def test_before_triton_is_up_only_the_adapter_lives(tmp_path: Path) -> None:
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
            with closing(adapter.client()) as client, closing(Client(adapter.admin)) as admin:
                assert (client.get("/ping").status, client.get("/ping").body) == (503, b"")
                assert admin.get("/livez").status == 200
                for probe in ("/readyz", "/startup"):
                    reply = admin.get(probe)
                    assert reply.status == 503
                    assert "Triton" in reply.json()["reason"]
                loaded = client.load("echo", EXAMPLES / "identity")
                assert refusal(loaded)[:2] == (503, "BackendUnavailable")
                assert refusal(client.delete("/models/echo"))[:2] == (503, "BackendUnavailable")
                assert client.get("/models").json() == {"models": []}
                assert client.post("/models/echo/invoke", infer_body(1.0)).status == 503
        finally:
            assert adapter.stop() == 0


@pytest.fixture(scope="module")
def hurt() -> Iterator[RunningAdapter]:
    """An adapter whose Triton the tests may hurt."""
    with embedded_adapter("--on-triton-restart=forget", COMPLETE) as adapter:
        yield adapter


def test_stopped_triton_is_503_until_it_continues(
    hurt: RunningAdapter,
) -> None:
    with closing(hurt.client()) as client:
        assert client.load("echo", EXAMPLES / "identity").status == 200
        pid = tritonserver(hurt)

        suspend(pid)
        try:
            wait_until(lambda: client.get("/ping").status == 503, 60, "ping notices")
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: client.get("/ping").status == 200, 60, "ping is well again")

        assert client.get("/models/echo").status == 200
        assert client.post("/models/echo/invoke", infer_body(1.0)).status == 200
        assert hurt.events("triton.restarted") == []
        assert client.delete("/models/echo").status == 200


def test_a_triton_that_dies_is_started_again_and_its_models_are_forgotten(
    hurt: RunningAdapter,
) -> None:
    url = EXAMPLES / "identity"
    with closing(hurt.client()) as client:
        assert client.load("echo", url).status == 200
        assert client.load("team/a", url).status == 200
        killed = tritonserver(hurt)

        os.kill(killed, signal.SIGKILL)
        wait_until(  # it is away for a second only
            lambda: client.get("/ping").status == 503 or bool(hurt.events("triton.restarted")),
            60,
            "ping notices",
        )
        with closing(Client(hurt.admin)) as admin:
            assert admin.get("/livez").status == 200
        invoked = client.post("/models/echo/invoke", infer_body(1.0))
        assert invoked.status in {503, 404}  # 404 once it is up again

        hurt.wait_for("triton.restarted")
        wait_until(lambda: client.get("/ping").status == 200, 60, "ping is well again")
        wait_until(lambda: client.get("/models").json() == {"models": []}, 60, "none is left")
        for name in ("echo", "team%2Fa"):
            assert refusal(client.get(f"/models/{name}"))[:2] == (404, "ModelNotFound")
        assert not is_alive(killed)
        assert tritonserver(hurt) != killed
        assert client.load("echo", url).status == 200
        assert client.post("/models/echo/invoke", infer_body(1.0)).status == 200
        assert len([*hurt.repository.iterdir()]) == 1
