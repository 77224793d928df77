"""The head of a request: where its body ends, and whether it is plain.

Plain is an inference about which nothing is special, so that it can go to Triton without more of
HTTP being understood than is here.
"""

import re
from collections.abc import Callable, Iterable

from multidict import CIMultiDict

from adapter.core.calls import RawHeaders, has_long_line
from adapter.core.model import MAX_MODEL_ID_BYTES, ModelId
from adapter.core.triton_input import HeaderTable
from adapter.errors import InvalidRequest
from adapter.frontends.access import SitePolicy
from adapter.frontends.http import binary
from adapter.frontends.http.content_types import is_typed
from adapter.frontends.http.contracts import ContainerContracts, Contract
from adapter.frontends.http.endpoint.call import EndpointCalls
from adapter.frontends.http.head_scanner import END, Scanned, names_of, scan
from adapter.frontends.http.instrumentation import ECHOED, FORWARDED
from adapter.frontends.routes import INVOKE_ENDPOINT
from adapter.telemetry.traffic import Served

_EXTERNAL = HeaderTable("--http-header-forward-pattern", None)

# How many heads are kept as they came, and how long ones.
_KNOWN, _KNOWN_BYTES = 256, 2 * 2**10

_MODELS, _INVOKE, _INVOCATIONS = b"/models/", b"/invoke", b"/invocations"
_V2_MODELS, _INFER, _VERSIONS = b"/v2/models/", b"/infer", b"/versions/"
_ENDPOINTS = b"/endpoints/"
# What a body of JSON is called, and what takes one; anything else is looked at.
_JSON, _TAKE_JSON = (b"application/json", b""), (b"*/*", b"", b"application/json")
_MOST_DIGITS = 15
_HEADER_LENGTH = b"inference-header-content-length"
_NEVER_PLAIN = frozenset(
    {
        *(b"expect", b"content-encoding", b"keep-alive", b"te", b"trailer"),
        b"origin",  # of a browser: frontends/access.py decides about it
        *(b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
    }
)
_FORWARDED = {name.lower().encode(): name.encode() for name in FORWARDED}
_ECHOED = {name.lower().encode(): name.encode() for name in ECHOED}
_FORWARDED_KEYS, _ECHOED_KEYS = frozenset(_FORWARDED), frozenset(_ECHOED)


# Lines that differ from request to request, as clients spell them: to ignore the case takes twice
# as long. Each is one line of printable characters, so that the head is read the same without it.
_TRACE = rb"[Tt]race(?:parent|state):[\t\x20-\x7e]*(?=\r\n[^\t ])"
_SIGNING = (
    rb"(?:[Xx]-[Aa]mz-(?:[Dd]ate|[Ss]ecurity-[Tt]oken|[Cc]ontent-[Ss][Hh][Aa]256)"
    rb"|[Aa]uthorization|amz-sdk-(?:invocation-id|request)|[Xx]-[Aa]mzn-[Tt]race-[Ii]d)"
    rb":[\t\x20-\x7e]*(?=\r\n[^\t ])"
)
# Triton is told those of a trace; the others say nothing to it, nor to an endpoint without keys.
_DIFFERING = re.compile(rb"\r\n(?:(%b)|%b)" % (_TRACE, _SIGNING))


def without_differing(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Return a head as a client says it again and again, and the lines for Triton that it had
    besides.
    """
    parts = _DIFFERING.split(raw)
    return b"".join(parts[::2]), [line for line in parts[1::2] if line]


class Operation:
    """What all plain requests of one operation share. `is_v2`: it is one of V2's. `answer`: how an
    answer begins where Triton's headers are those it `answered` and its body has that `length`.
    """

    def __init__(self, served: Callable[[str, str], Served], frontend: str, name: str) -> None:
        self.answered: RawHeaders | None = None
        self.length: int | None = None
        self.answer = b""
        self.name = name
        self.is_v2 = frontend == "v2"
        self.served = served(frontend, name)


class Head:
    """A head that was read. `length` of the body is -1 if only aiohttp can tell where it ends.

    Of one that is plain: `contract`, None in any other; `upstream_head` goes to Triton; `echoed`
    are header lines of the answer; `json_bytes` of the body are JSON, None for all; `is_typed`: it
    is not plain for a model that opted into content types.
    """

    operation: Operation
    model_id: ModelId

    def __init__(self, length: int) -> None:
        self.length = length
        self.contract: Contract | None = None
        self.upstream_head = self.echoed = b""
        self.json_bytes: int | None = None
        self.is_typed = False

    def with_lines(self, lines: list[bytes]) -> "Head":
        """Return the head of a plain request that had these lines for Triton besides."""
        head = Head(self.length)
        head.upstream_head = b"\r\n".join([self.upstream_head[: -len(END)], *lines, END[2:]])
        if not has_long_line(head.upstream_head):
            head.operation, head.model_id = self.operation, self.model_id
            head.echoed, head.json_bytes, head.is_typed = (
                self.echoed,
                self.json_bytes,
                self.is_typed,
            )
            head.contract = self.contract
        return head


_UNKNOWN = Head(-1)


class Heads:
    """Reads heads. `host` is Triton's; without it nothing is plain. `invokes`: SageMaker's
    invocations are inferences. `known`: the same dict for ever, of heads as they came but for lines
    that differ; callers say the same again and again.
    """

    def __init__(
        self,
        served: Callable[[str, str], Served],
        contracts: ContainerContracts,
        *,
        default_model: ModelId | None,
        max_body_bytes: int,
        sites: SitePolicy,
        headers: HeaderTable = _EXTERNAL,
        calls: EndpointCalls | None = None,
        invokes: bool = True,
    ) -> None:
        self._headers = headers
        self.host = ""
        self.known: dict[bytes, Head] = {}
        self._calls = calls
        self._invokes = invokes
        self._contracts = contracts
        self._default_model = default_model
        self._max_body = max_body_bytes
        self._sites = sites
        self._host = b""  # the last one that is ours
        self._invoke = Operation(served, "sagemaker", "invoke")
        self._infer = Operation(served, "v2", "infer")
        self._invocations = Operation(served, "sagemaker", "invocations")
        self._endpoint = Operation(served, INVOKE_ENDPOINT.contract, INVOKE_ENDPOINT.operation)

    def read(self, raw: bytes) -> Head:
        """Read a head; it ends with the empty line."""
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
        return head.with_lines(lines) if lines and head.contract is not None else head

    def _read(self, raw: bytes) -> Head:
        scanned = scan(raw)
        if scanned is None:
            return _UNKNOWN
        head = Head(scanned.length)
        if scanned.method == b"POST" and self.host and 0 < scanned.length <= self._max_body:
            self._read_plain(head, scanned)
        return head

    def _read_plain(self, head: Head, scanned: Scanned) -> None:
        fields = scanned.fields
        if (
            fields.get(b"connection", b"keep-alive").lower() != b"keep-alive"
            or not _NEVER_PLAIN.isdisjoint(fields)
            or not self._knows_host(fields.get(b"host"))
        ):
            return
        target = scanned.target
        if target.startswith(_V2_MODELS):
            self._read_infer(head, target[len(_V2_MODELS) : -len(_INFER)], scanned)
        elif not self._invokes:
            return
        elif target.startswith(_MODELS) and target.endswith(_INVOKE):
            name = target[len(_MODELS) : -len(_INVOKE)]
            if _is_name(name):
                self._read_invoke(head, self._invoke, ModelId(name.decode()), scanned)
        elif target == _INVOCATIONS and self._default_model is not None:
            self._read_invoke(head, self._invocations, self._default_model, scanned)
        elif target.startswith(_ENDPOINTS) and self._calls is not None:
            self._read_call(head, self._calls, scanned)

    def _knows_host(self, host: bytes | None) -> bool:
        if host is None:
            return False
        if host != self._host:
            if not self._sites.knows_host(host.decode("latin-1")):
                return False
            self._host = host
        return True

    def _read_infer(self, head: Head, path: bytes, scanned: Scanned) -> None:
        name, is_versioned, version = path.partition(_VERSIONS)
        if not (scanned.target.endswith(_INFER) and _is_name(name)):
            return
        if is_versioned and not version.isdigit():
            return
        sent = self._written(
            (spelled, value)
            for spelled, (key, value) in zip(names_of(scanned), scanned.fields.items(), strict=True)
            if key != _HEADER_LENGTH
        )
        head.operation, head.model_id = self._infer, ModelId(name.decode())
        prefix = scanned.fields.get(_HEADER_LENGTH)
        if self._is_framed(head, scanned.target, sent, prefix):
            head.echoed = _echoed(scanned.fields)
            head.contract = self._contracts.v2

    def _read_invoke(
        self, head: Head, operation: Operation, model_id: ModelId, scanned: Scanned
    ) -> None:
        head.operation, head.model_id = operation, model_id
        sent = self._written(_forwarded(scanned.fields))
        if self._is_invocation(head, model_id, sent, scanned):
            head.echoed = _echoed(scanned.fields)
            head.contract = self._contracts.sagemaker

    def _read_call(self, head: Head, calls: EndpointCalls, scanned: Scanned) -> None:
        call = calls.read(scanned.target, scanned.fields)
        if call is None:
            return
        head.operation, head.model_id = self._endpoint, call.model_id
        sent = self._written(
            pair
            for pair in _forwarded(scanned.fields)
            if not (call.renames and pair[0] == b"Accept-Encoding")  # it must not come compressed
        )
        if self._is_invocation(head, call.name, sent, scanned):
            head.echoed = call.lines
            head.contract = call

    def _written(self, headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Return the lines for Triton."""
        pairs = [(name.decode(), value.decode("latin-1")) for name, value in headers]
        return [f"{name}: {value}\r\n".encode() for name, value in self._headers.written(pairs)]

    def _is_invocation(self, head: Head, name: str, sent: list[bytes], scanned: Scanned) -> bool:
        fields, prefix = scanned.fields, None
        kind, accept = fields.get(b"content-type", b""), fields.get(b"accept", b"")
        if kind not in _JSON or accept not in _TAKE_JSON:
            head.is_typed = is_typed(kind.decode("latin-1"), accept.decode("latin-1"))
            prefix = _prefix(kind, scanned.length)
        return self._is_framed(head, f"/v2/models/{name}/infer".encode(), sent, prefix)

    def _is_framed(
        self, head: Head, target: bytes, sent: list[bytes], prefix: bytes | None
    ) -> bool:
        """Write the head for Triton as `head_of` of dataplane/http.py does; return False if it may
        not be read there. `prefix`: how much of the body is JSON.
        """
        kind = b"Content-Type: application/json\r\n"
        if prefix is not None:
            if not prefix.isdigit() or len(prefix) > _MOST_DIGITS:
                return False
            head.json_bytes = int(prefix)
            kind = (
                b"Content-Type: application/octet-stream\r\n"
                b"Inference-Header-Content-Length: %b\r\n" % prefix
            )
        first = b"POST %b HTTP/1.1\r\nHost: %b\r\n" % (target, self.host.encode())
        end = b"Content-Length: %d\r\n\r\n" % head.length
        head.upstream_head = b"".join((first, *sent, kind, end))
        return not has_long_line(head.upstream_head)


def _is_name(name: bytes) -> bool:
    """Return whether it is a model's name, as it stands."""
    is_other = b"/" in name or b"%" in name or b"?" in name or b"#" in name
    return not is_other and 0 < len(name) <= MAX_MODEL_ID_BYTES


def _forwarded(fields: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    if _FORWARDED_KEYS.isdisjoint(fields):
        return []
    return [(name, fields[key]) for key, name in _FORWARDED.items() if key in fields]


def _prefix(kind: bytes, size: int) -> bytes | None:
    """Of SageMaker's media type; what is no number where that is not acceptable."""
    if kind.lower().find(b"/vnd.") < 0:  # `in` takes twice as long
        return None
    try:
        found = binary.json_header_bytes(kind.decode("utf-8", "surrogateescape"), size)
    except InvalidRequest:
        return b"?"
    return None if found is None else b"%d" % found


def _echoed(fields: dict[bytes, bytes]) -> bytes:
    if _ECHOED_KEYS.isdisjoint(fields):
        return b""
    return b"".join(
        [
            b"%b: %b\r\n" % (name, value)
            for key, name in _ECHOED.items()
            if (value := fields.get(key)) is not None
            and value.isascii()
            and value.decode().isprintable()
        ]
    )


def headers_of(raw: bytes) -> tuple[str, CIMultiDict[str]]:
    """Return target and headers of a plain head, for the log; without the lines that differ if one
    of those comes twice.
    """
    scanned = scan(raw) or scan(without_differing(raw)[0])
    assert scanned is not None  # noqa: S101 - it was read before
    return scanned.target.decode(), CIMultiDict(
        (name.decode(), value.decode("utf-8", "surrogateescape"))
        for name, value in zip(names_of(scanned), scanned.fields.values(), strict=True)
    )
