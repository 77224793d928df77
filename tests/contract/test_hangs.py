"""A Triton that lives and answers nothing is ended; one that is busy is not."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from adapter.triton.liveness import HangDetector
from tests.asking import Gate, background
from tests.constants import TRITON_HANG
from tests.processes import is_alive, suspend, triton_client, tritonserver
from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model


@pytest.mark.triton
def test_standing_triton_is_restarted() -> None:
    with (
        embedded_adapter(
            COMPLETE, "--on-triton-restart=forget", constants={TRITON_HANG: 5}
        ) as adapter,
        closing(adapter.client()) as client,
    ):
        assert client.load("echo", EXAMPLES / "identity").status == 200
        stopped = tritonserver(adapter)
        suspend(stopped)
        ended = adapter.wait_for("triton.ended", 60)
        assert ended["reason"] == "it has answered nothing for 5 s"
        assert adapter.wait_for("triton.exited", 60)["reason"] == "was killed by SIGKILL"
        adapter.wait_for("triton.restarted", 60)
        adapter.wait_for("triton.models_vanished", 60)
        assert not is_alive(stopped)
        assert client.load("echo", EXAMPLES / "identity").status == 200
        assert client.post("/models/echo/invoke", infer_body(1.0)).status == 200
        assert len(adapter.events("triton.ended")) == 1


def ping(adapter: RunningAdapter) -> int:
    with closing(adapter.client()) as client:
        return client.get("/ping").status


@pytest.mark.triton
def test_triton_with_busy_http_threads_is_not_ended(gate: Gate) -> None:
    """A load over Triton's HTTP port takes one of its eight threads for as long as it goes on."""
    with (
        embedded_adapter(COMPLETE, constants={TRITON_HANG: 5}) as adapter,
        background(adapter, 16) as others,
    ):
        for number in range(16):
            write_python_model(adapter.repository / f"slow{number}", initialize=gate.statements)
        loads = [others.ask(lambda _, n=n: load_at_triton(adapter, n)) for n in range(16)]
        gate.wait_reached()
        wait_until(lambda: not answers_http(adapter), 30, "no thread of Triton's is free")
        for _ in range(7):
            assert not answers_http(adapter, seconds=1)
        assert ping(adapter) == 200
        gate.open()
        assert {load.result() for load in loads} == {200}
        assert adapter.events("triton.ended") == []


def load_at_triton(adapter: RunningAdapter, number: int) -> int:
    with closing(triton_client(adapter)) as raw:
        return raw.post(f"/v2/repository/models/slow{number}/load", {}).status


def answers_http(adapter: RunningAdapter, seconds: float = 0.5) -> bool:
    with closing(Client(adapter.http_address, timeout=seconds)) as raw:
        try:
            return raw.get("/v2/health/live").status == 200
        except TimeoutError:
            return False


class Silent:
    """Two ports that take connections and say nothing, and what was done about it."""

    def __init__(self, http: str, grpc: str) -> None:
        self.http_address, self.grpc_address = http, grpc
        self.up: object | None = object()
        self.reasons: list[str] = []

    async def restart(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def silent() -> Iterator[Silent]:
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as grpc,
    ):
        yield Silent(*(f"127.0.0.1:{each.getsockname()[1]}" for each in (http, grpc)))


async def in_time(seconds: float) -> float:
    """As the event loop of a machine with time for it."""
    await asyncio.sleep(seconds)
    return 0.0


async def test_six_unanswered_probes_are_a_hang(silent) -> None:
    detector = HangDetector(silent, 1.2, lambda: 0, in_time)
    for _ in range(5):
        await detector.poll()
    assert silent.reasons == []
    await detector.poll()
    assert silent.reasons == ["it has answered nothing for 1.2 s"]


async def test_answer_to_another_caller_resets_the_count(silent) -> None:
    answered = iter(range(1000))
    detector = HangDetector(silent, 1.2, lambda: next(answered), in_time)
    for _ in range(7):
        await detector.poll()
    assert silent.reasons == []


async def test_an_adapter_that_was_late_itself_blames_nobody(silent) -> None:
    detector = HangDetector(silent, 1.2, lambda: 0)
    for _ in range(7):
        looking = asyncio.create_task(detector.poll())
        await asyncio.sleep(0.01)
        time.sleep(0.15)  # noqa: ASYNC251 - the loop stands still
        await looking
    assert silent.reasons == []


async def test_starting_server_does_not_hang(silent) -> None:
    silent.up = None
    detector = HangDetector(silent, 0.6, lambda: 0, in_time)
    for _ in range(7):
        await detector.poll()
    assert silent.reasons == []
