"""JSON that is nested too deeply for Triton, whose parser takes stack for each level.

200,000 levels, 200 KB of `[`, end tritonserver 2.51 (SIGSEGV). Only what is nested is looked at,
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
_STEPS = {ord("["): 1, ord("]"): -1}


class Depth:
    """Of one JSON text, fed piece by piece. `most`: how many of its bytes are JSON, all if None."""

    def __init__(self, most: int | None = None) -> None:
        self._left = most
        self._levels = 0
        self._string = b""  # what is left to remember of one that goes on

    def feed(self, piece: bytes) -> None:
        """InvalidRequest as soon as it is too deep."""
        if self._left is not None:
            piece = piece[: self._left]
            self._left -= len(piece)
        if not piece:
            return
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


def is_shallow(body: bytes) -> bool:
    """Surely, and quickly told."""
    return body.count(b"[") + body.count(b"{") <= MOST_LEVELS


def check_whole(body: bytes, headers: Mapping[str, str], max_unpacked: int) -> None:
    """InvalidRequest for a body that Triton would die of; PayloadTooLarge for one that is too
    large when it is unpacked.
    """
    depth = Depth(_json_bytes(headers))
    if _is_packed(headers):
        for piece in _Unpacking(max_unpacked).feed(body):
            depth.feed(piece)
    elif not is_shallow(body):
        depth.feed(body)


async def checked(
    body: AsyncIterator[bytes], headers: Mapping[str, str], max_unpacked: int
) -> AsyncIterator[bytes]:
    """The same of a stream: each piece before it is passed on."""
    depth = Depth(_json_bytes(headers))
    unpacking = _Unpacking(max_unpacked) if _is_packed(headers) else None
    async for piece in body:
        if unpacking is None:
            depth.feed(piece)
        else:
            for unpacked in unpacking.feed(piece):
                depth.feed(unpacked)
                await asyncio.sleep(0)  # a little can become much
        yield piece


class _Unpacking:
    def __init__(self, most: int) -> None:
        self._left = self._most = most
        self._packed = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What it becomes, as Triton will unpack it: up to the end of the first member."""
        while data and not self._packed.eof:
            try:
                piece = self._packed.decompress(data, _UNPACKED_BYTES)
            except zlib.error as error:
                raise InvalidRequest(f"the body cannot be unpacked: {error}") from error
            self._left -= len(piece)
            if self._left < 0:
                text = f"unpacked the body has more than {self._most} bytes"
                raise PayloadTooLarge(text)
            yield piece
            data = self._packed.unconsumed_tail


def _is_packed(headers: Mapping[str, str]) -> bool:
    return any(
        name.lower() == "content-encoding" and value.strip().lower() in _PACKED
        for name, value in headers.items()
    )


def _json_bytes(headers: Mapping[str, str]) -> int | None:
    """The most that Triton may take for JSON; None for all."""
    said = [value for name, value in headers.items() if name.lower() == _HEADER_LENGTH]
    if not said or not all(value.isascii() and value.isdigit() for value in said):
        return None
    return max(map(int, said))
