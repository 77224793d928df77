"""The http door: inferences are served in the lane, everything else by the application behind."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from typing import Any, NoReturn, TypeAlias

from adapter import lasting
from adapter.core.model import ModelId
from adapter.core.waiting import WAITED, Waited
from adapter.errors import AdapterError, InvalidRequest, NotStarted, TooManyConnections
from adapter.frontends.drain import Drain
from adapter.frontends.edge import INTERNAL_ERROR, Observer, encoded, error_body
from adapter.frontends.http_lane.behind import Application
from adapter.frontends.http_lane.connection import Connection
from adapter.frontends.http_lane.connections import Connections
from adapter.frontends.http_lane.head import Heads
from adapter.frontends.http_lane.limits import Limits
from adapter.frontends.http_lane.reply import Headers, Reply, last_words
from adapter.frontends.http_lane.request import Request
from adapter.frontends.inference import Inferences, Route, route_of
from adapter.settings import Door

log = logging.getLogger(__name__)

# Callers may come all at once; what does not fit waits a second for its connection.
_BACKLOG = 1024

Serve: TypeAlias = Callable[[Route, Request, Reply], Awaitable[None]]
Traced: TypeAlias = Callable[[Serve, Route, Request, Reply], Awaitable[None]]

_JSON = (("Content-Type", "application/json"),)
_NOT_STARTED = (("X-Triton-Adapter-Not-Started", "1"),)
_TOO_MANY, _TOO_MANY_BODY = error_body(TooManyConnections("too many connections"), None)


class HttpLane:
    """`application` serves what is no inference, and also counts that. `traced` puts a span around
    an inference.

    `look_seconds`: how often time limits are looked at; one timer for all connections costs a
    request nothing.
    """

    def __init__(
        self,
        inferences: Inferences,
        application: Application,
        observer: Observer,
        *,
        drain: Drain,
        traced: Traced | None = None,
        limits: Limits | None = None,
        look_seconds: float = 1,
        connections: Connections | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.heads = Heads()
        self.date = formatdate(usegmt=True)
        self._is_closing = False
        self._is_refusing = False
        self._look_seconds = look_seconds
        self._inferences = inferences
        self._application = application
        self._observer = observer
        self._drain = drain
        drain.then_refuse(self._refuse_arriving)
        self._traced = traced
        self._connections = Connections() if connections is None else connections
        self._all_lost: asyncio.Future[None] | None = None
        self._server: asyncio.Server
        self._looking: asyncio.Task[NoReturn]

    async def open(self, door: Door) -> int:
        """The port, 0 for a socket of unix."""
        loop = asyncio.get_running_loop()
        if door.kind == "unix":
            self._server = await loop.create_unix_server(self._accept, door.path, backlog=_BACKLOG)
        else:
            self._server = await loop.create_server(
                self._accept, door.host, door.port, backlog=_BACKLOG
            )
        self._looking = lasting.begin(
            "http-lane-looks", lasting.forever(self._look, seconds=self._look_seconds)
        )
        return 0 if door.kind == "unix" else int(self._server.sockets[0].getsockname()[1])

    async def close(self, patience_seconds: float) -> None:
        """Take nothing new; what is in hand has its time to be answered."""
        self._server.close()
        self._is_closing = True
        for connection in self._connections:
            connection.stop()
        if not await self._are_lost(patience_seconds):
            for connection in self._connections:
                connection.abort()
            await self._are_lost(patience_seconds)
        lasting.end(self._looking)

    async def _are_lost(self, seconds: float) -> bool:
        if self._connections:
            self._all_lost = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._all_lost], timeout=seconds)
        return not self._connections

    # -- for connections --------------------------------------------------------------------

    def _accept(self) -> asyncio.Protocol:
        refusal = last_words(_TOO_MANY, encoded(_TOO_MANY_BODY), self.date, (("Retry-After", "1"),))
        return self._connections.accept(lambda: Connection(self), refusal)

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    def malformed(self, error: InvalidRequest) -> bytes:
        self._observer.malformed(error)
        status, body = error_body(error, None)
        return last_words(status, encoded(body), self.date)

    @property
    def takes_more(self) -> bool:
        """Callers are not told to go elsewhere with their next request."""
        return not (self._drain.is_on or self._is_closing)

    async def serve(self, request: Request, reply: Reply, connection: Connection) -> None:
        route = route_of(request.head.raw_target) if request.head.method == "POST" else None
        if route is None:
            await self._pass_on(request, reply, connection)
            return
        waited = Waited()
        WAITED.set(waited)
        flight = self._observer.flight(request.target)
        flight.count += 1
        try:
            if self._traced is None:
                await self._infer(route, request, reply)
            else:
                await self._traced(self._infer, route, request, reply)
        finally:
            flight.count -= 1
        if reply.status:
            seconds = time.monotonic() - request.begun
            self._observer.answered(route.frontend, route.operation, reply.status, seconds, waited)

    async def _pass_on(self, request: Request, reply: Reply, connection: Connection) -> None:
        try:
            await self._application.serve(request, reply, connection)
        except AdapterError as error:  # the body broke off
            self._observer.refused(error, request.headers, request.target, "other")
            self._tell(reply, error, None)
        except ConnectionResetError:
            return

    async def _infer(self, route: Route, request: Request, reply: Reply) -> None:
        try:
            await self._inferences.serve(route, request, reply)
        except AdapterError as error:
            model_id = self._inferences.model_of(route)
            self._observer.refused(
                error, request.headers, request.target, route.operation, model_id
            )
            self._tell(reply, error, model_id)
        except ConnectionResetError:
            return
        except Exception:
            fields = {"path": request.target[:500], "model_id": self._inferences.model_of(route)}
            log.exception("request.failed", extra=fields)
            self._say(reply, 500, INTERNAL_ERROR)

    def _tell(self, reply: Reply, error: AdapterError, model_id: ModelId | None) -> None:
        status, body = error_body(error, model_id)
        is_new = isinstance(error, NotStarted)
        self._say(reply, status, body, (*_JSON, *_NOT_STARTED) if is_new else _JSON)

    def _say(
        self, reply: Reply, status: int, body: Mapping[str, Any], headers: Headers = _JSON
    ) -> None:
        if not reply.status:
            reply.whole(status, headers, encoded(body))

    async def _look(self) -> None:
        self.date = formatdate(usegmt=True)
        now = asyncio.get_running_loop().time()
        for connection in self._connections:
            connection.look(now)
        if self._is_refusing:
            self._refuse_arriving()

    def _refuse_arriving(self) -> None:
        """Bodies that have not wholly come, and whoever begins one now."""
        self._is_refusing = True
        for connection in list(self._connections):
            connection.refuse("the adapter is stopping")
