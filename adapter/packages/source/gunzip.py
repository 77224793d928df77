"""Reads gzip in large pieces. The gzip module of Python 3.11 reads 8 KiB at a time, which cost 2.7
times as much CPU time for weights, which hardly compress.
"""

import io
import zlib
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = 31  # zlib's window bits: gzip's header and checksum, and nothing else
_PACKED_BYTES = 2**18


class Gunzip(io.RawIOBase):
    """Reads `file` unpacked. Raises zlib.error if damaged, EOFError if incomplete."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._member = zlib.decompressobj(_GZIP)
        self._ahead = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        target = memoryview(buffer).cast("B")
        while not self._member.eof or self._begin_next():
            packed = self._member.unconsumed_tail or self._ahead or self._file.read(_PACKED_BYTES)
            self._ahead = b""
            piece = self._member.decompress(packed, len(target))
            if piece:
                target[: len(piece)] = piece
                return len(piece)
            if not packed and not self._member.eof:
                raise EOFError("it ends before its last piece does")
        return 0

    def _begin_next(self) -> bool:
        """Begin the next member: a file may have several, with zeros between and after them."""
        rest = self._member.unused_data
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := self._file.read(_PACKED_BYTES)):
                return False
        self._ahead, self._member = rest, zlib.decompressobj(_GZIP)
        return True
