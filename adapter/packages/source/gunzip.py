"""Reads gzip in large pieces, so that one who unpacks keeps other threads from theirs as little as
may be: zlib lets go of Python's lock while it works. The gzip of Python 3.11 takes 8 KiB at a time,
which made the unpacking of weights, that hardly pack, 2.7 times the work.
"""

import io
import zlib
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = 31  # zlib's window bits: gzip's header and checksum, and nothing else
_PACKED_BYTES = 2**18


class Gunzip(io.RawIOBase):
    """What `file` holds unpacked. zlib.error when it is damaged, EOFError when it breaks off."""

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
        """A file may be several strung together, with zeros in between and behind."""
        rest = self._member.unused_data
        while not (rest := rest.lstrip(b"\0")):
            if not (rest := self._file.read(_PACKED_BYTES)):
                return False
        self._ahead, self._member = rest, zlib.decompressobj(_GZIP)
        return True
