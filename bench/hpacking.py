"""HPACK for the load generator: encodes the request headers once, decodes each block once."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from grpc import StatusCode

from bench.connection import Failure

_DEFAULT_TABLE = 4096
_ENTRY = 32  # overhead of each entry (RFC 7541 section 4.1)
_FIRST_DYNAMIC = 62  # RFC 7541 section 2.3.3
_POST, _HTTP = b"\x83", b"\x86"  # of the static table
_CACHED_BLOCKS = 1024
_NAMES = {status.value[0]: status.name for status in StatusCode}


@dataclass(frozen=True, slots=True)
class Answer:
    """Fields of one header block of a response, "" where absent."""

    http_status: str
    grpc_status: str
    message: str

    def failure(self, http_status: str) -> Failure | None:
        if self.grpc_status == "0":
            return None
        if not self.grpc_status:
            return Failure(f"HTTP {http_status or 'unknown'}", "an answer without grpc-status")
        known = self.grpc_status.isdigit() and int(self.grpc_status) in _NAMES
        code = _NAMES[int(self.grpc_status)] if known else self.grpc_status
        return Failure(code, unquote(self.message))


class Blocks:
    """The header blocks of one connection. `decode` raises `error` for a malformed one."""

    def __init__(
        self, hpack: Any, authority: str, method: str, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        self.error: type[Exception] = hpack.HPACKError
        self._decoder = hpack.Decoder()
        self._decoder.header_table_size = 0
        self._decoder.max_allowed_table_size = 0
        self._known: dict[bytes, Answer] = {}
        pairs = (
            (":path", method),
            (":authority", authority),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *((name.lower(), value) for name, value in metadata),
        )
        sizes = itertools.accumulate(len(name) + len(value) + _ENTRY for name, value in pairs)
        kept = sum(size <= _DEFAULT_TABLE for size in sizes)  # what fits into the server's table
        rest = b"".join(_literal(b"\0", *pair) for pair in pairs[kept:])
        first = b"".join(_literal(b"\x40", *pair) for pair in pairs[:kept])
        self._first = _POST + _HTTP + first + rest
        later = bytes(0x80 | _FIRST_DYNAMIC + place for place in reversed(range(kept)))
        self._later = _POST + _HTTP + later + rest
        self._never = _POST + _HTTP + b"".join(_literal(b"\0", *pair) for pair in pairs)

    def limit(self, size: int) -> None:
        """Apply the server's table size. With less than the default the table is not used."""
        if size < _DEFAULT_TABLE:
            self._first, self._later = b"\x20" + self._never, self._never  # 6.3: size 0

    def encode(self, extra: Sequence[tuple[str, str]]) -> bytes:
        block, self._first = self._first, self._later
        if extra:
            block += b"".join(_literal(b"\0", name.lower(), value) for name, value in extra)
        return block

    def decode(self, block: bytes) -> Answer:
        answer = self._known.get(block)
        if answer is None:
            fields = dict(self._decoder.decode(block))
            wanted = (":status", "grpc-status", "grpc-message")
            answer = Answer(*(fields.get(name, "") for name in wanted))
            if len(self._known) >= _CACHED_BLOCKS:
                self._known.clear()
            self._known[block] = answer
        return answer


def _literal(kind: bytes, name: str, value: str) -> bytes:
    return kind + _text(name) + _text(value)


def _text(text: str) -> bytes:
    """Encode a string with its length (RFC 7541 section 5.1)."""
    data = text.encode()
    size, most = len(data), 127
    if size < most:
        return bytes((size,)) + data
    head, size = bytearray((most,)), size - most
    while size >= 128:  # noqa: PLR2004 - seven bits
        head.append(size % 128 | 128)
        size //= 128
    return bytes(head) + bytes((size,)) + data
