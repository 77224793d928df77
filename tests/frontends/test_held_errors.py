"""An error that was answered is gone, and what its frames held of the request with it: nothing
waits for Python's garbage collector, which seldom looks at what is old.
"""

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from adapter.errors import AdapterError, ArtifactNotFound
from adapter.frontends.access import Access
from adapter.frontends.admin import pages
from adapter.frontends.bodies import Limits
from adapter.frontends.grpc import streams
from adapter.frontends.grpc.calls import GrpcCalls, MessageLimits
from adapter.frontends.http.head import MisreadHead
from adapter.frontends.routes import Scope
from adapter.telemetry.metrics import Metrics
from tests.fakes.http_triton import OK, says
from tests.frontends.grpc.proxy_listener import (
    INFER,
    STREAM,
    channel_to,
    proxy_before,
    request_of,
)
from tests.frontends.http.listener import ANYWHERE, HANDLED, PLANNED, head, opened, request, until
from tests.grpc_calls import SERVICE

FIELDS = b"\x12\x00" * 2**16 + b"\x12\x00"  # one more than a message may have
TOKEN = "a token"  # noqa: S105 - nobody has it
NO_JSON = (
    b"HTTP/1.1 500 No\r\nContent-Type: application/json\r\nContent-Length: 55\r\n\r\n"
    b'{"error":"failed to parse the request JSON buffer: no"}'
)
BROKEN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\ndata: {}\n\n\r\n"
FAILED = b'HTTP/1.1 500 No\r\nContent-Length: 13\r\n\r\n{"error":"x"}'


class Kept:
    """The errors of the adapter that were made and are still referred to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[AdapterError]] = []
        self.count = 0
        init = AdapterError.__init__

        def made(error: AdapterError, *args: object, **kwargs: object) -> None:
            init(error, *args, **kwargs)
            self._made.append(weakref.ref(error))
            self.count += 1

        monkeypatch.setattr(AdapterError, "__init__", made)

    @property
    def errors(self) -> list[AdapterError]:
        return [error for made in self._made if (error := made()) is not None]

    async def until_none(self) -> None:
        assert self.count
        await until(lambda: not self.errors)


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is there already is not looked at: errors of other tests, and it takes a second."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def kept(no_gc: None, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(monkeypatch)


async def until_without_frames(kind: type[Exception]) -> None:
    """Bounded in looks at all new objects. A connection may hold an error, for as long as it is
    there itself.
    """
    for _ in range(100):
        errors = [one for one in gc.get_objects() if isinstance(one, kind)]
        if not any(error.__traceback__ for error in errors):
            return
        del errors
        await asyncio.sleep(0.01)
    raise AssertionError(f"{kind.__name__} holds frames")


async def answers(*_: object) -> bytes:
    return b""


async def fails(*_: object) -> bytes:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("asked", "said", "status"),
    [
        (request(PLANNED), FAILED, 500),
        (request("/v2/models/m/infer"), FAILED, 500),
        (request("/models/other/invoke"), FAILED, 404),
        (request("/v2/models/other/infer"), FAILED, 404),
        (request(PLANNED, b"x", "TE: trailers"), NO_JSON, 400),
    ],
    ids=["invoke", "infer", "invoke other", "infer other", "no JSON"],
)
async def test_an_error_over_rest_is_not_kept(kept, asked, said, status):
    async with opened(says(said)) as listener:
        caller = await listener.connect()
        assert (await caller.ask(asked)).status == status
        await kept.until_none()


async def test_error_of_broken_stream_is_not_kept(kept):
    async with opened(says(BROKEN, closes=True)) as listener:
        caller = await listener.connect()
        await caller.send(request("/v2/models/m/generate_stream"))
        assert (await caller.head()).status == 200
        await caller.rest()
        await kept.until_none()


@pytest.mark.parametrize(
    ("error", "status"), [(ArtifactNotFound("no such key"), 400), (RuntimeError("a bug"), 500)]
)
async def test_endpoint_error_keeps_no_frames_once_answered(error, status):
    async with opened() as listener:
        listener.raised = error
        caller = await listener.connect()
        assert (await caller.ask(request("/endpoints/any/invocations"))).status == status
        assert error.__traceback__ is None


@pytest.mark.parametrize("asked", [PLANNED, "/v2/models/m/infer", HANDLED])
@pytest.mark.parametrize("end", ["half", "reset"])
async def test_error_of_truncated_body_keeps_no_frames(no_gc, asked, end):
    async with opened(says(OK), limits=Limits(gone=0.01)) as listener:
        caller = await listener.connect()
        await caller.send(head(asked, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n")
        await until(lambda: listener.in_flight() == 1 or asked == HANDLED)
        if end == "half":
            caller.writer.write_eof()
        else:
            caller.reset()
        await listener.until_lost()
        await until(lambda: listener.in_flight() == 0)
        await until_without_frames(AdapterError if end == "half" else ConnectionResetError)


@pytest.mark.parametrize(
    "piece", [b"no HTTP\r\n\r\n", b"POST / HTTP/1.1\r\n" + b"a: b\r\n" * 999 + b"\r\n"]
)
async def test_error_of_invalid_http_keeps_no_frames(no_gc, piece):
    async with opened() as listener:
        caller = await listener.connect()
        await caller.send(piece)
        assert (await caller.answer()).status == 400
        await until_without_frames(MisreadHead)


@pytest.mark.parametrize(
    ("path", "message", "code"),
    [
        (INFER, request_of("m"), "UNKNOWN"),  # of Triton
        (INFER, request_of("other"), "NOT_FOUND"),
        (INFER, FIELDS, "INVALID_ARGUMENT"),
        (f"/{SERVICE}/ModelReady", b"\x0b", "INVALID_ARGUMENT"),
    ],
)
@pytest.mark.parametrize(
    "compression",
    [grpc.Compression.NoCompression, grpc.Compression.Gzip],
    ids=["at once", "by the server behind the proxy"],
)
async def test_grpc_error_is_not_kept(kept, path, message, code, compression):
    async with proxy_before(fails) as proxy, channel_to(proxy.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(path)(message, compression=compression)
        assert raised.value.code().name == code
        await kept.until_none()


@pytest.mark.parametrize(
    ("message", "code"), [(request_of("other"), "OK"), (FIELDS, "INVALID_ARGUMENT")]
)
async def test_refused_stream_message_is_not_kept(kept, monkeypatch, message, code):
    """By a message of the stream, or, if it is malformed, by the end of the stream."""
    messages: list[bytes] = []
    read = streams.read_field

    def seen(message: bytes, field: int) -> bytes | None:
        messages.append(message)
        return read(message, field)

    monkeypatch.setattr(streams, "read_field", seen)
    async with proxy_before(answers) as proxy, channel_to(proxy.address) as channel:
        call = channel.stream_stream(STREAM)(iter([message]))
        with suppress(grpc.aio.AioRpcError):
            [_ async for _ in call]
        assert (await call.code()).name == code
        await kept.until_none()
        (held,), bare = messages, bytes(1000)
        messages.clear()
        await until(lambda: sys.getrefcount(held) == sys.getrefcount(bare))


async def test_admin_error_is_not_kept(kept, monkeypatch):
    monkeypatch.setattr(pages.log, "disabled", True)  # pytest keeps what is logged

    class Pages:
        def handlers(self):
            return {"readyz": self._refuse, "livez": self._fail}

        async def _refuse(self, request):
            Access("admin", token=TOKEN).check(
                Scope.CONTROL, request.headers.getall("Authorization", ())
            )

        async def _fail(self, _):
            raise ArtifactNotFound("no page expects this error")

    app = pages.application(ANYWHERE, Pages())
    async with TestServer(app) as server, ClientSession() as session:
        async with session.get(server.make_url("/readyz")) as answer:
            assert answer.status == 401
        async with session.get(server.make_url("/livez")) as answer:
            assert answer.status == 500
        await kept.until_none()


def test_logged_grpc_bug_keeps_no_frames():
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError("a bug")
    GrpcCalls(Metrics(), Access("grpc"), MessageLimits()).status_of("ModelInfer", raised.value)
    assert raised.value.__traceback__ is None
