"""The http listener: aiohttp serves, and a fast path of callbacks in front of it."""

import asyncio
import heapq
import resource
from collections.abc import Callable, Iterator
from typing import NoReturn, cast

from aiohttp import ClientConnectionResetError, web

from adapter.errors import AdapterError, InvalidCall, TooManyConnections
from adapter.frontends.bodies import Limits
from adapter.frontends.drain import Drain
from adapter.frontends.http.application import (
    Application,
    Handler,
    Request,
    application_of,
    why_misread,
)
from adapter.frontends.http.connection import Connection
from adapter.frontends.http.endpoint.errors import CallInfo, new_request_id, refusal_of
from adapter.frontends.http.fast_path import FastPath
from adapter.frontends.http.head import Heads
from adapter.frontends.http.instrumentation import (
    Instrumentation,
    Refusal,
    own_refusal,
    refusal_answer,
)
from adapter.frontends.http.middleware import Serve
from adapter.runtime import background, sockets
from adapter.runtime.turns import Turns
from adapter.settings import Address

# Callers may come all at once; what does not fit waits a second for its connection.
_BACKLOG = 1024

_TOO_MANY = TooManyConnections("too many connections")
# Of those there may be, so many are closed at once: to find them takes a look at all.
_SHARE = 64
_NO_NEW_LOOK_SECONDS = 0.1
_LINGER_SECONDS = 1.0
_OTHER_DESCRIPTORS = 100
# Of a listener. Where descriptors are few, so many are served all the same. Above the second figure
# a proxy should share out connections; each takes some 30 kB here.
FEWEST_CONNECTIONS = 16
MOST_CONNECTIONS = 10_000


def bearable_connections(http_listeners: int, grpc_listeners: int) -> int:
    """Return how many connections each listener may have. With all at their limit, descriptors are
    left for files, Triton's processes, memory readings and the admin listener: a connection over
    HTTP takes two, with its connection to Triton; one over gRPC takes four.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bearable = (descriptors - _OTHER_DESCRIPTORS) // (2 * http_listeners + 4 * grpc_listeners)
    return min(max(bearable, FEWEST_CONNECTIONS), MOST_CONNECTIONS)


class Connections:
    """Bounds the connections of a listener. For one too many some are closed: idle ones, and those
    whose caller has ended its side. Where each has a request and a caller, it is refused.
    """

    def __init__(
        self,
        most: int | None = None,
        on_shed: Callable[[str], None] = lambda _: None,  # with `closed` or `refused`
    ) -> None:
        self._most = most
        self.shed = on_shed
        self._open: set[Connection] = set()
        self._lingering = 0
        self._no_look_before = 0.0

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def accept(
        self, new: Callable[[], Connection], refusal: Callable[[], bytes]
    ) -> asyncio.Protocol:
        """Return the protocol of a new connection, or the one that refuses it."""
        if self._most is None or len(self._open) < self._most or self._make_room(self._most):
            # a Connection has the methods of a Protocol without being one
            return cast("asyncio.Protocol", new())
        self.shed("refused")
        is_patient = self._lingering <= self._most // 8
        return _Refusal(self, refusal(), is_patient=is_patient)

    def add(self, connection: Connection) -> None:
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)

    def lingers(self, change: int) -> None:
        self._lingering += change

    def _make_room(self, most: int) -> bool:
        """Close some connections; return False if each has a request and a caller."""
        now = asyncio.get_running_loop().time()
        if now < self._no_look_before:
            return False
        candidates = [each for each in self._open if each.can_make_room()]
        if not candidates:
            self._no_look_before = now + _NO_NEW_LOOK_SECONDS
            return False
        for each in heapq.nsmallest(1 + most // _SHARE, candidates, key=Connection.worth):
            self.shed("closed")
            each.make_room()
        return True


class _Refusal(asyncio.Protocol):
    """`is_patient`: the caller has a second to send its request, which nobody reads, and to see the
    answer; bytes that come to a closed connection may reset it before that.
    """

    def __init__(self, connections: Connections, words: bytes, *, is_patient: bool) -> None:
        self._connections = connections
        self._words = words
        self._is_patient = is_patient

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        own = cast("asyncio.Transport", transport)
        self._connections.lingers(1)
        own.write(self._words)
        if self._is_patient:
            own.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, own.abort)
        else:
            own.close()

    def connection_lost(self, _: Exception | None) -> None:
        self._connections.lingers(-1)


class HttpListener:
    """`serve` answers what is not plain.

    `look_seconds`: how often time limits are looked at; one timer for all connections costs a
    request nothing. `is_endpoint`: calls of an endpoint come here, too.
    """

    def __init__(
        self,
        serve: Serve,
        fast: FastPath,
        heads: Heads,
        instrumentation: Instrumentation,
        *,
        drain: Drain,
        limits: Limits | None = None,
        look_seconds: float = 1,
        connections: Connections | None = None,
        turns: Turns | None = None,
        is_endpoint: bool = False,
    ) -> None:
        self.limits = limits or Limits()
        self.fast = fast
        self.heads = heads
        self.turns = turns or Turns()
        self._serve = serve
        self._instrumentation = instrumentation
        self._is_refusing = False
        self._is_endpoint = is_endpoint
        self._look_seconds = look_seconds
        drain.at_once(self._take_no_more)
        drain.then_refuse(self._refuse_arriving)
        self._connections = Connections() if connections is None else connections
        self._all_lost: asyncio.Future[None] | None = None
        self._server: asyncio.Server
        self._aiohttp: web.Server
        self._looking: asyncio.Task[NoReturn]

    async def open(self, address: Address) -> int:
        """The port, 0 for a socket of unix."""
        loop = asyncio.get_running_loop()
        # who hangs up is not computed for any more; operations of control outlive their callers
        self._aiohttp = web.Server(
            self._answer,
            request_factory=lambda *given: Request(*given, loop),  # type: ignore[call-arg,arg-type]
            handler_cancellation=True,
        )
        if address.kind == "unix":
            self._server = await loop.create_unix_server(
                self._accept, address.path, backlog=_BACKLOG
            )
        else:
            self._server = await sockets.listen(self._accept, *address.host_port, _BACKLOG)
        self._looking = background.begin(
            f"{self._instrumentation.listener}-looks",
            background.forever(self._check_connections, seconds=self._look_seconds),
        )
        return 0 if address.kind == "unix" else int(self._server.sockets[0].getsockname()[1])

    async def close(self, grace_seconds: float) -> None:
        """Take nothing new; what is in hand has its time to be answered."""
        self._server.close()
        self._take_no_more()
        for connection in self._connections:
            connection.stop()
        if not await self._are_lost(grace_seconds):
            for connection in self._connections:
                connection.abort()
            await self._are_lost(grace_seconds)
        background.end(self._looking)

    async def _are_lost(self, seconds: float) -> bool:
        if self._connections:
            self._all_lost = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_lost], timeout=seconds)
        return not self._connections

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """The whole answer is written here, so that it is known when the next request may come."""
        application = application_of(request)
        application.begins(request)
        try:
            return await self._answered(application, request)
        finally:
            application.release(request)

    async def _answered(
        self, application: Application, request: web.BaseRequest
    ) -> web.StreamResponse:
        if (why := why_misread(request)) is not None:
            return application.refuse(why)
        try:
            response = await self._serve(request)
        except ClientConnectionResetError:  # amid an answer that is streamed
            await application.caller_has_left()
        if not application.may_be_kept(request):
            response.force_close()
        try:
            await response.prepare(request)
            await response.write_eof()
            await request.writer.drain()
        except ConnectionResetError:
            await application.caller_has_left()
        await application.has_answered(request, response)
        return response

    # -- for connections --------------------------------------------------------------------

    def _accept(self) -> asyncio.Protocol:
        return self._connections.accept(
            lambda: Connection(self), lambda: self._refusal(_TOO_MANY, CallInfo(new_request_id()))
        )

    def handler(self, application: Application) -> Handler:
        return Handler(self._aiohttp, application)

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    def crowded(self) -> None:
        self._connections.shed("pipelined")

    def malformed(self, why: str) -> bytes:
        error, call_info = InvalidCall(why), CallInfo(new_request_id())
        more = {"aws_request_id": call_info.request_id} if self._is_endpoint else {}
        self._instrumentation.malformed(error, more)
        return self._refusal(error, call_info)

    def _refusal(self, error: AdapterError, call_info: CallInfo) -> bytes:
        """The answer to what was not read: where it may be a call of the endpoint, such a client
        finds what it looks for in it as well.
        """
        own = own_refusal(error, None)
        if self._is_endpoint:
            aws = refusal_of(error, call_info)
            headers = {**own.headers, **aws.headers, **call_info.headers()}
            own = Refusal(own.status, headers, f"{own.body[:-1]}, {aws.body[1:]}")
        return refusal_answer(own, self.fast.clock, is_last=True)

    def _take_no_more(self) -> None:
        self.fast.accepts_requests = False

    @property
    def linger_seconds(self) -> float:
        limits = self.limits
        return limits.linger if self.fast.accepts_requests else min(limits.linger, limits.drain)

    async def _check_connections(self) -> None:
        self.fast.clock.tick()
        now = asyncio.get_running_loop().time()
        for connection in self._connections:
            connection.check_time_limits(now)
        if self._is_refusing:
            self._refuse_arriving()

    def _refuse_arriving(self) -> None:
        """Bodies that have not wholly come, and whoever begins one now."""
        self._is_refusing = True
        for connection in list(self._connections):
            connection.refuse("the adapter is stopping")
