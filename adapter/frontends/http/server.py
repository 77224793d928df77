"""Listens for clients over HTTP, closes connections that are too many or wait too long, drains."""

import asyncio
import heapq
import resource
from collections.abc import Callable, Coroutine, Iterator
from typing import NoReturn, cast

from adapter.errors import AdapterError, InvalidCall, TooManyConnections
from adapter.frontends.bodies import Limits
from adapter.frontends.drain import Drain
from adapter.frontends.endpoint.errors import CallInfo, new_request_id, refusal_of
from adapter.frontends.http.answers import JSON_LINE, first_line
from adapter.frontends.http.connection import Connection, Parts
from adapter.frontends.http.instrumentation import Refusal, encoded, own_refusal, write_fields
from adapter.frontends.http.plans import Heads
from adapter.frontends.http.serve import Service
from adapter.runtime import background, sockets
from adapter.runtime.turns import Turns
from adapter.settings import Address

# Clients may come all at once; one whose connection does not fit waits a second for it.
_BACKLOG = 1024
_TOO_MANY = TooManyConnections("too many connections")
# So large a part of a full listener's connections is closed at once: to find them takes a look at
# all.
_SHARE = 64
_NO_NEW_LOOK_SECONDS = 0.1
_LINGER_SECONDS = 1.0
_OTHER_DESCRIPTORS = 160  # 64 of them at two listeners of operators
# Of a listener. Where descriptors are few, so many are served all the same. Above the second figure
# a proxy should share out connections; each takes some 30 kB here.
FEWEST_CONNECTIONS = 16
MOST_CONNECTIONS = 10_000


def bearable_connections(http_listeners: int, grpc_listeners: int) -> int:
    """Return how many connections each listener may have.

    With all at their limit, descriptors remain for files, Triton's processes, memory readings and
    the admin listener: a connection over HTTP takes two, with its connection to Triton; one over
    gRPC takes four.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bearable = (descriptors - _OTHER_DESCRIPTORS) // (2 * http_listeners + 4 * grpc_listeners)
    return min(max(bearable, FEWEST_CONNECTIONS), MOST_CONNECTIONS)


class Connections:
    """Bounds the connections of a listener.

    For one too many some are closed: idle ones, and those whose client has ended its side. Where
    each has a request and a client, the new one is refused.
    """

    def __init__(
        self,
        limit: int | None = None,
        on_shed: Callable[[str], None] = lambda _: None,  # with `closed` or `refused`
    ) -> None:
        self._limit = limit
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
        if self._limit is None or len(self._open) < self._limit or self._make_room(self._limit):
            # a Connection has the methods of a Protocol without being one
            return cast("asyncio.Protocol", new())
        self.shed("refused")
        is_patient = self._lingering <= self._limit // 8
        return _RefusedConnection(self, refusal(), is_patient=is_patient)

    def add(self, connection: Connection) -> None:
        """Note that a connection is open."""
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        """Note that a connection is lost."""
        self._open.discard(connection)

    def count_lingering(self, change: int) -> None:
        """Count refused connections that are still open."""
        self._lingering += change

    def _make_room(self, limit: int) -> bool:
        """Close some connections; return False if each has a request and a client."""
        now = asyncio.get_running_loop().time()
        if now < self._no_look_before:
            return False
        candidates = [connection for connection in self._open if connection.can_make_room()]
        if not candidates:
            self._no_look_before = now + _NO_NEW_LOOK_SECONDS
            return False
        for connection in heapq.nsmallest(1 + limit // _SHARE, candidates, key=Connection.worth):
            self.shed("closed")
            connection.make_room()
        return True


class _RefusedConnection(asyncio.Protocol):
    """Tells a client that there are too many.

    It may have a second to send its request, which nobody reads, and to see the answer: bytes that
    come to a closed connection may reset it before that.
    """

    def __init__(self, connections: Connections, answer: bytes, *, is_patient: bool) -> None:
        self._connections = connections
        self._answer = answer
        self._is_patient = is_patient

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Write the refusal."""
        own = cast("asyncio.Transport", transport)
        self._connections.count_lingering(1)
        own.write(self._answer)
        if self._is_patient:
            own.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, own.abort)
        else:
            own.close()

    def connection_lost(self, _: Exception | None) -> None:
        """Count the refused connection no longer."""
        self._connections.count_lingering(-1)


class HttpServer:
    """Accepts clients at one address, and has their connections served."""

    def __init__(
        self,
        service: Service,
        parts: Parts,
        heads: Heads,
        *,
        drain: Drain,
        limits: Limits | None = None,
        check_interval_seconds: float = 1,  # of the timer that checks time limits
        connections: Connections | None = None,
        turns: Turns | None = None,
        is_endpoint: bool = False,  # calls of an endpoint come here too
    ) -> None:
        self.limits = limits or Limits()
        self.parts = parts
        self.heads = heads
        self.turns = turns or Turns()
        self._service = service
        self._is_refusing = False
        self._is_endpoint = is_endpoint
        self._check_interval_seconds = check_interval_seconds
        drain.on_begin(self._stop_keeping_connections)
        drain.on_noticed(self._refuse_arriving)
        self._connections = Connections() if connections is None else connections
        self._all_lost: asyncio.Future[None] | None = None
        self._server: asyncio.Server
        self._file: sockets.SocketFile | None = None  # of a unix socket
        self._checking: asyncio.Task[NoReturn]

    async def open(self, address: Address) -> int:
        """Listen at an address. Return the port, 0 for a socket of unix."""
        loop = asyncio.get_running_loop()
        if address.kind == "unix":
            self._server = await loop.create_unix_server(
                self._create_protocol, address.path, backlog=_BACKLOG
            )
            self._file = sockets.SocketFile(address.path)
        else:
            self._server = await sockets.listen(self._create_protocol, *address.host_port, _BACKLOG)
        self._checking = background.begin(
            f"{self.parts.instrumentation.listener}-looks",
            background.forever(self._check_connections, seconds=self._check_interval_seconds),
        )
        return 0 if address.kind == "unix" else int(self._server.sockets[0].getsockname()[1])

    async def close(self, grace_seconds: float) -> None:
        """Accept nothing new; requests in hand have their time to be answered."""
        if self._file is not None:
            self._file.remove()
        self._server.close()
        self._stop_keeping_connections()
        for connection in self._connections:
            connection.stop()
        if not await self._wait_until_lost(grace_seconds):
            for connection in self._connections:
                connection.abort()
            await self._wait_until_lost(grace_seconds)
        background.end(self._checking)

    async def _wait_until_lost(self, seconds: float) -> bool:
        """Wait until no connection is open, for so many seconds at most; return whether none is."""
        if self._connections:
            self._all_lost = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_lost], timeout=seconds)
        return not self._connections

    # -- for connections --------------------------------------------------------------------

    def _create_protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection: a Connection, or one that refuses it where there
        are too many.
        """
        return self._connections.accept(
            lambda: Connection(self),
            lambda: self._word_early(_TOO_MANY, CallInfo(new_request_id())),
        )

    def serve(self, connection: Connection) -> Coroutine[object, None, None]:
        """Return the coroutine that serves a connection."""
        return self._service.serve(connection)

    def add(self, connection: Connection) -> None:
        """Add an open connection to those that are checked, and closed at the end."""
        self._connections.add(connection)

    def remove(self, connection: Connection) -> None:
        """Remove a lost connection, and wake `close` if it was the last."""
        self._connections.discard(connection)
        if not self._connections and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    def count_crowded(self) -> None:
        """Count a connection that ends early: what came behind its request has no room."""
        self._connections.shed("pipelined")

    def word_misread(self, reason: str) -> bytes:
        """Return the answer to what is no request of HTTP."""
        error = InvalidCall(reason)
        call_info = CallInfo(new_request_id())
        more = {"aws_request_id": call_info.request_id} if self._is_endpoint else {}
        self.parts.instrumentation.record_malformed(error, more)
        return self._word_early(error, call_info)

    def _word_early(self, error: AdapterError, call_info: CallInfo) -> bytes:
        """Return the answer to a request that was not read: where it may be a call of the endpoint,
        such a client finds what it looks for in it as well.
        """
        own = own_refusal(error, None)
        if self._is_endpoint:
            aws = refusal_of(error, call_info)
            headers = {**own.headers, **aws.headers, **call_info.headers()}
            own = Refusal(own.status, headers, f"{own.body[:-1]}, {aws.body[1:]}")
        body = encoded(own.body)
        length = b"Content-Length: %d\r\n" % len(body)
        fields = write_fields(own.headers) + JSON_LINE + length
        return first_line(own.status) + fields + self.parts.clock.last + body

    def renew_connections(self) -> None:
        """Have clients connect anew: the next answer on each connection closes it, as in a drain.

        An idle connection is not closed at once, since its client may have begun a request.
        """
        for connection in self._connections:
            connection.should_renew = True

    def _stop_keeping_connections(self) -> None:
        """Have each connection close behind its present request, as the adapter drains. New
        connections are still accepted.
        """
        self.parts.accepts_requests = False

    @property
    def linger_seconds(self) -> float:
        """Return how long a client may go on sending bytes that nobody reads."""
        limits = self.limits
        if self.parts.accepts_requests:
            return limits.linger
        return min(limits.linger, limits.drain)

    async def _check_connections(self) -> None:
        """Check the time limits of all connections. Called by a timer."""
        self.parts.clock.tick()
        now = asyncio.get_running_loop().time()
        for connection in self._connections:
            connection.check_time_limits(now)
        if self._is_refusing:
            self._refuse_arriving()

    def _refuse_arriving(self) -> None:
        """Refuse requests whose bodies have not wholly arrived, now and each time the
        timer runs.
        """
        self._is_refusing = True
        for connection in self._connections:
            connection.refuse_body("the adapter is stopping")
