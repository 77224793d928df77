"""The head of a request, read by httptools: where its body ends, and whether it is plain.

Plain is an inference about which nothing is special, so that it can go to Triton without more of
HTTP being understood than is here. Whatever two parsers might read differently is not plain.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeAlias

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from adapter.core.calls import RawHeaders
from adapter.core.model import ModelId
from adapter.errors import InvalidRequest
from adapter.frontends.http import binary
from adapter.frontends.http.inference import Route, route_of
from adapter.frontends.http.observer import ECHOED, FORWARDED
from adapter.telemetry.traffic import Served

END = b"\r\n\r\n"

Fields: TypeAlias = dict[bytes, bytes]

# Of how many heads what they say is kept, and of how long ones.
_KNOWN, _KNOWN_BYTES = 256, 2 * 2**10

# As aiohttp has it.
_HEADERS = 128

_DIGITS = re.compile(rb"[0-9]{1,15}")
_HEADER_LENGTH = b"inference-header-content-length"
_FRAME = frozenset({b"host", b"content-length", b"content-type", b"connection", _HEADER_LENGTH})
_NEVER_PLAIN = frozenset(
    {
        *(b"expect", b"content-encoding", b"keep-alive", b"te", b"trailer"),
        *(b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    }
)
_FORWARDED = {name.lower().encode(): name.encode() for name in FORWARDED}
_ECHOED = {name.lower().encode(): name.encode() for name in ECHOED}


@dataclass(slots=True)
class Plain:
    """`onward` is its head for Triton, `echoed` are header lines of the answer. `json_bytes`: how
    much of the body is JSON, None for all. `lines`: what the answer says of Triton's headers that
    are `answered`.
    """

    route: Route
    model_id: ModelId
    served: Served
    onward: bytes
    echoed: bytes
    json_bytes: int | None
    answered: RawHeaders | None = None
    lines: bytes = b""


@dataclass(slots=True)
class Head:
    """`length` of the body; None where only aiohttp is to tell where it ends."""

    length: int | None
    plain: Plain | None = None


_UNKNOWN = Head(None)


class Heads:
    """Reads heads. Those that came before are found by their bytes: callers say the same again and
    again. `host` is Triton's; without it nothing is plain.
    """

    def __init__(
        self,
        served: Callable[[str, str], Served],
        *,
        default_model: ModelId | None,
        max_body_bytes: int,
    ) -> None:
        self.host = ""
        self._served = served
        self._default_model = default_model
        self._max_body = max_body_bytes
        self._known: dict[bytes, Head] = {}

    def read(self, raw: bytes) -> Head:
        """`raw` ends with the empty line."""
        head = self._known.get(raw)
        if head is None:
            head = self._read(raw)
            if self.host and len(raw) <= _KNOWN_BYTES:
                if len(self._known) == _KNOWN:
                    self._known.clear()
                self._known[raw] = head
        return head

    def _read(self, raw: bytes) -> Head:
        parsed = _parsed(raw)
        if parsed is None:
            return _UNKNOWN
        method, target, headers = parsed
        fields = {name.lower(): value for name, value in headers.items()}
        length = fields.get(b"content-length", b"0")
        if (
            not raw.startswith(b"%b %b HTTP/1.1\r\n" % (method, target))
            or raw.count(b"\n") != len(fields) + 2  # one twice, or on more than one line
            or len(fields) > _HEADERS
            or b"transfer-encoding" in fields
            or b"upgrade" in fields
            or not _DIGITS.fullmatch(length)
        ):
            return _UNKNOWN
        size = int(length)
        is_plain = method == b"POST" and self.host and 0 < size <= self._max_body
        return Head(size, self._plain(target, headers, fields, size) if is_plain else None)

    def _plain(self, target: bytes, headers: Fields, fields: Fields, size: int) -> Plain | None:
        """`fields`: the headers by their names in lower case."""
        route = None if b"%" in target else route_of(target)
        if (
            route is None
            or (model_id := route.model_id or self._default_model) is None
            or route.operation.startswith("generate")
            or fields.get(b"connection", b"keep-alive").lower() != b"keep-alive"
            or not _NEVER_PLAIN.isdisjoint(fields)
            or b"host" not in fields
        ):
            return None
        if route.frontend == "v2":
            prefix = fields.get(_HEADER_LENGTH)
            told = [pair for pair in headers.items() if pair[0].lower() not in _FRAME]
        else:
            prefix = _prefix(fields.get(b"content-type", b""), size)
            told = [(name, fields[key]) for key, name in _FORWARDED.items() if key in fields]
        if prefix is not None and _DIGITS.fullmatch(prefix) is None:
            return None
        path = f"/v2/models/{model_id}{route.path or '/infer'}"
        onward = self._onward(path, told, prefix, size)
        json_bytes = None if prefix is None else int(prefix)
        served = self._served(route.frontend, route.operation)
        return Plain(route, model_id, served, onward, _echoed(fields), json_bytes)

    def _onward(
        self, path: str, told: list[tuple[bytes, bytes]], prefix: bytes | None, size: int
    ) -> bytes:
        """As `head_of` of dataplane/http.py writes it."""
        lines = [f"POST {path} HTTP/1.1\r\nHost: {self.host}".encode()]
        lines += [b"%b: %b" % pair for pair in told]
        if prefix is None:
            lines.append(b"Content-Type: application/json")
        else:
            lines.append(b"Content-Type: application/octet-stream")
            lines.append(b"Inference-Header-Content-Length: " + prefix)
        lines.append(b"Content-Length: %d%b" % (size, END))
        return b"\r\n".join(lines)


def _prefix(kind: bytes, size: int) -> bytes | None:
    """Of SageMaker's media type; what is no number where that is not acceptable."""
    if b"/vnd." not in kind.lower():
        return None
    try:
        found = binary.json_header_bytes(kind.decode("utf-8", "surrogateescape"), size)
    except InvalidRequest:
        return b"?"
    return None if found is None else b"%d" % found


def _echoed(fields: dict[bytes, bytes]) -> bytes:
    found = [(name, fields[key]) for key, name in _ECHOED.items() if key in fields]
    return b"".join(
        b"%b: %b\r\n" % (name, value)
        for name, value in found
        if value.isascii() and value.decode().isprintable()
    )


def _parsed(raw: bytes) -> tuple[bytes, bytes, Fields] | None:
    """Method, target and headers, of which the last one counts where there are more of one name;
    None for what is no whole head. The parser calls no Python: it tells each header to a dict.
    """
    target: list[bytes] = []
    headers: Fields = {}
    missing = [b"the empty line"]
    told = SimpleNamespace(
        on_url=target.append, on_header=headers.__setitem__, on_headers_complete=missing.clear
    )
    parser = HttpRequestParser(told)
    try:
        parser.feed_data(raw)
    except (HttpParserError, HttpParserUpgrade):
        return None
    return None if missing else (parser.get_method(), b"".join(target), headers)


def headers_of(raw: bytes) -> tuple[str, CIMultiDict[str]]:
    """Target and headers of a head that was read before, for the log."""
    parsed = _parsed(raw)
    assert parsed is not None  # noqa: S101 - it was read before
    _, target, headers = parsed
    return target.decode("utf-8", "surrogateescape"), CIMultiDict(
        (name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in headers.items()
    )
