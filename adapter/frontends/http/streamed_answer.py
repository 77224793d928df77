"""An answer of which more is to come: written when it is whole, or passed on as it comes."""

from adapter.frontends.http.application import ClientConnection
from adapter.runtime.byte_budget import ByteBudget

# Answers up to this size are written when they are whole: until then they may still fail.
_WHOLE_BYTES = 2**20
# One write of so much costs less than one of its pieces.
JOINED_BYTES = 2**14


class StreamedAnswer:
    """`length` is that of the body, None for chunks. `head` is written with the first of it."""

    def __init__(
        self, client: ClientConnection, budget: ByteBudget, head: bytes, length: int | None
    ) -> None:
        self._client = client
        self._budget = budget
        self._pieces = [head]
        self._is_chunked = length is None
        self._reserved = 0
        if length is not None and length <= _WHOLE_BYTES and budget.has_buffer_for(length):
            self._reserved = length
            budget.buffer(length)

    def add(self, piece: bytes) -> bool:
        """Return whether something was written."""
        if self._is_chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        self._pieces.append(piece)
        if not self._reserved:
            self._write()
        return not self._reserved

    def end(self) -> None:
        if self._is_chunked:
            self._pieces.append(b"0\r\n\r\n")
        if self._pieces:
            self._write()

    def release(self) -> None:
        self._budget.buffer(-self._reserved)
        self._reserved, self._pieces = 0, []

    def _write(self) -> None:
        pieces, self._pieces = self._pieces, []
        if self._reserved <= JOINED_BYTES:
            self._client.transport.write(b"".join(pieces))
        else:
            self._client.transport.writelines(pieces)
