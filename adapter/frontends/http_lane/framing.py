"""Where a request's body ends.

Only this decides it: what goes on to Triton or to the application is framed anew.
"""

import re

from adapter.errors import InvalidRequest

# A chunk's size with its extensions, and all trailers of one body.
_LINE_BYTES = 256
_TRAILER_BYTES = 8 * 2**10

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t -~\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*")


class Sized:
    """A body of so many bytes."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = size

    @property
    def is_over(self) -> bool:
        return self.left == 0

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """What is of the body, and what lies behind it."""
        if len(data) <= self.left:
            self.left -= len(data)
            return data, b""
        end, self.left = self.left, 0
        return data[:end], data[end:]


class Chunked:
    """Extensions and trailers are dropped. InvalidRequest for whatever is not to the letter."""

    __slots__ = ("_line", "_parse", "_trailers", "is_over", "left")

    def __init__(self) -> None:
        self.is_over = False
        self.left = 0  # of this chunk
        self._line = b""
        self._parse = self._size
        self._trailers = 0

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        pieces, at = [], 0
        while at < len(data) and not self.is_over:
            if self.left:
                piece = data[at : at + self.left]
                pieces.append(piece)
                self.left -= len(piece)
                at += len(piece)
            else:
                at = self._read_line(data, at)
        return b"".join(pieces), data[at:]

    def _read_line(self, data: bytes, at: int) -> int:
        end = data.find(b"\n", at, at + _LINE_BYTES) + 1
        is_whole = end > 0
        self._line += data[at : end if is_whole else at + _LINE_BYTES + 1]
        if len(self._line) > _LINE_BYTES:
            raise InvalidRequest("a line between the chunks of the body is too long")
        if not is_whole:
            return len(data)
        line, self._line = self._line, b""
        if not line.endswith(b"\r\n"):
            raise InvalidRequest("a line between the chunks of the body does not end with CR LF")
        self._parse(line[:-2])
        return end

    def _size(self, line: bytes) -> None:
        match = _SIZE.fullmatch(line)
        if match is None:
            raise InvalidRequest(f"{line!r} is no size of a chunk")
        self.left = int(match[1], 16)
        self._parse = self._end if self.left else self._trailer

    def _end(self, line: bytes) -> None:
        if line:
            raise InvalidRequest("a chunk is longer than its size says")
        self._parse = self._size

    def _trailer(self, line: bytes) -> None:
        self._trailers += len(line)
        if line and (_TRAILER.fullmatch(line) is None or self._trailers > _TRAILER_BYTES):
            raise InvalidRequest("the trailers of the body are not acceptable")
        self.is_over = not line


Framing = Sized | Chunked
