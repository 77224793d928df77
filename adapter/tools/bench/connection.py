"""Connections of the load generator, which reconnect when closed, and HTTP/1.1 on httptools."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

from adapter.tools.bench.errors import needed
from adapter.tools.bench.plan import Address
from adapter.tools.bench.requests import Request

_OPEN_SECONDS = 10.0
_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `code`: HTTP status with the body's code, gRPC status, or one word."""

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
    """A connection that reconnects. `done` gets it and the arguments of `Finish`."""

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
        """Connect; raise OSError if nobody listens there."""
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


_OK = 200
_KEPT_BYTES = 4096  # of the body of an error
_SHOWN = 300


class HttpClientProtocol(ClientProtocol):
    """One HTTP/1.1 connection with one request in flight."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish)
        httptools = needed("httptools")
        self._error: type[Exception] = httptools.HttpParserError
        self._parser: Any = httptools.HttpResponseParser(self)
        self._due: float | None = None  # None while idle
        self._sent = 0.0
        self._body = b""
        self.ready.set_result(None)

    def write(self, request: Request, due: float) -> None:
        self._due = due
        self._sent = perf_counter()
        for part in request.parts:
            self.transport.write(part)

    def data_received(self, data: bytes) -> None:
        if self._due is None:
            self.fail(Failure("protocol", "bytes that nobody asked for"))
            return
        try:
            self._parser.feed_data(data)
        except self._error as error:
            self.fail(Failure("protocol", f"{type(error).__name__}: {error}"))

    # called by the parser

    def on_body(self, body: bytes) -> None:
        if len(self._body) < _KEPT_BYTES and self._parser.get_status_code() != _OK:
            self._body += body[:_KEPT_BYTES]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        due = self._due
        if due is None or status < _OK:  # an interim answer; the real one follows
            return
        self._due = None
        failure = None
        if status != _OK:
            failure, self._body = _failure(status, self._body), b""
        if not self._parser.should_keep_alive():
            self.is_open = False
            self.transport.close()
        self.finish(due, failure)

    def fail(self, failure: Failure) -> None:
        self.is_open = False
        self.transport.abort()
        if self._due is not None:
            due, self._due = self._due, None
            self.finish(due, failure)

    def expire(self, before: float, failure: Failure) -> None:
        if self._due is not None and self._sent < before:
            self.fail(failure)


def _failure(status: int, body: bytes) -> Failure:
    """Add the `code` of the adapter's JSON to the status; Triton's JSON has only `error`."""
    text = body.decode(errors="replace").strip()
    try:
        given = json.loads(text)
        code, text = given.get("code"), str(given.get("error", text))
    except (ValueError, AttributeError):
        code = None
    return Failure(f"{status} {code}" if code else str(status), text[:_SHOWN])
