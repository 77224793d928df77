"""The aiohttp application behind the lane: it sees one request, in a frame that we wrote."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from adapter.frontends.edge import passed_on
from adapter.frontends.http_lane.connection import Connection
from adapter.frontends.http_lane.reply import Reply
from adapter.frontends.http_lane.request import Request


class Application:
    """`handler` makes a RequestHandler, which must tell `Behind` where its answer ends."""

    def __init__(self, handler: Callable[[], web.RequestHandler]) -> None:
        self._handler = handler

    async def serve(self, request: Request, reply: Reply, connection: Connection) -> None:
        handler = self._handler()
        behind = Behind(request, reply, connection)
        connection.watcher = handler
        handler.connection_made(behind)
        try:
            if connection.is_full:
                handler.pause_writing()
            handler.data_received(_head(request))
            await behind.feed(handler)
            await behind.ended
        finally:
            connection.watcher = None
            behind.close()
            handler.connection_lost(None)


class Behind(asyncio.Transport):
    """A transport that ends with its request; the connection goes on."""

    def __init__(self, request: Request, reply: Reply, connection: Connection) -> None:
        super().__init__()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._reply = reply
        self._connection = connection
        self._resumed: asyncio.Future[None] | None = None

    async def feed(self, handler: web.RequestHandler) -> None:
        is_chunked = self._request.content_length is None
        async for piece in self._request.chunks():
            handler.data_received(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
            if self._resumed is not None:
                await self._resumed
        if is_chunked and not self.ended.done():
            handler.data_received(b"0\r\n\r\n")

    # -- what the handler says of its answer ------------------------------------------------

    def may_be_kept(self) -> bool:
        return self._connection.is_kept_after(self._request)

    def answered(self, response: web.StreamResponse) -> None:
        if not self.ended.done():
            self._reply.is_over = True
            self._reply.is_last = not response.keep_alive
            self.close()

    # -- asyncio.Transport ------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.ended.done():
            self._reply.status = web.HTTPOk.status_code  # the head is out, whatever it says
            self._connection.write(bytes(data))

    def close(self) -> None:
        self.resume_reading()
        self._request.drop()
        if not self.ended.done():
            self.ended.set_result(None)

    abort = close

    def is_closing(self) -> bool:
        return self.ended.done()

    def pause_reading(self) -> None:
        if self._resumed is None and not self.ended.done():
            self._resumed = asyncio.get_running_loop().create_future()

    def resume_reading(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._connection.transport.get_extra_info(name, default)


def _head(request: Request) -> bytes:
    head, length = request.head, request.content_length
    lines = [f"{head.method} {request.target} HTTP/1.{0 if head.is_old else 1}"]
    lines += [f"Host: {host}" for host in request.headers.getall("Host", ())]
    lines += [f"{name}: {value}" for name, value in passed_on(request.headers).items()]
    lines.append(f"Connection: {'keep-alive' if head.is_kept else 'close'}")
    lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
    return "\r\n".join([*lines, "\r\n"]).encode("utf-8", "surrogateescape")
