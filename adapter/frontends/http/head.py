"""The head of a request, read by httptools: where its body ends, and whether it is plain.

Plain is an inference about which nothing is special, so that it can go to Triton without more of
HTTP being understood than is here. Whatever two parsers might read differently is not plain.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import TypeAlias

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from adapter.core.calls import RawHeaders, has_long_line
from adapter.core.model import ModelId
from adapter.errors import InvalidRequest
from adapter.frontends.access import SitePolicy
from adapter.frontends.http import binary
from adapter.frontends.http.content_types import is_typed
from adapter.frontends.http.contracts import ContainerContracts, Contract
from adapter.frontends.http.endpoint.call import EndpointCall, EndpointCalls
from adapter.frontends.http.inference import Target, target_of
from adapter.frontends.http.instrumentation import ECHOED, FORWARDED
from adapter.frontends.routes import INVOKE_ENDPOINT
from adapter.telemetry.traffic import Served

END = b"\r\n\r\n"

Fields: TypeAlias = dict[bytes, bytes]

# Of how many heads what they say is kept, and of how long ones.
_KNOWN, _KNOWN_BYTES = 256, 2 * 2**10

# Values of Host of which it is kept whether they are ours.
_HOSTS = 64

# As aiohttp has it.
_HEADERS = 128

_DIGITS, _PERCENT = re.compile(rb"[0-9]{1,15}"), ord("%")
_HEADER_LENGTH = b"inference-header-content-length"
_FRAME = frozenset({b"host", b"content-length", b"content-type", b"connection", _HEADER_LENGTH})
_NEVER_PLAIN = frozenset(
    {
        *(b"expect", b"content-encoding", b"keep-alive", b"te", b"trailer"),
        *(b"origin", b"sec-fetch-site"),  # a browser's: frontends/access.py judges them
        *(b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    }
)
_FORWARDED = {name.lower().encode(): name.encode() for name in FORWARDED}
_ECHOED = {name.lower().encode(): name.encode() for name in ECHOED}


# Lines that differ from request to request, as clients spell them: to ignore the case takes twice
# as long. Each is one line of printable characters, so that the head is read the same without it.
_TRACE = rb"[Tt]race(?:parent|state):[\t\x20-\x7e]*(?=\r\n[^\t ])"
_SIGNING = (
    rb"(?:[Xx]-[Aa]mz-(?:[Dd]ate|[Ss]ecurity-[Tt]oken|[Cc]ontent-[Ss][Hh][Aa]256)"
    rb"|[Aa]uthorization|amz-sdk-(?:invocation-id|request)|[Xx]-[Aa]mzn-[Tt]race-[Ii]d)"
    rb":[\t\x20-\x7e]*(?=\r\n[^\t ])"
)
# Triton is told those of a trace; by V2 all of them, but to nothing in SageMaker's contract, nor to
# an endpoint without keys, do the others say anything.
_BEGIN_OF_V2 = b"POST /v2/"
_DIFFERING_IN_V2 = re.compile(rb"\r\n(%b|%b)" % (_TRACE, _SIGNING))
_DIFFERING = re.compile(rb"\r\n(?:(%b)|%b)" % (_TRACE, _SIGNING))


def without_differing(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Return a head as a client says it again and again, and the lines for Triton that it had
    besides.
    """
    differing = _DIFFERING_IN_V2 if raw.startswith(_BEGIN_OF_V2) else _DIFFERING
    parts = differing.split(raw)
    return b"".join(parts[::2]), [line for line in parts[1::2] if line]


@dataclass(slots=True)
class Plain:
    """`echoed` are header lines of the answer. `json_bytes`: how much of the body is JSON, None for
    all. `is_typed`: it is not plain for a model that opted into content types. `answer`: how the
    answer begins where Triton's headers are those it `answered` and its body has that `length`.
    """

    target: Target
    model_id: ModelId
    served: Served
    echoed: bytes
    json_bytes: int | None
    contract: Contract
    is_typed: bool = False
    answered: RawHeaders | None = None
    length: int | None = None
    answer: bytes = b""


@dataclass(slots=True)
class Head:
    """A parsed head. `length` of the body is None if only aiohttp can tell where it ends.
    `upstream_head` goes to Triton if the request is plain.
    """

    length: int | None
    plain: Plain | None = None
    upstream_head: bytes = b""


_UNKNOWN = Head(None)


class Heads:
    """Reads heads. Those that came before are found by their bytes: callers say the same again and
    again. `host` is Triton's; without it nothing is plain. `known`: the same dict for ever.
    `invokes`: SageMaker's invocations are inferences.
    """

    def __init__(
        self,
        served: Callable[[str, str], Served],
        contracts: ContainerContracts,
        *,
        default_model: ModelId | None,
        max_body_bytes: int,
        sites: SitePolicy,
        calls: EndpointCalls | None = None,
        invokes: bool = True,
    ) -> None:
        self.host = ""
        self._calls = calls
        self._invokes = invokes
        self._served = served
        self._contracts = contracts
        self._default_model = default_model
        self._max_body = max_body_bytes
        self.known: dict[bytes, Head] = {}
        self._knows_host = lru_cache(_HOSTS)(lambda host: sites.knows_host(host.decode("latin-1")))

    def read(self, raw: bytes) -> Head:
        """`raw` ends with the empty line."""
        if (head := self.known.get(raw)) is not None:
            return head
        same, lines = without_differing(raw)
        if lines and len({line.partition(b":")[0].lower() for line in lines}) < len(lines):
            return self._read(raw)  # one twice
        head = self.known.get(same)
        if head is None:
            head = self._read(same)
            if self.host and len(same) <= _KNOWN_BYTES:
                if len(self.known) == _KNOWN:
                    self.known.clear()
                self.known[same] = head
        if lines and head.plain is not None:
            upstream_head = b"\r\n".join([head.upstream_head[: -len(END)], *lines, END[2:]])
            is_plain = not has_long_line(upstream_head)
            return Head(head.length, head.plain, upstream_head) if is_plain else Head(head.length)
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
        return self._plain(target, headers, fields, size) if is_plain else Head(size)

    def _plain(self, target: bytes, headers: Fields, fields: Fields, size: int) -> Head:
        """`fields`: the headers by their names in lower case."""
        call = None if self._calls is None else self._calls.read(target, fields)
        asked = None if _PERCENT in target else _asked(target, call)
        if (
            asked is None
            or (model_id := asked.model_id or self._default_model) is None
            or asked.operation.startswith("generate")
            or not (self._invokes or asked.frontend == "v2")
            or fields.get(b"connection", b"keep-alive").lower() != b"keep-alive"
            or not _NEVER_PLAIN.isdisjoint(fields)
            or b"host" not in fields
            or not self._knows_host(fields[b"host"])
        ):
            return Head(size)
        if asked.frontend == "v2":
            prefix = fields.get(_HEADER_LENGTH)
            sent = [pair for pair in headers.items() if pair[0].lower() not in _FRAME]
        else:
            prefix = _prefix(fields.get(b"content-type", b""), size)
            sent = [(name, fields[key]) for key, name in _FORWARDED.items() if key in fields]
            if call is not None and call.renames:  # the answer must not come compressed
                sent = [pair for pair in sent if pair[0] != b"Accept-Encoding"]
        if prefix is not None and _DIGITS.fullmatch(prefix) is None:
            return Head(size)
        path = f"/v2/models/{call.name if call else model_id}{asked.path or '/infer'}"
        upstream_head = self._upstream_head(path, sent, prefix, size)
        if has_long_line(upstream_head):
            return Head(size)
        json_bytes = None if prefix is None else int(prefix)
        served = self._served(asked.frontend, asked.operation)
        is_v2 = asked.frontend == "v2"
        echoed = call.lines.encode() if call else _echoed(fields)
        contract = call or (self._contracts.v2 if is_v2 else self._contracts.sagemaker)
        typed = not is_v2 and _is_typed(fields)
        plain = Plain(asked, model_id, served, echoed, json_bytes, contract, typed)
        return Head(size, plain, upstream_head)

    def _upstream_head(
        self, path: str, sent: list[tuple[bytes, bytes]], prefix: bytes | None, size: int
    ) -> bytes:
        """As `head_of` of dataplane/http.py writes it."""
        lines = [f"POST {path} HTTP/1.1\r\nHost: {self.host}".encode()]
        lines += [b"%b: %b" % pair for pair in sent]
        if prefix is None:
            lines.append(b"Content-Type: application/json")
        else:
            lines.append(b"Content-Type: application/octet-stream")
            lines.append(b"Inference-Header-Content-Length: " + prefix)
        lines.append(b"Content-Length: %d%b" % (size, END))
        return b"\r\n".join(lines)


def _asked(target: bytes, call: EndpointCall | None) -> Target | None:
    if call is None:
        return target_of(target)
    return Target(INVOKE_ENDPOINT.contract, INVOKE_ENDPOINT.operation, call.model_id)


def _prefix(kind: bytes, size: int) -> bytes | None:
    """Of SageMaker's media type; what is no number where that is not acceptable."""
    if kind.lower().find(b"/vnd.") < 0:  # `in` takes twice as long
        return None
    try:
        found = binary.json_header_bytes(kind.decode("utf-8", "surrogateescape"), size)
    except InvalidRequest:
        return b"?"
    return None if found is None else b"%d" % found


def _is_typed(fields: Fields) -> bool:
    kind, accept = fields.get(b"content-type", b""), fields.get(b"accept", b"")
    return is_typed(kind.decode("latin-1"), accept.decode("latin-1"))


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
    sent = SimpleNamespace(
        on_url=target.append, on_header=headers.__setitem__, on_headers_complete=missing.clear
    )
    parser = HttpRequestParser(sent)
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
