"""A request in hand: its head, and its body as it comes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from adapter.errors import AdapterError, InvalidRequest, NotStarted, PayloadTooLarge
from adapter.frontends.http_lane.framing import Framing, Sized
from adapter.frontends.http_lane.head import Head

# Bodies up to this size are taken whole: one write each way instead of a stream.
WHOLE_BYTES = 2**20
# Unread bytes of a body from which on its caller is held back.
_HELD_BYTES = 256 * 2**10
# What is left of a body that nobody wants: up to this it is read, beyond it the connection closes.
_SKIPPED_BYTES = 64 * 2**10


class Wire(Protocol):
    """The connection, as its request sees it."""

    def hold(self) -> None: ...
    def go_on(self) -> None: ...
    def say_continue(self) -> None: ...


class Request:
    """`content_length` is None for a chunked body. `begun`: when its head was there, monotonic
    seconds. `received`: bytes of the body, framing included.
    """

    __slots__ = (
        *("_error", "_framing", "_is_dropped", "_is_expecting", "_pieces", "_held", "_reader"),
        *("_wire", "begun", "content_length", "head", "headers", "is_whole", "received", "target"),
    )

    def __init__(self, head: Head, wire: Wire, begun: float) -> None:
        self.head = head
        self.headers = head.headers
        self.target = head.raw_target.decode("utf-8", "surrogateescape")
        self.begun = begun
        self._framing: Framing = head.framing()
        is_sized = isinstance(self._framing, Sized)
        self.content_length = self._framing.left if is_sized else None
        self.is_whole = self._framing.is_over
        self._is_expecting = not self.is_whole and not head.is_old and _expects(head)
        self._is_dropped = False
        self._wire = wire
        self._pieces: list[bytes] = []
        self._held = 0
        self.received = 0
        self._error: AdapterError | None = None
        self._reader: asyncio.Future[None] | None = None

    # -- for the connection -----------------------------------------------------------------

    def feed(self, data: bytes) -> bytes:
        """What lies behind the body."""
        self._is_expecting = False
        self.received += len(data)
        try:
            piece, rest = self._framing.take(data)
        except InvalidRequest as error:
            self.fail(error)
            return b""
        self.is_whole = self._framing.is_over
        if piece and not self._is_dropped:
            self._pieces.append(piece)
            self._held += len(piece)
            if self._held > _HELD_BYTES and not self.is_whole:
                self._wire.hold()
        self._wake()
        return rest

    def fail(self, error: AdapterError) -> None:
        """The rest of the body will not come."""
        self._error = self._error or error
        self._wake()

    def refuse(self, why: str) -> None:
        """Whoever would serve it has to go. No-op where the body is all here."""
        if not self.is_whole:
            self.fail(NotStarted(f"{why}; the body of this request had not come yet"))

    def drop(self) -> None:
        """Nobody wants the body, or what is left of it."""
        self._is_dropped = True
        self._pieces, self._held = [], 0
        self._wire.go_on()
        self._wake()

    def is_soon_over(self) -> bool:
        """What is left of the body is known to be little, and surely comes."""
        if self.is_whole:
            return True
        is_small = isinstance(self._framing, Sized) and self._framing.left <= _SKIPPED_BYTES
        return is_small and not self._is_expecting and self._error is None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # -- for who serves it ------------------------------------------------------------------

    async def body(self, limit: int) -> bytes | AsyncIterator[bytes]:
        """Whole when small, else a stream. PayloadTooLarge before the first byte too many."""
        length = self.content_length
        if length is not None and length > limit:
            raise PayloadTooLarge(f"the body has {length} bytes; at most {limit} are accepted")
        if length is None:
            return self._counted(limit)
        if length > WHOLE_BYTES:
            return self.chunks()
        if self.is_whole:
            pieces, self._pieces = self._pieces, []
            return b"".join(pieces)
        pieces = []
        while some := await self.pieces():
            pieces += some
        return b"".join(pieces)

    async def chunks(self) -> AsyncIterator[bytes]:
        """As they come; InvalidRequest where the body breaks off."""
        while pieces := await self.pieces():
            for piece in pieces:
                yield piece

    async def pieces(self) -> list[bytes]:
        """What has come of the body, at least one piece; none at its end, or once it is dropped."""
        while not self._pieces and not self.is_whole and not self._is_dropped:
            if self._error is not None:
                raise self._error
            if self._is_expecting:
                self._is_expecting = False
                self._wire.say_continue()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pieces, self._pieces, self._held = self._pieces, [], 0
        if not self.is_whole:
            self._wire.go_on()
        return pieces

    async def _counted(self, limit: int) -> AsyncIterator[bytes]:
        seen = 0
        async for piece in self.chunks():
            seen += len(piece)
            if seen > limit:
                raise PayloadTooLarge(f"the body has more than {limit} bytes")
            yield piece


def _expects(head: Head) -> bool:
    return head.headers.get("Expect", "").lower() == "100-continue"
