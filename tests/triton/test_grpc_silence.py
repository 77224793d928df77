"""The host of Triton is gone: nothing closes a connection, and nothing comes any more."""

import asyncio
from collections.abc import AsyncIterator
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
from tests.fakes.relay import Relay
from tests.fakes.unread import unread

FAULTS = Faults(Classifier(()))
SOON = keepalive(seconds=0.5, answer_seconds=0.5)
PATIENCE_SECONDS = 20


class HangingTriton(grpc.GenericRpcHandler):
    """Works on what it is asked until it ends."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()

    def service(self, _: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._work)

    async def _work(self, _: bytes, __: Any) -> bytes:
        self.is_asked.set()
        await asyncio.Event().wait()
        return b""


@pytest.fixture
def hanging() -> HangingTriton:
    return HangingTriton()


@pytest.fixture
async def network(hanging: HangingTriton) -> AsyncIterator[Relay]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((hanging,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    relay = Relay(f"127.0.0.1:{port}")
    await relay.open()
    yield relay
    await relay.close()
    await server.stop(None)


async def test_inference_ends_after_its_caller_left(hanging, network):
    fakes = await ControlOnFakes().open()
    await fakes.load("m")
    lease = fakes.control.lease("m")
    dataplane = GrpcDataPlane(
        FAULTS, timeout_seconds=60, max_message_bytes=2**20, unread=unread(), keepalive=SOON
    )
    dataplane.connect(f"127.0.0.1:{network.port}")
    call = RpcCall("ModelInfer", (), None)
    with lease as record:
        calls = [asyncio.create_task(dataplane.call(call, b"", lease)) for _ in "ab"]
        await hanging.is_asked.wait()
        calls[0].cancel()
        network.is_silent = True
        with pytest.raises(BackendUnavailable) as raised:
            await asyncio.wait_for(calls[1], PATIENCE_SECONDS)
    assert raised.value.delivered
    assert await fakes.control.leases.wait_until_idle(record, PATIENCE_SECONDS)
    assert record.usage.abandoned == 0
    await dataplane.close()
    await fakes.close()


async def test_a_load_ends(hanging, network):
    client = ControlClient(f"127.0.0.1:{network.port}", SOON)
    load = asyncio.create_task(client.load_model("m", client_timeout=60))
    await hanging.is_asked.wait()
    network.is_silent = True
    with pytest.raises(InferenceServerException) as raised:
        await asyncio.wait_for(load, PATIENCE_SECONDS)
    code = raised.value.status().removeprefix("StatusCode.")
    error = FAULTS.explain_control(code, raised.value.message(), model_id=None)
    assert isinstance(error, BackendUnavailable)
    assert error.delivered
    await client.close()
