"""What the http listener uses of aiohttp beyond its documentation, one rule a test.

The listener keeps aiohttp's handler behind a connection of its own (adapter/frontends/http): a
version of aiohttp with which one of these fails cannot be taken before the listener is adapted.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http import RawRequestMessage

from tests.frontends.http.listener import until

GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
Answer = Callable[[web.BaseRequest], Any]


class Written(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""
        self.is_closed = False
        self.is_paused = False

    def write(self, data: Any) -> None:
        self.data += bytes(data)

    def writelines(self, pieces: Any) -> None:
        self.data += b"".join(pieces)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_reading(self) -> bool:
        return not self.is_paused


class Handler(web.RequestHandler):
    """With attributes of its own, and a say in what is answered to malformed requests and in when
    the transport is read.
    """

    __slots__ = ("is_held_back", "refused")

    def resume_reading(self, *args: Any, **kwargs: Any) -> None:
        super().resume_reading(*args, **kwargs)
        if getattr(self, "is_held_back", False):
            self.transport.pause_reading()

    def handle_error(self, request, status=500, exc=None, message=None):
        self.refused = (status, type(exc), message)
        self.transport = None
        return web.Response()


@asynccontextmanager
async def handling(answer: Answer, **options: Any) -> AsyncIterator[tuple[Handler, Written]]:
    handler = Handler(
        web.Server(answer, handler_cancellation=True),
        loop=asyncio.get_running_loop(),
        access_log=None,
        **{"keepalive_timeout": 1e9, "auto_decompress": False} | options,
    )
    transport = Written()
    handler.connection_made(transport)
    yield handler, transport
    handler.connection_lost(None)


async def ok(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text=request.path)


async def reads(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=await request.read())


async def test_a_handler_is_made_from_a_server_and_takes_these_options() -> None:
    """Else no connection can be served by aiohttp at all."""
    taken = inspect.signature(web.RequestHandler.__init__).parameters
    used = {"loop", "keepalive_timeout", "access_log", "max_line_size", "max_field_size"}
    assert used | {"auto_decompress"} <= set(taken)


async def test_a_handler_writes_to_the_transport_that_it_was_given_and_to_no_other() -> None:
    """Else answers of the two ways on one connection go to two places."""
    async with handling(ok) as (handler, transport):
        handler.data_received(GET % 1)
        await until(lambda: transport.data.endswith(b"/1"))
        assert handler.transport is transport


async def test_a_request_knows_the_handler_that_serves_it() -> None:
    """Else nobody finds the connection of a request."""
    seen: list[Any] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request.protocol)
        return web.Response()

    async with handling(answer) as (handler, transport):
        handler.data_received(GET % 1)
        await until(lambda: bool(transport.data))
        assert seen == [handler]


async def test_an_answer_that_is_already_written_is_not_written_again() -> None:
    """Else each answer is sent twice: the listener writes it, and aiohttp is given it."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.Response(text="once")
        await response.prepare(request)
        await response.write_eof()
        await request.writer.drain()
        return response

    async with handling(answer) as (handler, transport):
        for number in (1, 2):
            handler.data_received(GET % number)
            await until(lambda count=number: transport.data.count(b"once") == count)
        for _ in range(20):
            await asyncio.sleep(0)
        assert transport.data.count(b"HTTP/1.1 200") == 2


async def test_the_next_request_is_not_begun_before_the_one_in_hand_returns() -> None:
    """Else requests of one connection are served beside one another, by two ways."""
    begun, gate = [], asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        begun.append(request.path)
        await gate.wait()
        return web.Response()

    async with handling(answer) as (handler, _transport):
        handler.data_received(GET % 1 + GET % 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun == ["/1"]
        gate.set()
        await until(lambda: begun == ["/1", "/2"])


async def test_heads_that_were_read_are_counted_as_they_come() -> None:
    """Else a connection is closed while aiohttp still has a request to serve."""
    async with handling(ok) as (handler, _):
        assert handler._request_count == 0
        handler.data_received(GET % 1 + GET % 2)
        assert handler._request_count == 2
        handler.data_received(CHUNKED)
        assert handler._request_count == 3
        handler.data_received(b"0\r\n\r\n")
        assert handler._request_count == 3


async def test_what_is_malformed_waits_in_the_queue_as_something_else_than_a_request() -> None:
    """Else nobody tells who reads a body that the rest of it will never come."""
    gate = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await gate.wait()
        return web.Response()

    async with handling(answer) as (handler, _):
        handler.data_received(CHUNKED)
        await until(lambda: not handler._messages)
        handler.data_received(b"zz\r\n")
        (message, _), *others = handler._messages
        assert not others
        assert not isinstance(message, RawRequestMessage)
        gate.set()
    async with handling(answer) as (handler, _):
        handler.data_received(GET % 1)
        assert isinstance(handler._messages[-1][0], RawRequestMessage)


async def test_aiohttp_does_not_tell_the_reader_of_a_body_that_it_is_malformed() -> None:
    """Should this fail, then aiohttp has mended it, and the listener's own way of it may go."""
    seen: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request)
        return await reads(request)

    async with handling(answer) as (handler, _):
        handler.data_received(CHUNKED)
        await until(lambda: bool(seen))
        handler.data_received(b"zz\r\n")
        for _ in range(20):
            await asyncio.sleep(0)
        assert seen[0].content.exception() is None
        assert not seen[0].content.is_eof()


async def test_what_is_malformed_is_given_to_handle_error_with_400() -> None:
    """Else what is no HTTP is answered with aiohttp's text instead of JSON."""
    async with handling(ok) as (handler, _transport):
        handler.data_received(b"nothing\r\n\r\n")
        await until(lambda: hasattr(handler, "refused"))
        status, kind, message = handler.refused
        assert (status, issubclass(kind, Exception), bool(message)) == (400, True, True)


async def test_a_handler_whose_transport_was_taken_from_it_writes_and_closes_nothing() -> None:
    """Else a refusal of ours is followed by a second answer, or is cut off."""
    async with handling(ok) as (handler, transport):
        handler.data_received(b"nothing\r\n\r\n")
        await until(lambda: handler._task_handler is None or handler._task_handler.done())
        assert transport.data == b""
        assert not transport.is_closed


async def test_a_body_is_at_its_end_as_soon_as_its_last_byte_was_given() -> None:
    """Else a body that has wholly come is held for one that still comes."""
    seen: list[web.BaseRequest] = []
    gate = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request)
        await gate.wait()
        return web.Response()

    async with handling(answer) as (handler, _):
        handler.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
        await until(lambda: bool(seen))
        assert not seen[0].content.is_eof()
        handler.data_received(b"cd")
        assert seen[0].content.is_eof()
        assert await seen[0].read() == b"abcd"
        gate.set()


async def test_who_resumes_reading_may_pause_it_again_at_once() -> None:
    """Else what waits behind the request in hand grows with each body that ends."""
    async with handling(reads) as (handler, transport):
        handler.is_held_back = True
        handler.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
        handler.data_received(b"cd")
        await until(lambda: transport.data.endswith(b"abcd"))
        assert transport.is_paused


async def test_a_request_without_a_body_is_at_its_end_from_the_first() -> None:
    """Else the time limit of bodies runs against requests that have none."""
    seen: list[bool] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request.content.is_eof())
        return web.Response()

    async with handling(answer) as (handler, _):
        handler.data_received(GET % 1)
        handler.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await until(lambda: len(seen) == 2)
        assert seen == [True, True]


async def test_an_error_set_on_a_body_is_raised_to_who_reads_it() -> None:
    """Else who waits for a body that was given up waits on."""
    raised: list[BaseException] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        try:
            async for _ in request.content.iter_any():
                pass
        except LookupError as error:
            raised.append(error)
        return web.Response()

    seen: list[web.BaseRequest] = []

    async def first(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request)
        return await answer(request)

    async with handling(first) as (handler, _):
        handler.data_received(CHUNKED + b"2\r\n{}\r\n")
        await until(lambda: bool(seen))
        error = LookupError("gone")
        seen[0].content.set_exception(error)
        await until(lambda: bool(raised))
        assert raised == [error]
        assert seen[0].content.exception() is error


async def test_a_handler_that_is_cancelled_by_the_end_of_its_connection_ends() -> None:
    """Else what waits behind a last answer stays for ever."""
    ended = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        return web.Response()

    async with handling(answer) as (handler, _):
        handler.data_received(GET % 1)
        await until(lambda: not handler._messages and handler._current_request is not None)
    await asyncio.wait_for(ended.wait(), 60)


async def test_bodies_are_not_opened() -> None:
    """Else Triton is told of an encoding that the body has no more."""
    async with handling(reads) as (handler, transport):
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n"
        handler.data_received(head + b"\x1f\x8bxx")
        await until(lambda: transport.data.endswith(b"\x1f\x8bxx"))


async def test_a_response_says_whether_the_connection_is_kept_and_how_much_was_written() -> None:
    """Else the listener does not know whether another request may come, or an answer has begun."""
    seen: list[tuple[bool | None, int]] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.Response()
        if request.path == "/2":
            response.force_close()
        before = request.writer.output_size
        await response.prepare(request)
        await response.write_eof()
        seen.append((response.keep_alive, before))
        assert request.writer.output_size > 0
        return response

    async with handling(answer) as (handler, transport):
        handler.data_received(GET % 1 + GET % 2)
        await until(lambda: len(seen) == 2)
        assert seen == [(True, 0), (False, 0)]
        assert transport.data.count(b"Connection: close") == 1


async def test_a_full_transport_holds_back_who_writes_until_it_is_told() -> None:
    """Else answers to callers who do not read are held in memory without end."""
    drained = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x" * 2**20)
        await request.writer.drain()
        drained.set()
        return response

    async with handling(answer) as (handler, _transport):
        handler.pause_writing()
        handler.data_received(GET % 1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not drained.is_set()
        handler.resume_writing()
        await asyncio.wait_for(drained.wait(), 60)


async def test_no_server_is_named_where_the_request_class_takes_the_name_away() -> None:
    """Else each answer says which version of what serves it."""

    class Request(web.BaseRequest):
        async def _prepare_hook(self, response: web.StreamResponse) -> None:
            response.headers.popall("Server", None)

    def make(*parts: Any) -> Request:
        return Request(*parts, asyncio.get_running_loop())

    server = web.Server(ok, handler_cancellation=True, request_factory=make)
    handler, transport = (
        Handler(server, loop=asyncio.get_running_loop(), access_log=None),
        Written(),
    )
    handler.connection_made(transport)
    handler.data_received(GET % 1)
    await until(lambda: transport.data.endswith(b"/1"))
    assert b"Server:" not in transport.data
    handler.connection_lost(None)


async def test_an_error_set_as_a_chunk_ends_is_raised_when_it_is_set_once_more_after_that() -> None:
    """Else who reads a malformed body waits for ever. Should the first assertion fail, then aiohttp
    has mended it, and the second `set_exception` may go.
    """
    seen: list[web.BaseRequest] = []
    raised = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request)
        try:
            async for _ in request.content.iter_any():
                pass
        except LookupError:
            raised.set()
        return web.Response()

    async with handling(answer) as (handler, _):
        handler.data_received(CHUNKED + b"2\r\n{}")
        for _ in range(20):
            await asyncio.sleep(0)
        handler.data_received(b"\r\n")
        seen[0].content.set_exception(LookupError("gone"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not raised.is_set()
        seen[0].content.set_exception(LookupError("gone"))
        await asyncio.wait_for(raised.wait(), 60)
