"""Calls of Triton's HTTP port: bytes in, Triton, bytes out. No tensors, no JSON of ours."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any

from adapter.core.faults import Faults
from adapter.core.infer import Hold, V2Call
from adapter.core.model import ModelId, TritonName
from adapter.core.waiting import add_waited
from adapter.dataplane.http1 import Connection
from adapter.dataplane.http_pool import Pool
from adapter.dataplane.http_request import head_of, write_stream, write_whole
from adapter.dataplane.json_limits import check_packed, check_whole, checked, is_packed
from adapter.errors import AdapterError, BackendUnavailable

_HEADER_LENGTH = "Inference-Header-Content-Length"

_OK = 200
_EVENT = "data: "  # generate_stream tells an error as its first event
_MAX_ERROR_BYTES = 4 * 2**20


class HttpAnswer:
    """V2Answer over a response of Triton's HTTP port."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: Connection) -> None:
        self.status = connection.status
        self.headers = connection.headers
        self._connection = connection

    @property
    def content_length(self) -> int | None:
        return self._number("Content-Length")

    @property
    def json_header_bytes(self) -> int | None:
        return self._number(_HEADER_LENGTH)

    def _number(self, header: str) -> int | None:
        text = self.headers.get(header)
        return None if text is None else int(text)

    async def read(self) -> bytes:
        return await self._connection.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        """ConnectionResetError when there should have been more: by then the caller has been told
        the status, and that its connection closes is all that can still be said.
        """
        try:
            while pieces := await self._connection.pieces():
                for piece in pieces:
                    yield piece
        except AdapterError as error:
            raise ConnectionResetError("the answer broke off") from error


class HttpDataPlane:
    """A call whose caller leaves is not taken from Triton: its answer is read for nobody, and its
    model is held until then. Only a request that Triton has not got wholly ends with its caller.

    `max_unpacked_bytes`: of a body that comes compressed.
    """

    def __init__(
        self, faults: Faults, *, timeout_seconds: float, max_unpacked_bytes: int = 2**26
    ) -> None:
        self.faults = faults
        self.max_unpacked_bytes = max_unpacked_bytes
        self.timeout_seconds = timeout_seconds
        self._pool: Pool | None = None
        self._host = ""
        self._readings: set[asyncio.Task[None]] = set()

    def connect(self, address: str) -> None:
        """`host:port` of Triton's HTTP port."""
        self._host = address
        self._pool = Pool(address)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        if self._readings:
            await asyncio.wait(self._readings)

    def read_on(self, reading: Coroutine[Any, Any, None]) -> None:
        """Beside all else, until it ends: with Triton's answer, or with its connection."""
        task = asyncio.create_task(reading)
        self._readings.add(task)
        task.add_done_callback(self._readings.discard)

    def forward(self, call: V2Call, hold: Hold | None) -> AbstractAsyncContextManager[HttpAnswer]:
        record = hold.record if hold else None
        model_id = record.id if record else None
        if self._pool is None:
            raise BackendUnavailable("Triton is not up yet", model_id=model_id, delivered=False)
        if isinstance(call.body, bytes):
            if not is_packed(call.headers):
                check_whole(call.body, call.headers, self.max_unpacked_bytes)
        elif call.body is not None:
            body = checked(call.body, call.headers, self.max_unpacked_bytes)
            call = replace(call, body=body)
        head = head_of(call, self._host)
        return _Exchange(self, self._pool, call, head, hold)


class _Exchange:
    """One call and its answer. A class costs a sixth of an @asynccontextmanager here."""

    __slots__ = ("_call", "_connection", "_head", "_hold", "_plane", "_pool", "_record", "_sender")

    def __init__(
        self,
        plane: HttpDataPlane,
        pool: Pool,
        call: V2Call,
        head: bytes,
        hold: Hold | None,
    ) -> None:
        self._plane = plane
        self._pool = pool
        self._call = call
        self._head = head
        self._hold = hold
        self._record = hold.record if hold else None
        self._sender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HttpAnswer:
        call = self._call
        if isinstance(call.body, bytes) and is_packed(call.headers):
            await check_packed(call.body, call.headers, self._plane.max_unpacked_bytes)
        self._connection = await self._pool.take(self._record.id if self._record else None)
        try:
            return await self._answer(self._connection)
        except BaseException:
            await self._end()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end()

    async def _answer(self, connection: Connection) -> HttpAnswer:
        call = self._call
        connection.begin(
            self._record.id if self._record else None,
            self._plane.timeout_seconds,
            is_head=call.method == "HEAD",
            is_stream=call.is_stream,
        )
        begun = monotonic()
        self._send()
        try:
            await connection.head()
        finally:
            if not call.is_stream:
                add_waited(monotonic() - begun)
        if connection.status != _OK and not call.is_probe:
            raise await self._fault()
        return HttpAnswer(connection)

    def _send(self) -> None:
        body = self._call.body
        if body is None or isinstance(body, bytes):
            write_whole(self._connection, self._head, body or b"")
            return
        length = self._call.headers.get("Content-Length")
        self._sender = asyncio.create_task(
            write_stream(
                self._connection, self._head, body, None if length is None else int(length)
            )
        )
        self._sender.add_done_callback(self._sent)

    def _sent(self, sender: "asyncio.Task[None]") -> None:
        if not sender.cancelled() and (error := sender.exception()) is not None:
            self._connection.fail(error)

    async def _end(self) -> None:
        connection = self._connection
        if not connection.is_over and connection.is_delivered() and self._hold is not None:
            self._hold.abandon()
            connection.take_your_time()
            self._plane.read_on(self._read_for_nobody(self._hold))
        else:
            await self._let_go()

    async def _read_for_nobody(self, hold: Hold) -> None:
        failure: AdapterError | None = None
        try:
            await self._connection.head()
            if self._connection.status != _OK and not self._call.is_probe:
                failure = await self._fault()
            while await self._connection.pieces():
                pass
        except AdapterError as error:
            failure = error
        finally:
            await self._let_go()
            hold.end(failure)

    async def _let_go(self) -> None:
        if self._connection.end():
            self._pool.give_back(self._connection)
        elif self._sender is not None and not self._sender.done():
            self._sender.cancel()
            await asyncio.wait([self._sender])

    async def _fault(self) -> AdapterError:
        raw = b""
        while len(raw) < _MAX_ERROR_BYTES and (pieces := await self._connection.pieces()):
            raw += b"".join(pieces)
        text = raw.decode("utf-8", "backslashreplace").removeprefix(_EVENT)
        with suppress(ValueError, TypeError, KeyError):  # any other shape: the raw text says most
            text = str(json.loads(text)["error"])
        return self._plane.faults.of_inference(
            self._connection.status,
            self._connection.headers.get("Content-Type", ""),
            text,
            name=self._record.name if self._record else TritonName(""),
            model_id=self._record.id if self._record else ModelId(""),
        )
