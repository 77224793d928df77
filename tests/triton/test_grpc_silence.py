"""The host of Triton is gone: nothing closes a connection, and nothing comes any more."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from tritonclient.utils import InferenceServerException

from adapter.core.calls import RpcCall, keepalive
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.errors import BackendUnavailable
from adapter.triton.client import ControlClient
from adapter.triton.grpc import GrpcDataPlane
from tests.fakes.control import ControlOnFakes
from tests.fakes.unread import unread

FAULTS = Faults(Classifier(()))
SOON = keepalive(seconds=0.5, answer_seconds=0.5)
PATIENCE_SECONDS = 20


class Upstream(grpc.GenericRpcHandler):
    """A Triton that works on what it is asked until it ends, behind a network that can go silent:
    then what is sent either way is lost, and the connections stay.
    """

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.is_silent = False
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._work)

    async def _work(self, _: bytes, __: Any) -> bytes:
        self.is_asked.set()
        await asyncio.Event().wait()
        return b""

    async def relay(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        self.writers += [writer, to_server]
        await asyncio.gather(self._pump(reader, to_server), self._pump(from_server, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(2**16):
                if not self.is_silent:
                    writer.write(piece)
        writer.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with served() as upstream:
        yield upstream


@asynccontextmanager
async def served() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((upstream,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    network = await asyncio.start_server(functools.partial(upstream.relay, port), "127.0.0.1", 0)
    upstream.port = network.sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        for writer in upstream.writers:
            writer.close()
        network.close()
        await network.wait_closed()
        await server.stop(None)


async def test_inference_ends_after_its_caller_left(upstream):
    fakes = await ControlOnFakes().open()
    await fakes.load("m")
    lease = fakes.control.lease("m")
    dataplane = GrpcDataPlane(
        FAULTS, timeout_seconds=60, max_message_bytes=2**20, unread=unread(), keepalive=SOON
    )
    dataplane.connect(f"127.0.0.1:{upstream.port}")
    call = RpcCall("ModelInfer", (), None)
    with lease as record:
        calls = [asyncio.create_task(dataplane.call(call, b"", lease)) for _ in "ab"]
        await upstream.is_asked.wait()
        calls[0].cancel()
        upstream.is_silent = True
        with pytest.raises(BackendUnavailable) as raised:
            await asyncio.wait_for(calls[1], PATIENCE_SECONDS)
    assert raised.value.delivered
    assert await fakes.control.leases.wait_until_idle(record, PATIENCE_SECONDS)
    assert record.usage.abandoned == 0
    await dataplane.close()
    await fakes.close()


async def test_a_load_ends(upstream):
    client = ControlClient(f"127.0.0.1:{upstream.port}", SOON)
    load = asyncio.create_task(client.load_model("m", client_timeout=60))
    await upstream.is_asked.wait()
    upstream.is_silent = True
    with pytest.raises(InferenceServerException) as raised:
        await asyncio.wait_for(load, PATIENCE_SECONDS)
    code = raised.value.status().removeprefix("StatusCode.")
    error = FAULTS.explain_control(code, raised.value.message(), model_id=None)
    assert isinstance(error, BackendUnavailable)
    assert error.delivered
    await client.close()
