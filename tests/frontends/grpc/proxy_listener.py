"""Opens the gRPC proxy with fakes around it: no real Triton, and clients that speak frames."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from hpack import Decoder
from tritonclient.grpc import service_pb2 as pb

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.frontends.access import Access
from adapter.frontends.grpc.calls import GrpcCalls, MessageLimits
from adapter.frontends.grpc.relay_policy import RelayPolicy
from adapter.frontends.grpc.v2 import V2Service
from adapter.relay import frames
from adapter.relay.flow_control import STREAM_WINDOW
from adapter.relay.headers import encoded
from adapter.relay.listener import RelayListener, connect_to
from adapter.relay.policy import RelayContext
from adapter.relay.session import RelaySession
from adapter.runtime.byte_budget import ByteBudget
from adapter.triton.grpc import GrpcDataPlane
from tests.fakes.control import ControlOnFakes
from tests.fakes.grpc_triton import _Echo
from tests.fakes.unread import unread
from tests.grpc_calls import SERVICE, infer_request

INFER, STREAM = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"
SECONDS = 10
MIB = 2**20
MAX_MESSAGE = 32 * MIB
NO_LIMITS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@dataclass
class ProxySetup:
    """`triton` is where its upstream is; a test may point it elsewhere before the first call."""

    fakes: ControlOnFakes
    server: RelayListener
    address: str
    triton: str
    answering: "_Recorded"  # in Triton's place
    shed: list[str] = field(default_factory=list)

    @property
    def context(self) -> RelayContext:
        return self.server._context

    @property
    def budget(self) -> ByteBudget:
        return self.context.budget

    @property
    def session(self) -> RelaySession:
        """The only connection that there is."""
        (session,) = self.server._sessions
        return session

    @property
    def methods(self) -> set[str]:
        """The methods that Triton was asked for."""
        return self.answering.methods

    def answer_with(self, act: Any) -> None:
        """Have `act` answer in Triton's place from now on."""
        self.answering._act = act

    def in_flight(self, name: str) -> int:
        return self.fakes.control.registry.serving(name).usage.in_flight

    def abandoned(self, name: str) -> int:
        """Of those in flight, for how many nobody waits any more."""
        return self.fakes.control.registry.serving(name).usage.abandoned

    def counted(
        self, code: str, method: str = "ModelInfer", frontend: str = "grpc_data"
    ) -> float | None:
        """Calls that went to Triton directly; those of the fallback server are `grpc`'s."""
        labels = {"frontend": frontend, "method": method, "code": code}
        return self.fakes.metrics.registry.get_sample_value("triton_adapter_requests_total", labels)

    async def until_counted(self, code: str) -> None:
        await until(lambda: self.counted(code))

    async def until_abandoned(self, name: str) -> None:
        await until(lambda: self.abandoned(name))

    async def until_free(self, name: str) -> None:
        """Wait until no inference is in flight."""
        await until(lambda: not self.in_flight(name))

    async def until_at_rest(self) -> None:
        """Wait until no inference, no connection and no task is left."""
        for name in ("m", "team/a"):
            await self.until_free(name)
        for session in list(self.server._sessions):
            async with asyncio.timeout(SECONDS):
                await session.ended.wait()
            assert session.streams == {}
            assert session.upstreams == []
            assert session.buffered == 0
        assert self.budget.held == 0
        await until(lambda: not self.context.tasks)


async def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until the condition is true, which no event tells."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class _Recorded(_Echo):
    def __init__(self, act: Any) -> None:
        super().__init__(act)
        self.methods: set[str] = set()

    def service(self, details: Any) -> Any:
        self.methods.add(details.method.rsplit("/", 1)[-1])
        return super().service(details)


def limited(**limits: Any) -> pytest.MarkDecorator:
    """Give the proxy of a test other limits."""
    return pytest.mark.parametrize("proxy", [limits], indirect=True, ids=["limited"])


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
    recorded = _Recorded(act)
    triton.add_generic_rpc_handlers((recorded,))
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
    budget = ByteBudget(max_inflight_bytes)
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
        budget=budget,
    )
    calls = GrpcCalls(fakes.metrics, Access("grpc"), limits)
    inner.add_generic_rpc_handlers([service.service(calls)])
    folder = tempfile.mkdtemp(prefix="proxy-")
    inner.add_insecure_port(f"unix:{folder}/s")
    await inner.start()
    proxy = ProxySetup(fakes, None, "", f"127.0.0.1:{port}", recorded)
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
        budget=budget,
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


async def echo(message: bytes, _: Any) -> bytes:
    """Answer with the name, the id and the tensors of the request."""
    asked = pb.ModelInferRequest.FromString(message)
    return pb.ModelInferResponse(
        model_name=asked.model_name, id=asked.id, raw_output_contents=asked.raw_input_contents
    ).SerializeToString()


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=NO_LIMITS) as channel:
        yield channel


async def refusal(call: Awaitable[object]) -> tuple[str, str]:
    """Return the code and the text of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code().name, raised.value.details()


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


def begin(stream_id: int, path: str = INFER, *more: tuple[bytes, bytes]) -> bytes:
    """Return the HEADERS of a call."""
    return frames.header_block(stream_id, head_of(path, *more), end=False)


def complete(stream_id: int, *name: str) -> bytes:
    """Return the message of an inference, which ends its stream."""
    return frame(frames.DATA, frames.END_STREAM, stream_id, prefixed(request_of(*name)))


def request(stream_id: int, *name: str) -> bytes:
    return begin(stream_id) + complete(stream_id, *name)


def big_request(name: str, size: int) -> bytes:
    asked = pb.ModelInferRequest(model_name=name, raw_input_contents=[bytes(size)])
    return asked.SerializeToString()


def data_frames(
    stream_id: int, message: bytes, size: int = frames.FRAME_BYTES, *, ends: bool = True
) -> list[bytes]:
    """Return the message in DATA frames of this size, of which the last one ends the stream."""
    starts = range(0, len(message), size)
    return [
        frame(
            frames.DATA,
            int(ends and start == starts[-1]),
            stream_id,
            message[start : start + size],
        )
        for start in starts
    ]


CODES = {code.value[0]: code.name for code in grpc.StatusCode}


def status(block: bytes) -> str:
    """Return the gRPC status of trailers as the adapter writes them."""
    return CODES[int(block.split(b"grpc-status")[1][1:3].lstrip(b"\1\2").split(b"\0")[0])]


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

    def widen(self) -> None:
        """Give all the windows that there may be, of the connection and of each stream."""
        self.send(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}))
        self.send(frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW))

    async def pour(self, stream_id: int, message: bytes, size: int = frames.FRAME_BYTES) -> None:
        """Send a request as fast as the window of its stream allows, in frames of this size."""
        self.send(begin(stream_id))
        room = STREAM_WINDOW
        for piece in data_frames(stream_id, message, size):
            room -= len(piece) - frames.HEAD_BYTES
            while room < 0:
                room += int.from_bytes((await self.until(frames.WINDOW_UPDATE, stream_id))[2])
            self.send(piece)

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

    async def reset_of(self, stream_id: int) -> int:
        """The code with which the stream is reset."""
        _, _, code = await self.until(frames.RST_STREAM, stream_id)
        return int.from_bytes(code)

    async def round_trip(self) -> None:
        """All that was sent before has been handled: a PING behind it is answered."""
        self.send(frames.ping(b"all here"))
        while (await self.until(frames.PING))[2] != b"all here":
            pass

    async def data(self, stream_id: int, size: int) -> bytes:
        """At least so many bytes of DATA."""
        found = bytearray()
        while len(found) < size:
            found += (await self.until(frames.DATA, stream_id))[2]
        return bytes(found)

    async def headers_of(self, stream_id: int) -> list[dict[bytes, bytes]]:
        """The headers and the trailers of an answer, once it has ended; read by another HPACK."""
        await self.answer(stream_id)
        decoder, found = Decoder(), []
        for kind, _, of, payload in self.got:
            if kind == frames.HEADERS:
                headers = dict(decoder.decode(payload, raw=True))
                found += [headers] if of == stream_id else []
        return found

    async def ended_with(self) -> int:
        """The code of GOAWAY, and the end of the connection after it."""
        _, _, payload = await self.until(frames.GOAWAY)
        while await self.next() is not None:
            pass
        return int.from_bytes(payload[4:8], "big")

    async def ask(self, stream_id: int, block: bytes) -> tuple[bytes, bytes]:
        """Send a whole call with these headers; return its data, and the block that ended it."""
        self.send(frames.header_block(stream_id, block, end=False), complete(stream_id))
        return await self.answer(stream_id)

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
