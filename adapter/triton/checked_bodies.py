"""Checks large, streamed and compressed bodies, while others have their turns."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import chain

from adapter.errors import InvalidRequest, PayloadTooLarge
from adapter.runtime import clock
from adapter.runtime.turns import Turns
from adapter.triton.json_limits import Limits, most_values
from adapter.triton.json_parameters import StreamedParametersCheck

# Hostile JSON takes up to 0.1 us a byte, numbers 0.001 us: so much is checked at once, and so much
# in one turn of the event loop, or less where that takes longer.
AT_ONCE_BYTES = 2**18
_PIECE_BYTES = 2**14
_TURN_BYTES = 2**16
_TURN_SECONDS = 0.001
_GZIP_OR_ZLIB = 47
_PACKED = frozenset({"gzip", "deflate"})
_HEADER_LENGTH = "inference-header-content-length"
_NUMBER = re.compile(r"[0-9]{1,19}")


async def check_in_turns(
    body: bytes,
    json_bytes: int | None,
    max_unpacked: int,
    turns: Turns,
    parameters: StreamedParametersCheck | None = None,
) -> None:
    """Check a large body as `check_whole` does, while others have their turns."""
    part = body if json_bytes is None else body[:json_bytes]
    limits = Limits(None, most_values(part, len(body), max_unpacked), parameters)
    await _Feed(limits, turns).feed(_cut(part))


async def check_packed_in_turns(
    body: bytes, limits: Limits, max_unpacked: int, turns: Turns
) -> None:
    """Check a whole compressed body, while others have their turns."""
    unpacking = _Unpacking(max_unpacked)
    feed = _Feed(limits, turns)
    await feed.feed(unpacking.feed(body))
    await feed.feed(unpacking.end())


def unpack_small(body: bytes, max_unpacked: int) -> bytes | None:
    """Return a whole compressed body unpacked; None if it is large then.

    Raises InvalidRequest for one that cannot be unpacked.
    """
    unpacking = _Unpacking(max_unpacked)
    pieces: list[bytes] = []
    size = 0
    for piece in chain(unpacking.feed(body), unpacking.end()):
        pieces.append(piece)
        size += len(piece)
        if size > AT_ONCE_BYTES:
            return None
    return b"".join(pieces)


def _cut(piece: bytes) -> Iterator[bytes]:
    for at in range(0, len(piece), _PIECE_BYTES):
        yield piece[at : at + _PIECE_BYTES]


async def checked(
    body: AsyncIterator[bytes],
    path: str,
    headers: Mapping[str, str],
    max_unpacked: int,
    turns: Turns,
    *,
    parameters: StreamedParametersCheck | None = None,
) -> AsyncIterator[bytes]:
    """All that of a stream, before each piece is passed on; before the last one its end as well,
    so that Triton never has all of a body that is refused.
    """
    most = max(max_unpacked, _length(headers))
    limits = Limits(json_bytes(path, headers), most, parameters)
    checks = _Feed(limits, turns)
    if not is_packed(headers):
        async for piece in body:
            await checks.feed(_cut(piece))
            yield piece
        return
    unpacking = _Unpacking(max_unpacked)
    before = b""
    async for piece in body:
        await checks.feed(unpacking.feed(piece))
        if before:
            yield before
        before = piece
    await checks.feed(unpacking.end())
    yield before


def is_packed(headers: Mapping[str, str]) -> bool:
    """Return whether a body comes compressed by gzip or deflate, which Triton unpacks."""
    return any(
        name.lower() == "content-encoding" and value.strip().lower() in _PACKED
        for name, value in headers.items()
    )


class _Feed:
    """Feeds one body to its limits, while others have their turns."""

    def __init__(self, limits: Limits, turns: Turns) -> None:
        self._limits = limits
        self._turns = turns
        # since its last turn
        self._seconds = 0.0
        self._size = 0

    async def feed(self, pieces: Iterator[bytes]) -> None:
        """Check pieces, and give others their turns meanwhile."""
        begun = clock.monotonic()
        for piece in pieces:
            self._limits.feed(piece)
            self._seconds += clock.monotonic() - begun
            self._size += len(piece)
            if self._seconds > _TURN_SECONDS:
                await self._turns.turn()
                self._seconds = 0.0
                self._size = 0
            elif self._size >= _TURN_BYTES:  # a little can become much, and others have work too
                await asyncio.sleep(0)
                self._size = 0
            begun = clock.monotonic()


class _Unpacking:
    """Unpacks one compressed body. Refuses a body that cannot be unpacked, which Triton reads as an
    empty one, and a body of several members, of which Triton reads the first.
    """

    def __init__(self, most: int) -> None:
        self._left = self._most = most
        self._packed = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the unpacked pieces. Raises InvalidRequest for bytes that are not compressed."""
        while data and not self._packed.eof:
            yield self._unpacked(data)
            data = self._packed.unconsumed_tail
        if data or self._packed.unused_data:
            raise InvalidRequest("the compressed body has more bytes after its end")

    def end(self) -> Iterator[bytes]:
        """Yield the last pieces. Raises InvalidRequest if the body is cut off."""
        while not self._packed.eof:
            piece = self._unpacked(b"")
            if not piece:
                break
            yield piece
        if not self._packed.eof:
            raise InvalidRequest("the compressed body is cut off")
        if self._left == self._most:
            raise InvalidRequest("the body is empty when it is unpacked")

    def _unpacked(self, data: bytes) -> bytes:
        try:
            piece = self._packed.decompress(data, _PIECE_BYTES)
        except zlib.error as error:
            raise InvalidRequest(f"the body cannot be unpacked: {error}") from error
        self._left -= len(piece)
        if self._left < 0:
            raise PayloadTooLarge(f"unpacked the body has more than {self._most} bytes")
        return piece


def _length(headers: Mapping[str, str]) -> int:
    """Return the declared length; 0 for a compressed body, which is bounded when unpacked."""
    return 0 if is_packed(headers) else int(headers.get("Content-Length", "0"))


def json_bytes(path: str, headers: Mapping[str, str]) -> int | None:
    """Return the most that Triton may take for JSON; None for all. It reads the header for `infer`
    alone, not for `generate`.
    """
    if not path.endswith("/infer"):
        return None
    said = [value for name, value in headers.items() if name.lower() == _HEADER_LENGTH]
    if not said or not all(_NUMBER.fullmatch(value) for value in said):
        return None
    return max(map(int, said))
