"""Opens the gRPC proxy with fakes around it: no real Triton, and clients that speak frames."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.frontends.access import Access
from adapter.frontends.grpc.calls import GrpcCalls, MessageLimits
from adapter.frontends.grpc.relay_policy import RelayPolicy
from adapter.frontends.grpc.v2 import V2Service
from adapter.relay import frames
from adapter.relay.headers import encoded
from adapter.relay.listener import RelayListener, connect_to
from adapter.relay.policy import RelayContext
from adapter.runtime.byte_budget import ByteBudget
from adapter.triton.grpc import GrpcDataPlane
from tests.fakes.control import ControlOnFakes
from tests.fakes.grpc_triton import _Echo
from tests.fakes.unread import unread
from tests.grpc_calls import SERVICE, infer_request

INFER, STREAM = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
SECONDS = 10
MAX_MESSAGE = 32 * 2**20
NO_LIMITS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@dataclass
class ProxySetup:
    """`triton` is where its upstream is; a test may point it elsewhere before the first call."""

    fakes: ControlOnFakes
    server: RelayListener
    address: str
    triton: str
    methods: set[str] = field(default_factory=set)  # that Triton was asked for
    shed: list[str] = field(default_factory=list)

    def in_flight(self, name: str) -> int:
        return self.fakes.control.registry.serving(name).usage.in_flight

    def abandoned(self, name: str) -> int:
        """Of those in flight, for how many nobody waits any more."""
        return self.fakes.control.registry.serving(name).usage.abandoned

    def counted(self, code: str, method: str = "ModelInfer") -> float | None:
        labels = {"frontend": "grpc_data", "method": method, "code": code}
        return self.fakes.metrics.registry.get_sample_value("triton_adapter_requests_total", labels)

    async def until_counted(self, code: str) -> None:
        async with asyncio.timeout(SECONDS):
            while not self.counted(code):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)

    async def until_abandoned(self, name: str) -> None:
        async with asyncio.timeout(SECONDS):
            while not self.abandoned(name):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_free(self, name: str) -> None:
        """Of inferences; bounded."""
        async with asyncio.timeout(SECONDS):
            while self.in_flight(name):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.01)

    async def until_linkless(self) -> None:
        """No connection goes on from any caller's; bounded."""
        async with asyncio.timeout(SECONDS):
            while any(session.upstreams for session in self.server._sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def until_at_rest(self) -> None:
        """No inference, no connection, no task is left; bounded."""
        for name in ("m", "team/a"):
            await self.until_free(name)
        async with asyncio.timeout(SECONDS):
            for session in list(self.server._sessions):
                await session.ended.wait()
                assert session.streams == {}
                assert session.upstreams == []
                assert session.buffered == 0
            assert self.server._context.budget.held == 0
            while self.server._context.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


class _Recorded(_Echo):
    def __init__(self, act: Any) -> None:
        super().__init__(act)
        self.methods: set[str] = set()

    def service(self, details: Any) -> Any:
        self.methods.add(details.method.rsplit("/", 1)[-1])
        return super().service(details)


@asynccontextmanager
async def proxy_before(
    act: Any,
    *,
    timeout_seconds: float = 30,
    max_message_bytes: int = MAX_MESSAGE,
    max_inflight_bytes: int = 2**30,
    limits: MessageLimits | None = None,
    takes_cancels: bool = False,
) -> AsyncIterator[ProxySetup]:
    """With the models `m` and `team/a` loaded; `act` answers in Triton's place."""
    fakes = await ControlOnFakes().open()
    for name in ("m", "team/a"):
        await fakes.load(name)
    triton = grpc.aio.server(options=NO_LIMITS)
    echo = _Recorded(act)
    triton.add_generic_rpc_handlers((echo,))
    port = triton.add_insecure_port("127.0.0.1:0")
    await triton.start()
    faults = Faults(Classifier(()))
    dataplane = GrpcDataPlane(
        faults,
        timeout_seconds=timeout_seconds,
        max_message_bytes=max_message_bytes,
        unread=unread(),
    )
    dataplane.connect(f"127.0.0.1:{port}")
    limits = limits or MessageLimits(max_message_bytes, max_message_bytes)
    inner = grpc.aio.server(options=[(name, max_message_bytes) for name, _ in NO_LIMITS])
    service = V2Service(
        fakes.control,
        fakes.control_state.triton,
        dataplane,
        faults,
        repository=None,
        is_live=lambda: True,
        is_ready=lambda: True,
        load_wait_seconds=5,
        passthrough=(),
        budget=ByteBudget(2**30),
    )
    calls = GrpcCalls(fakes.metrics, Access("grpc"), limits)
    inner.add_generic_rpc_handlers([service.service(calls)])
    folder = tempfile.mkdtemp(prefix="proxy-")
    inner.add_insecure_port(f"unix:{folder}/s")
    await inner.start()
    proxy = ProxySetup(fakes, None, "", f"127.0.0.1:{port}", echo.methods)
    context = RelayContext(
        RelayPolicy(
            fakes.control,
            fakes.control_state.triton,
            faults,
            GrpcCalls(fakes.metrics, Access("grpc_data"), limits),
            takes_cancels=lambda: takes_cancels,
        ),
        connect_to(lambda: proxy.triton),
        connect_to(lambda: f"unix:{folder}/s"),
        timeout_seconds=timeout_seconds,
        max_message_bytes=max_message_bytes,
        budget=ByteBudget(max_inflight_bytes),
        on_shed=proxy.shed.append,
    )
    proxy.server = RelayListener(context)
    proxy.address = f"127.0.0.1:{await proxy.server.listen('127.0.0.1', 0, None)}"
    try:
        yield proxy
    finally:
        await proxy.server.close(1)
        await dataplane.close()
        await inner.stop(None)
        await triton.stop(None)
        await fakes.close()
        shutil.rmtree(folder)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=NO_LIMITS) as channel:
        yield channel


def request_of(name: str = "m", *values: float, **fields: Any) -> bytes:
    return infer_request(name, *(values or (1.0,)), **fields).SerializeToString()


def prefixed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


def head_of(path: str = INFER, *more: tuple[bytes, bytes]) -> bytes:
    """There is no table any more, which has to be said at the start of a block."""
    return b"\x20" + encoded(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"x"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *more,
        ]
    )


def frame(kind: int, flags: int = 0, stream_id: int = 0, payload: bytes = b"") -> bytes:
    return frames.head(len(payload), kind, flags, stream_id) + payload


@dataclass
class Wire:
    """A client that sends the frames it is told to, and keeps what it got."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    got: list[tuple[int, int, int, bytes]] = field(default_factory=list)

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    def greet(self, settings: dict[int, int] | None = None) -> None:
        ack = frame(frames.SETTINGS, frames.ACK)
        self.send(frames.PREFACE, frames.settings(settings or {}), ack)

    async def next(self) -> tuple[int, int, int, bytes] | None:
        """Kind, flags, stream, payload; None when the connection has ended."""
        try:
            async with asyncio.timeout(SECONDS):
                head = await self.reader.readexactly(9)
                high, low, kind, flags, stream_id = frames.read_head(head)
                payload = await self.reader.readexactly(high << 8 | low)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        self.got.append((kind, flags, stream_id, payload))
        return self.got[-1]

    async def until(self, kind: int, stream_id: int | None = None) -> tuple[int, int, bytes]:
        """Flags, stream and payload of the first such frame that comes."""
        while (found := await self.next()) is not None:
            if found[0] == kind and stream_id in {None, found[2]}:
                return found[1:]
        raise AssertionError(f"no frame {kind} in {[found[:3] for found in self.got]}")

    async def ended_with(self) -> int:
        """The code of GOAWAY, and the end of the connection after it."""
        _, _, payload = await self.until(frames.GOAWAY)
        while await self.next() is not None:
            pass
        return int.from_bytes(payload[4:8], "big")

    async def answer(self, stream_id: int) -> tuple[bytes, bytes]:
        """Data, and the block that ended the stream."""
        data = b""
        while (found := await self.next()) is not None:
            kind, flags, of, payload = found
            if of == stream_id and kind == frames.DATA:
                data += payload
            if of == stream_id and kind == frames.HEADERS and flags & frames.END_STREAM:
                return data, payload
            assert not (of == stream_id and kind == frames.RST_STREAM), self.got
        raise AssertionError(f"no end of {stream_id} in {self.got}")


@asynccontextmanager
async def wire_to(address: str) -> AsyncIterator[Wire]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
