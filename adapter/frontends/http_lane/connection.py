"""One caller's connection: one request at a time in hand, what comes behind it waits."""

import asyncio
import math
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from adapter.errors import InvalidRequest, SlowBody
from adapter.frontends.http_lane.limits import Pace
from adapter.frontends.http_lane.outgoing import Outgoing
from adapter.frontends.http_lane.ports import Server
from adapter.frontends.http_lane.reply import Reply
from adapter.frontends.http_lane.request import Request

if TYPE_CHECKING:
    from adapter.frontends.http_lane.head import Head

# Bytes behind the request in hand from which on the caller is held back.
_AHEAD_BYTES = 64 * 2**10


class Connection(Outgoing):
    def __init__(self, server: Server) -> None:
        super().__init__(server.limits)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._head: Head | None = None
        self._request: Request | None = None
        self._is_serving = False
        self._task: asyncio.Task[None] | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._ahead = b""
        self._is_held = False
        self._is_ended = False  # by the caller: nothing more will come
        self._is_over = False  # for us: what comes is not read any more
        self._read_due = math.inf
        self._pace = Pace(server.limits)
        self._idle_since = 0.0
        self._overdue: Callable[[], None] = self.close

    @property
    def date(self) -> str:
        return self._server.date

    @property
    def is_idle(self) -> bool:
        """It has no whole head of a request in hand."""
        return self._request is None and not self._is_over

    @property
    def worth(self) -> tuple[bool, float]:
        """Of one that is idle: less where it never had a request, and the longer it is idle."""
        return self._task is not None, self._idle_since

    # -- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._server.opened(self)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        request = self._request
        if request is not None and not request.is_whole:
            self._expect_body()
            data = request.feed(data)
            if request.is_whole:
                self._body_is_whole()
                if not self._is_serving:
                    self._answered()
        if data:
            self._ahead += data
            if self._request is None:
                self._next()
            elif len(self._ahead) > _AHEAD_BYTES:
                self.hold()

    def eof_received(self) -> bool:
        """True: the caller may still read."""
        self._is_ended = True
        if self._is_over or (self._request is None and self._head is None):
            return False
        self._wait(self._server.limits.gone, self.abort)
        request = self._request
        if request is None:
            self._refuse(InvalidRequest("the head of the request broke off"))
            return True
        if not request.is_whole:
            request.fail(InvalidRequest("the body broke off"))
        return self._is_serving

    def connection_lost(self, _: Exception | None) -> None:
        self._is_over = True
        if self.is_full:
            self.resume_writing()
        if self._task is None:
            self._server.lost(self)
            return
        self._task.cancel()
        self._task.add_done_callback(lambda _: self._server.lost(self))

    # -- requests, one after the other ------------------------------------------------------

    def _next(self) -> None:
        """Read on in the head of the next request, and begin to serve it when that is there."""
        data, self._ahead = self._ahead, b""
        try:
            head, data = self._server.heads.read(self._head, data)
            if not head.is_over:
                if self._head is None:
                    self._head = head
                    self._wait(self._server.limits.head, self._head_is_late)
                return
            request = Request(head, self, time.monotonic())
        except InvalidRequest as error:
            self._refuse(error)
        else:
            self._begin(request, data)

    def _begin(self, request: Request, data: bytes) -> None:
        self._head, self._request = None, request
        self._pace = Pace(self._server.limits)
        if not request.is_whole:
            self._expect_body()
            if data:
                data = request.feed(data)
        if request.is_whole:
            self._body_is_whole()
        elif self._is_ended:
            request.fail(InvalidRequest("the body broke off"))
        self._ahead = data
        self._is_serving = True
        if self._task is None:
            self._task = self._loop.create_task(self._run())
        elif self._arrival is not None:
            self._arrival.set_result(None)

    async def _run(self) -> None:
        """One task serves all requests: one for each would cost more."""
        try:
            while not self._is_over:
                if self._is_serving and self._request is not None:
                    await self._serve(self._request)
                else:
                    self._arrival = self._loop.create_future()
                    await self._arrival
                    self._arrival = None
        finally:
            self._is_serving = False

    async def _serve(self, request: Request) -> None:
        reply = Reply(self, request)
        await self._server.serve(request, reply, self)
        if self.is_full:
            await self.drained()
        self._is_serving = False
        if not reply.is_over:
            self.abort()  # that is all that can be said of an answer that broke off
        elif reply.is_last or not request.is_soon_over():
            self._end(gently=not request.is_whole or bool(self._ahead))
        else:
            request.drop()
            if request.is_whole:
                self._answered()

    def _answered(self) -> None:
        """And the body is whole, so the next request begins here."""
        self._request = None
        self.go_on()
        self._wait_for_request()
        if not self._server.takes_more or (self._is_ended and not self._ahead):
            self.close()
        elif self._ahead:
            self._next()
            if self._is_ended and self._request is None:
                self.close()

    def is_kept_after(self, request: Request) -> bool:
        return request.head.is_kept and self._server.takes_more and request.is_soon_over()

    def _refuse(self, error: InvalidRequest) -> None:
        """Nobody knows where the next request would begin."""
        self._is_over = True
        self.write(self._server.malformed(error))
        self._end(gently=not self._is_ended)

    # -- time limits ------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Close what has waited for too long; called every now and then."""
        if now >= self.write_due:
            self.abort()
        elif now >= self._read_due:
            self._read_due = math.inf
            self._overdue()
        elif (one := self._request) and not one.is_whole and self._pace.is_slow(one.received, now):
            rate = self._server.limits.rate / 2**10
            self._fail(SlowBody(f"the body comes at less than {rate:g} KiB/s"))

    def _wait(self, seconds: float, overdue: Callable[[], None]) -> None:
        self._read_due = self._loop.time() + seconds
        self._overdue = overdue

    def _wait_for_request(self) -> None:
        self._wait(self._server.limits.idle, self.close)
        self._idle_since = self._read_due

    def _expect_body(self) -> None:
        self._wait(self._server.limits.body, self._body_is_late)
        self._pace.go_on(self._loop.time())

    def _body_is_whole(self) -> None:
        self._read_due = math.inf
        if self._is_ended:
            self._wait(self._server.limits.gone, self.abort)

    def _head_is_late(self) -> None:
        seconds = self._server.limits.head
        self._refuse(InvalidRequest(f"the head of the request took longer than {seconds:g} s"))

    def _body_is_late(self) -> None:
        seconds = self._server.limits.body
        self._fail(InvalidRequest(f"nothing came of the body for {seconds:g} s"))

    def _fail(self, error: InvalidRequest) -> None:
        if self._is_serving and self._request is not None:
            self._request.fail(error)
        else:
            self.abort()

    # -- the caller is held back ------------------------------------------------------------

    def hold(self) -> None:
        if not self._is_held and not self._is_over:
            self._is_held = True
            self._read_due = math.inf
            self._pace.stop(self._loop.time())
            self.transport.pause_reading()

    def go_on(self) -> None:
        if self._is_held and not self._is_over:
            self._is_held = False
            if self._request is not None and not self._request.is_whole:
                self._expect_body()
            self.transport.resume_reading()

    # -- ends -------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """The request in hand, if its body has not come yet."""
        if self._request is not None:
            self._request.refuse(why)

    def stop(self) -> None:
        """The server closes: at once where nothing is in hand, else behind the answer."""
        if self._request is None:
            self.close()

    def close(self) -> None:
        """When what was written is out."""
        self._is_over = True
        self._wait(self._server.limits.answer, self.abort)
        self.transport.close()

    def abort(self) -> None:
        self._is_over = True
        self.transport.abort()

    def _end(self, *, gently: bool) -> None:
        """`gently`: bytes that were not read would reset the connection, maybe before the caller
        has seen the answer; so they are read for a while, for nothing.
        """
        if not gently or self._is_ended:
            self.close()
            return
        self.go_on()
        self._is_over = True
        limits = self._server.limits
        seconds = limits.linger if self._server.takes_more else min(limits.linger, limits.hurry)
        self._wait(seconds, self.abort)
        self.transport.write_eof()
