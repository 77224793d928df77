"""JSON that Triton would die of: nested too deeply, or with a shape that it has no memory for.

200,000 levels, 200 KB of `[`, end tritonserver 2.51 (SIGSEGV), and so does a hundred bytes with a
shape of 2^33 values (SIGABRT): it makes room before it looks at the data. Only this is looked for,
with operations on whole pieces: bodies are large, and almost all of them are numbers.
"""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import accumulate

from adapter.errors import InvalidRequest, PayloadTooLarge

MOST_LEVELS = 1000
_UNPACKED_BYTES = 2**18  # at a time
_GZIP_OR_ZLIB = 47
_PACKED = frozenset({"gzip", "deflate"})
_HEADER_LENGTH = "inference-header-content-length"

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}")
# a key may be written with escapes
_SHAPE = re.compile(
    rb'"(?:s|\\u0073)(?:h|\\u0068)(?:a|\\u0061)(?:p|\\u0070)(?:e|\\u0065)"'
    rb'[ \t\r\n]*(?::[ \t\r\n]*(?:\[([^]"[{]*))?)?'
)
_LONGEST_KEY = 31
_SHARED_MEMORY = b"shared_memory_region"
_SHAPE_BYTES = 2**16
_DIGITS = 19
_STEPS = {ord("["): 1, ord("]"): -1}


class Shapes:
    """Of one JSON text, fed piece by piece. A shape may have as many values as `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """InvalidRequest for a larger one, and for one that is too long to be one."""
        text = self._rest + piece
        rest = max(0, len(text) - _LONGEST_KEY)
        for found in _SHAPE.finditer(text):
            if found.end() == len(text):  # it goes on, or may
                rest = found.start()
            elif found[1] is not None and text.startswith(b"]", found.end()):
                self._check(found[1])
        self._rest = text[rest:]
        if len(self._rest) > _SHAPE_BYTES:
            raise InvalidRequest("a shape in the JSON has no end")

    def _check(self, dimensions: bytes) -> None:
        values = 1
        for text in dimensions.split(b","):
            digits = text.strip().removeprefix(b"-")
            if len(digits) > _DIGITS:
                values = self._most + 1
            elif digits.isdigit():
                values *= int(digits)
            if values > self._most:
                raise InvalidRequest(f"a shape of more values than the {self._most} that can come")


class Depth:
    """Of one JSON text, fed piece by piece."""

    def __init__(self) -> None:
        self._levels = 0
        self._string = b""  # what is left to remember of one that goes on

    def feed(self, piece: bytes) -> None:
        """InvalidRequest as soon as it is too deep."""
        brackets = self._without_strings(piece).translate(_BRACKETS, _OTHERS)
        if self._levels + brackets.count(b"[") > MOST_LEVELS:
            levels = accumulate(map(_STEPS.__getitem__, brackets), initial=self._levels)
            if max(levels) > MOST_LEVELS:
                raise InvalidRequest(f"JSON of more than {MOST_LEVELS} levels is not accepted")
        self._levels += brackets.count(b"[") - brackets.count(b"]")

    def _without_strings(self, piece: bytes) -> bytes:
        if self._string:
            piece = self._string + piece
            self._string = b""
        found = _STRING.sub(b"", piece)
        begin = found.find(b'"')
        if begin < 0:
            return found
        # all that matters of a string that goes on is whether its next byte is escaped
        tail = found[begin + 1 :]
        backslashes = len(tail) - len(tail.rstrip(b"\\"))
        self._string = b'"\\' if backslashes % 2 else b'"'
        return found[:begin]


class Limits:
    """Both, of the JSON part of one body, which has `size` bytes at most."""

    def __init__(self, headers: Mapping[str, str], size: int) -> None:
        self._left = _json_bytes(headers)
        self._depth = Depth()
        self._shapes = Shapes(size)

    def feed(self, piece: bytes) -> None:
        if self._left is not None:
            piece = piece[: self._left]
            self._left -= len(piece)
        if piece:
            self._depth.feed(piece)
            self._shapes.feed(piece)

    def feed_whole(self, body: bytes) -> None:
        """Quickly, where it is surely not deep."""
        body = body[: self._left]
        if body.count(b"[") + body.count(b"{") > MOST_LEVELS:
            self._depth.feed(body)
        self._shapes.feed(body)


def check_whole(body: bytes, headers: Mapping[str, str], max_unpacked: int) -> None:
    """InvalidRequest for a body that Triton would die of. It is not compressed."""
    is_elsewhere = _SHARED_MEMORY in body
    Limits(headers, max_unpacked if is_elsewhere else len(body)).feed_whole(body)


async def check_packed(body: bytes, headers: Mapping[str, str], max_unpacked: int) -> None:
    """The same of a compressed one; InvalidRequest too where it does not unpack to its very end,
    PayloadTooLarge where it is too large when it is unpacked.
    """
    limits, unpacking = Limits(headers, max_unpacked), _Unpacking(max_unpacked)
    await _feed(limits, unpacking.feed(body))
    await _feed(limits, unpacking.end())


async def checked(
    body: AsyncIterator[bytes], headers: Mapping[str, str], max_unpacked: int
) -> AsyncIterator[bytes]:
    """All that of a stream, before each piece is passed on; before the last one its end as well,
    so that Triton never has all of a body that is refused.
    """
    limits = Limits(headers, max_unpacked)
    if not is_packed(headers):
        async for piece in body:
            limits.feed(piece)
            yield piece
        return
    unpacking, before = _Unpacking(max_unpacked), b""
    async for piece in body:
        await _feed(limits, unpacking.feed(piece))
        if before:
            yield before
        before = piece
    await _feed(limits, unpacking.end())
    yield before


def is_packed(headers: Mapping[str, str]) -> bool:
    return any(
        name.lower() == "content-encoding" and value.strip().lower() in _PACKED
        for name, value in headers.items()
    )


async def _feed(limits: Limits, pieces: Iterator[bytes]) -> None:
    for piece in pieces:
        limits.feed(piece)
        if len(piece) == _UNPACKED_BYTES:
            await asyncio.sleep(0)  # a little can become much, and others have work too


class _Unpacking:
    """Of one compressed body. Triton takes what it cannot unpack for an empty body, and of several
    members, or with other bytes behind it, the first: so all of that is refused.
    """

    def __init__(self, most: int) -> None:
        self._left = self._most = most
        self._packed = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What it becomes, in pieces. InvalidRequest for what is not compressed, or behind it."""
        while data and not self._packed.eof:
            yield self._unpacked(data)
            data = self._packed.unconsumed_tail
        if data or self._packed.unused_data:
            raise InvalidRequest("the compressed body has more bytes behind its end")

    def end(self) -> Iterator[bytes]:
        """The last of it. InvalidRequest where there should have been more."""
        while not self._packed.eof and (piece := self._unpacked(b"")):
            yield piece
        if not self._packed.eof:
            raise InvalidRequest("the compressed body is broken off")
        if self._left == self._most:
            raise InvalidRequest("the body is empty when it is unpacked")

    def _unpacked(self, data: bytes) -> bytes:
        try:
            piece = self._packed.decompress(data, _UNPACKED_BYTES)
        except zlib.error as error:
            raise InvalidRequest(f"the body cannot be unpacked: {error}") from error
        self._left -= len(piece)
        if self._left < 0:
            raise PayloadTooLarge(f"unpacked the body has more than {self._most} bytes")
        return piece


def _json_bytes(headers: Mapping[str, str]) -> int | None:
    """The most that Triton may take for JSON; None for all."""
    said = [value for name, value in headers.items() if name.lower() == _HEADER_LENGTH]
    if not said or not all(value.isascii() and value.isdigit() for value in said):
        return None
    return max(map(int, said))
