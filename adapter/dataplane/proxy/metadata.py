"""Finds request headers that gRPC's parsers reject.

Triton and the fallback server would answer such a call INTERNAL, though the client is at fault.
"""

import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable

from adapter.protocols.http2.headers import Headers

_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT = re.compile(rb"([0-9]{1,18}) *([HMSmun])")
_NAME = re.compile(rb"[a-z0-9._-]+")
_ENCODINGS = frozenset({b"identity", b"deflate", b"gzip"})
_MOST_NUMBER, _COST_BYTES = 2**31, 8


def odd_header(headers: Headers) -> str | None:
    """Return why a call with these headers is refused; None where it is not."""
    for key, value in headers:
        if key.startswith(b":"):
            continue
        if not _NAME.fullmatch(key):
            return f"{key.decode('ascii', 'backslashreplace')} is not a name of metadata"
        if key.endswith(b"-bin") and _bytes_of(value) is None:
            return f"the header {key.decode()} is not base64"
        is_fine = _OWN.get(key)
        if is_fine is not None and not is_fine(value):
            shown = value[:40].decode("ascii", "backslashreplace")
            return f"the header {key.decode()} cannot be {shown!r}"
    return None


def seconds_of(timeout: bytes) -> float | None:
    """Parse `grpc-timeout`; None where it is malformed."""
    found = _TIMEOUT.fullmatch(timeout)
    return None if found is None else int(found[1]) * _UNITS[found[2]]


def _bytes_of(text: bytes) -> bytes | None:
    """Decode base64 with or without padding; None where grpc would reject it."""
    padded = text + b"=" * (-len(text) % 4)
    try:
        found = b64decode(padded, validate=True)
    except Base64Error:
        return None
    return found if b64encode(found) == padded else None


def _is_number(value: bytes) -> bool:
    return value.isdigit() and len(value) < 11 and int(value) < _MOST_NUMBER  # noqa: PLR2004


def _is_timeout(value: bytes) -> bool:
    return seconds_of(value) is not None


def _is_cost(value: bytes) -> bool:
    return len(_bytes_of(value) or b"") >= _COST_BYTES


# headers with a meaning to gRPC itself
_OWN: dict[bytes, Callable[[bytes], bool]] = {
    b"grpc-encoding": _ENCODINGS.__contains__,
    b"grpc-internal-encoding-request": _ENCODINGS.__contains__,
    b"grpc-previous-rpc-attempts": _is_number,
    b"grpc-retry-pushback-ms": _is_number,
    b"grpc-status": _is_number,
    b"grpc-timeout": _is_timeout,
    b"lb-cost-bin": _is_cost,
}
