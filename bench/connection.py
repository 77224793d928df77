"""Connections of the load generator, which reconnect when the server closes them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from bench.plan import Address
from bench.requests import Request

_OPEN_SECONDS = 10.0
_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    """`code` is an HTTP status with the code of the body, a gRPC status, or one word."""

    code: str
    text: str


# when the request was due, and why it failed
Finish = Callable[[float, Failure | None], None]


class ClientProtocol(asyncio.Protocol):
    """One TCP connection. Each written request ends in one call of `finish`; nothing may be written
    unless `is_open`.
    """

    def __init__(self, finish: Finish) -> None:
        self.finish = finish
        self.is_open = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.is_open = True

    def write(self, request: Request, due: float) -> None:
        raise NotImplementedError

    def expire(self, before: float, failure: Failure) -> None:
        """Fail what was written before that moment of time.perf_counter."""
        raise NotImplementedError

    def fail(self, failure: Failure) -> None:
        """Fail all requests in flight, and close the connection."""
        raise NotImplementedError

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(Failure("connection", str(exc or "closed by the server")))
        if not self.ready.done():
            self.ready.set_exception(exc or ConnectionError("closed by the server"))


class Connection:
    """`done` gets this connection and the arguments of `Finish`."""

    def __init__(
        self,
        address: Address,
        protocol: Callable[[Finish], ClientProtocol],
        done: Callable[["Connection", float, Failure | None], None],
    ) -> None:
        self._address = address
        self._make = protocol
        self._done = done
        self._protocol: ClientProtocol | None = None
        self._waiting: list[tuple[Request, float]] = []
        self._connecting: asyncio.Task[None] | None = None
        self._is_closed = False

    async def open(self) -> None:
        """OSError when nobody listens there."""
        loop, address = asyncio.get_running_loop(), self._address
        protocol = self._make(self._finish)
        async with asyncio.timeout(_OPEN_SECONDS):
            if address.socket:
                await loop.create_unix_connection(lambda: protocol, address.socket)
            else:
                await loop.create_connection(lambda: protocol, address.host, address.port)
            try:
                await protocol.ready
            except BaseException:
                protocol.transport.abort()
                raise
        self._protocol = protocol

    def send(self, request: Request, due: float) -> None:
        protocol = self._protocol
        if protocol is not None and protocol.is_open:
            protocol.write(request, due)
            return
        self._waiting.append((request, due))
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._reconnect())

    async def _reconnect(self) -> None:
        failure = None
        try:
            await self.open()
        except OSError as error:
            failure = Failure("connect", str(error))
            await asyncio.sleep(_RETRY_SECONDS)  # avoids a busy loop
        waiting, self._waiting, self._connecting = self._waiting, [], None
        for request, due in waiting:
            if failure is None:
                self.send(request, due)
            else:
                self._finish(due, failure)

    def _finish(self, due: float, failure: Failure | None) -> None:
        if not self._is_closed:
            self._done(self, due, failure)

    def expire(self, before: float, failure: Failure) -> None:
        if self._protocol is not None:
            self._protocol.expire(before, failure)

    def close(self) -> None:
        """Close at once; requests in flight are not reported."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self._protocol is not None:
            self._protocol.transport.abort()
