"""Decodes a chunked body, strictly: what two parsers might read differently is refused.

A size is one to sixteen hexadecimal digits, an extension and a trailer are printable characters,
and each line ends with CRLF. Nothing of extensions and trailers is kept.
"""

import re
from enum import IntEnum, auto

# The longest line, and the most bytes of all trailers.
_MAX_LINE_BYTES = 4 * 2**10
_MAX_TRAILER_BYTES = 16 * 2**10
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")
# What says where a body ends must not stand behind one (RFC 9110, section 6.5.1).
_FRAMING = re.compile(rb"(?:content-length|transfer-encoding|host):", re.IGNORECASE)
_MAX_CHUNK_BYTES = 2**63 - 1


class _Part(IntEnum):
    """The part of a chunked body that the decoder is in."""

    SIZE = auto()
    DATA = auto()
    END_OF_DATA = auto()
    TRAILERS = auto()
    DONE = auto()


class MalformedChunks(ValueError):
    """A chunked body that has more than one reading, or none."""


def write_chunk(piece: bytes) -> bytes:
    """Return a chunk."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class ChunkDecoder:
    """Decodes one chunked body piece by piece."""

    __slots__ = ("_line", "_part", "_remaining", "_trailer_bytes", "behind")

    def __init__(self) -> None:
        self._part = _Part.SIZE
        self._line = b""  # the line that is not whole
        self._remaining = 0  # bytes of the chunk
        self._trailer_bytes = 0
        self.behind = b""  # bytes behind the end of the body

    @property
    def is_done(self) -> bool:
        """Whether the body is complete."""
        return self._part is _Part.DONE

    def feed(self, data: bytes) -> list[bytes]:
        """Return the pieces of the body in `data`. Raises MalformedChunks."""
        pieces: list[bytes] = []
        position = 0
        if self._line:
            data = self._line + data
            self._line = b""
        while position < len(data) and self._part is not _Part.DONE:
            if self._part is _Part.DATA:
                end = min(position + self._remaining, len(data))
                pieces.append(data[position:end])
                self._remaining -= end - position
                position = end
                if not self._remaining:
                    self._part = _Part.END_OF_DATA
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                self._keep_line_start(data[position:])
                return pieces
            self._read_line(data[position:end])
            position = end + 2
        if self._part is _Part.DONE:
            self.behind = data[position:]
        return pieces

    def _keep_line_start(self, line: bytes) -> None:
        """Keep the start of an incomplete line for the next `feed`. Raise MalformedChunks if no
        valid line begins so.
        """
        is_too_long = len(line) > _MAX_LINE_BYTES
        if is_too_long or b"\n" in line or b"\r" in line[:-1]:
            raise MalformedChunks("a line of the chunked body is too long or not ended by CRLF")
        if self._part is _Part.END_OF_DATA and line != b"\r":
            raise MalformedChunks("a chunk is longer than its size")
        if self._part is _Part.SIZE and not _SIZE.fullmatch(line.removesuffix(b"\r")):
            raise MalformedChunks(f"{line[:40]!r} is not the size of a chunk")
        self._line = line

    def _read_line(self, line: bytes) -> None:
        """Read a complete line by the part that it is in: a chunk's size, the end of its data, or a
        trailer. Raise MalformedChunks for an invalid one.
        """
        if len(line) > _MAX_LINE_BYTES:
            raise MalformedChunks("a line of the chunked body is too long")
        if self._part is _Part.END_OF_DATA:
            if line:
                raise MalformedChunks("a chunk is longer than its size")
            self._part = _Part.SIZE
        elif self._part is _Part.SIZE:
            self._read_size(line)
        elif not line:
            self._part = _Part.DONE
        else:
            self._trailer_bytes += len(line)
            is_too_long = self._trailer_bytes > _MAX_TRAILER_BYTES
            if is_too_long or not _TRAILER.fullmatch(line) or _FRAMING.match(line):
                raise MalformedChunks("the trailers are too long, or one of them is malformed")

    def _read_size(self, line: bytes) -> None:
        """Read the line with the size of a chunk; the last chunk has the size 0."""
        match = _SIZE.fullmatch(line)
        size = -1 if match is None else int(match[1], 16)
        if not 0 <= size <= _MAX_CHUNK_BYTES:
            raise MalformedChunks(f"{line[:40]!r} is not the size of a chunk")
        self._remaining = size
        self._part = _Part.DATA if size else _Part.TRAILERS
