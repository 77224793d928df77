"""TritonControl where no Triton is, or where one goes and comes back."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from adapter.core.model import ModelId, TritonName
from adapter.errors import (
    BackendUnavailable,
    LoadFailed,
    OutOfMemory,
)
from adapter.triton.client import build_retries
from adapter.triton.server.launch import take_port
from tests.contract.controlled import made, until
from tests.fakes.relay import Relay

real = pytest.mark.triton


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens, and nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.slow
async def test_absent_triton_is_tried_for_few_seconds(nobody):
    retries: list[str] = []
    control = made(nobody, retries.append)
    with pytest.raises(BackendUnavailable) as caught:
        await control.load(TritonName("m"), ModelId("m"))
    assert caught.value.delivered is False
    assert caught.value.model_id == "m"
    assert set(retries) == {"load_model"}
    assert len(retries) <= 5  # fewer where the six seconds for them are over before
    await control.close()


async def test_returning_triton_is_not_missed():
    attempts: list[int] = []

    async def call() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise BackendUnavailable("nobody there", delivered=False)
        return "loaded"

    assert await build_retries(lambda: None, wait_seconds=0)(call) == "loaded"
    assert len(attempts) == 3


@pytest.mark.parametrize(
    "error", [BackendUnavailable("broke", delivered=True), LoadFailed("x"), OutOfMemory("x")]
)
async def test_a_call_that_arrived_is_not_sent_again(error):
    """Its load may be what killed Triton."""
    attempts: list[int] = []

    async def call() -> None:
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        await build_retries(lambda: None, wait_seconds=0)(call)
    assert len(attempts) == 1


@pytest.mark.slow
async def test_repeated_call_on_closed_connection_is_unavailable(
    nobody,
):
    retried = asyncio.Event()
    control = made(nobody, lambda _: retried.set())
    load = asyncio.create_task(control.load(TritonName("m"), ModelId("m")))
    await retried.wait()
    await control.close()
    with pytest.raises(BackendUnavailable):
        await load


@pytest.fixture
def port() -> Iterator[int]:
    """Nobody else's, though nobody listens there for a while."""
    with ExitStack() as ports:
        yield take_port(ports, "relay", "127.0.0.1", 0)


@real
async def test_watched_triton_is_noticed_going_and_returning(triton, port, caplog):
    caplog.set_level(logging.INFO)
    relay = Relay(triton.grpc_address, port)
    await relay.open()
    control = made(f"127.0.0.1:{relay.port}")
    watch = asyncio.create_task(control.monitor())
    await until(lambda: control.lives == 1)
    await relay.close()
    await until(lambda: not control.live)
    await until(lambda: "triton.unreachable" in [r.message for r in caplog.records])
    await relay.open()
    await until(lambda: control.lives == 2)
    assert control.live is True
    watch.cancel()
    await asyncio.wait({watch})
    await control.close()
    await relay.close()
    outage = [r for r in caplog.records if r.message.startswith("triton.")]
    assert [r.message for r in outage] == ["triton.unreachable", "triton.reachable"]
    assert outage[1].seconds > 0


@real
async def test_quick_restart_of_triton_is_noticed(triton, port):
    relay = Relay(triton.grpc_address, port)
    await relay.open()
    control = made(f"127.0.0.1:{relay.port}")
    watch = asyncio.create_task(control.monitor())
    await until(lambda: control.lives == 1)
    probes = control.answers
    await until(lambda: control.answers > probes)  # the next is half a second away
    await relay.close()
    await relay.open()
    await until(lambda: not control.live)
    await until(lambda: control.lives == 2)
    assert control.live is True
    watch.cancel()
    await asyncio.wait({watch})
    await control.close()
    await relay.close()


@real
async def test_connection_broken_during_call_may_have_delivered(controlled, triton, port, gate):
    controlled.put("m", initialize=gate.statements)
    relay = Relay(triton.grpc_address, port)
    await relay.open()
    retries: list[str] = []
    control = made(f"127.0.0.1:{relay.port}", retries.append)
    load = asyncio.create_task(control.load(TritonName("m"), ModelId("m")))
    await until(gate.reached.exists)
    await relay.close()
    with pytest.raises(BackendUnavailable) as caught:
        await load
    assert caught.value.delivered is True
    assert retries == []
    await control.close()
    gate.open()
