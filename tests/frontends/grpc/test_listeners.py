"""The gRPC listeners: where they listen, what they have, and how they close."""

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.frontends.access import Access
from adapter.frontends.grpc.calls import GrpcCalls, MessageLimits
from adapter.frontends.grpc.relay_policy import RelayPolicy
from adapter.frontends.listeners import Listeners
from adapter.relay.listener import RelayListener, connect_to
from adapter.relay.policy import RelayContext
from adapter.runtime.byte_budget import ByteBudget
from adapter.settings import parse_address
from adapter.triton.client import TritonControl
from tests.fakes.control import ControlOnFakes
from tests.running import EXAMPLES
from tests.trees import CONFIG, write_python_model

SECONDS = 30


class Waiting:
    """A service that answers when it is told to."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()
        handler = grpc.unary_unary_rpc_method_handler(self._wait)
        self.handler = grpc.method_handlers_generic_handler("test.Service", {"Wait": handler})

    async def _wait(self, request: bytes, _: object) -> bytes:
        self.reached.set()
        await self.let_go.wait()
        return request


@pytest.fixture
async def listeners() -> AsyncIterator[Listeners]:
    listeners = Listeners(grace_seconds=SECONDS, max_message_bytes=1000)
    yield listeners
    await listeners.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="listeners-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def proxy() -> AsyncIterator[Callable[[str], RelayListener]]:
    """With no Triton behind it."""
    fakes = await ControlOnFakes().open()
    gate = RelayPolicy(
        fakes.control,
        fakes.control_state.triton,
        Faults(Classifier()),
        GrpcCalls(fakes.metrics, Access("grpc"), MessageLimits(unary=500, stream=1000)),
    )

    def make(server: str) -> RelayListener:
        context = RelayContext(
            gate,
            connect_to(lambda: None),
            connect_to(lambda: server),
            timeout_seconds=SECONDS,
            max_message_bytes=2000,
            budget=ByteBudget(2**31),  # room for thousands of calls of unknown kind
        )
        return RelayListener(context)

    yield make
    await fakes.close()


async def asked(address: str, message: bytes = b"x", seconds: float = SECONDS) -> bytes:
    """On a connection of its own: gRPC's channels share them otherwise."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=own) as channel:
        return await channel.unary_unary("/test.Service/Wait")(message, timeout=seconds)


async def test_abandoned_socket_is_taken_over(listeners, proxy, folder):
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(folder / "a.sock"))
    service = Waiting()
    service.let_go.set()
    await listeners.open_grpc(
        "grpc", parse_address(f"unix:{folder}/a.sock"), [service.handler], proxy
    )
    assert await asked(listeners.addresses["grpc"]) == b"x"
    await listeners.close()
    assert list(folder.iterdir()) == []


async def test_stop_leaves_the_socket_of_a_successor(listeners, proxy, folder):
    """A new pod may listen at the path of a host before the old one has stopped."""
    path = folder / "a.sock"
    await listeners.open_grpc("grpc", parse_address(f"unix:{path}"), [Waiting().handler], proxy)
    successor = await asyncio.start_unix_server(lambda *_: None, path)
    await listeners.close()
    assert path.is_socket()
    successor.close()


@pytest.mark.triton
async def test_triton_reports_version_and_instance_counts(adapter, client, package):
    config = CONFIG + "instance_group [{ count: 2 kind: KIND_CPU }]\n"
    write_python_model(package, config=config)
    assert client.load("two", package).status == 200
    assert client.load("one", EXAMPLES / "identity").status == 200
    control = TritonControl(Faults(Classifier()), load_timeout_seconds=9, call_timeout_seconds=9)
    control.connect(adapter.grpc_address)

    await control.wait_live(SECONDS)
    assert control.version.startswith("2.")
    assert [await control.instances(name) for name in ("one", "two")] == [1, 2]
    await control.close()


async def test_no_call_is_cancelled_for_unbegun_ones(listeners, proxy):
    """As gRPC does by default, at random, from 1,000 on."""
    service = Waiting()
    service.let_go.set()
    await listeners.open_grpc("grpc", parse_address("127.0.0.1:0"), [service.handler], proxy)
    address = listeners.addresses["grpc"]
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        opened = (grpc.aio.insecure_channel(address, options=own) for _ in range(4))
        channels = [await stack.enter_async_context(channel) for channel in opened]
        ask = [channel.unary_unary("/test.Service/Wait") for channel in channels]
        calls = [ask[i % 4](b"x", timeout=SECONDS) for i in range(2000)]
        assert set(await asyncio.gather(*calls)) == {b"x"}
