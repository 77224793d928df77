"""Keeps heads that clients send again and again, with the plan of the inference that they ask for.

A plan is made of the head alone: the contract, the model, and the head that Triton gets. A head
whose plan would need more (a signature, a browser's Origin, a header that is refused) has none, and
its request is answered by a handler of calls.py.
"""

import re
from collections.abc import Callable, Collection, Mapping

from adapter.core.calls import RawHeaders, has_long_line
from adapter.core.model import ModelId, parse_model_id, triton_name
from adapter.core.triton_input import HeaderTable
from adapter.errors import AdapterError, InvalidRequest
from adapter.frontends.access import SitePolicy
from adapter.frontends.endpoint.contract import EndpointCalls
from adapter.frontends.http import binary
from adapter.frontends.http.content_types import is_typed
from adapter.frontends.http.contracts import ContainerContracts, Contract
from adapter.frontends.http.head import CHUNKED, MAX_LINES, RawHead, read_head
from adapter.frontends.http.instrumentation import (
    contract_of,
    echoed_headers,
    forwarded,
    passed_on,
    path_segments,
    write_fields,
)
from adapter.frontends.routes import INFERENCE, INVOKE_ENDPOINT, Match, Route, bare, find
from adapter.telemetry.traffic import Served

_EXTERNAL = HeaderTable("--http-header-forward-pattern", None)

# How many heads are kept, and how long one may be.
_MAX_KNOWN = 256
_MAX_KNOWN_BYTES = 2 * 2**10

# Larger compressed bodies take long to unpack for the check, and have a task for that.
MAX_PACKED_BYTES = 256 * 2**10

_JSON = (b"application/json", b"")
_TAKE_JSON = (b"*/*", b"", b"application/json")
_HEADER_LENGTH = b"inference-header-content-length"
_ENCODINGS = frozenset({b"", b"identity", b"gzip", b"deflate"})
_PACKED = frozenset({b"gzip", b"deflate"})
_MAX_DIGITS = 15
_JSON_LINE = b"Content-Type: application/json\r\n"
_BINARY_LINES = b"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: %b\r\n"
_CHUNKED_LINE = b"Transfer-Encoding: chunked\r\n"

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


def split_differing_lines(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Split a head into what a client sends again and again, by which the head is cached, and the
    lines for Triton that differ from request to request, such as traceparent. Lines that differ and
    say nothing to Triton, such as a signature, are dropped.
    """
    parts = _DIFFERING.split(raw)
    return b"".join(parts[::2]), [line for line in parts[1::2] if line]


class Operation:
    """Holds what all planned requests of one operation share."""

    def __init__(self, served: Callable[[str, str], Served], frontend: str, name: str) -> None:
        self.name = name
        self.is_v2 = frontend == "v2"
        self.served = served(frontend, name)
        # how an answer begins where Triton's headers are `answered`, and its body has that length
        self.answer = b""
        self.answered: RawHeaders | None = None
        self.length: int | None = None


class Plan:
    """Holds how an inference is answered, as far as its head decides that."""

    __slots__ = (
        "_behind_name",
        "_behind_name_uncompressed",
        "contract",
        "is_packed",
        "is_typed",
        "json_bytes",
        "model_id",
        "name",
        "needs_body",
        "operation",
        "upstream_head",
    )

    def __init__(self, operation: Operation, contract: Contract, model_id: ModelId) -> None:
        self.operation = operation
        self.contract = contract
        self.model_id = model_id
        self.name = str(triton_name(model_id)) if contract.sends_again else str(model_id)
        self.json_bytes: int | None = (
            None  # length of the JSON in the body; None if all of it is JSON
        )
        self.is_typed = False  # a model that opted into content types converts the body
        self.is_packed = False  # the body is compressed
        self.needs_body = False  # an empty body is refused
        self.upstream_head = b""  # the head for a Triton that knows the model by `name`
        self._behind_name = b""
        self._behind_name_uncompressed = b""

    def write_head(
        self,
        host: str,
        below_model: str,
        lines: bytes,
        uncompressed_lines: bytes,  # the same without Accept-Encoding
        length: int,
    ) -> None:
        """Compose the head for Triton once, and store what is behind the model's name in it:
        `head_for` composes the heads for other names.
        """
        begin = f"{below_model} HTTP/1.1\r\nHost: {host}\r\n".encode()
        frame = _CHUNKED_LINE if length == CHUNKED else b"Content-Length: %d\r\n" % length
        kind = _JSON_LINE if self.json_bytes is None else _BINARY_LINES % b"%d" % self.json_bytes
        end = kind + frame + b"\r\n"
        self._behind_name = begin + lines + end
        self._behind_name_uncompressed = begin + uncompressed_lines + end
        is_renamed = self.name != str(self.model_id)
        self.upstream_head = self.head_for(self.name, is_renamed=is_renamed)

    def head_for(self, name: str, *, is_renamed: bool) -> bytes:
        """Return the head for Triton, which knows the model by `name`.

        The answer of a model that is renamed must not come compressed, as its name is put back.
        """
        behind = self._behind_name_uncompressed if is_renamed else self._behind_name
        return b"POST /v2/models/" + name.encode() + behind


class Head:
    """A head with all that is the same for each request which has it."""

    __slots__ = (
        "contract_name",
        "echoed",
        "expects_continue",
        "headers",
        "is_http_1_0",
        "length",
        "match",
        "method",
        "needs_site_check",
        "path_error",
        "plan",
        "raw",
        "target",
        "wants_close",
    )

    def __init__(self, raw: bytes, parsed: RawHead) -> None:
        self.raw = raw
        self.method = parsed.method
        self.target = parsed.target
        self.headers = parsed.headers  # shared by requests: nobody may change them
        self.length = parsed.length  # of the body, or CHUNKED
        self.is_http_1_0 = parsed.is_http_1_0
        self.wants_close = parsed.wants_close
        self.expects_continue = parsed.expects_continue
        self.echoed = write_fields(echoed_headers(parsed.headers))  # header lines of the answer
        self.needs_site_check = True  # False if it is surely of no page of another site
        self.contract_name = contract_of(parsed.target, parsed.headers)
        self.match: Match | None = None  # None without a route
        self.path_error = ""  # says why there is no route, if the path is malformed
        self.plan: Plan | None = None  # of an inference; None for what a handler answers
        try:
            segments = path_segments(parsed.target)
        except InvalidRequest as error:
            self.path_error = str(error)
        else:
            self.match = find(segments if self.contract_name == "endpoint" else bare(segments))


class Heads:
    """Reads heads, and keeps those that come again."""

    def __init__(
        self,
        served: Callable[[str, str], Served],
        contracts: ContainerContracts,
        *,
        default_model: ModelId | None,  # served at /invocations
        max_body_bytes: int,
        sites: SitePolicy,
        headers: HeaderTable = _EXTERNAL,  # decides which headers Triton gets
        calls: EndpointCalls | None = None,  # reads calls of an endpoint without keys
        invokes: bool = True,  # SageMaker's invocations are inferences, and not generate
        plans: bool = True,  # False where each call is asked who sends it
    ) -> None:
        self.host = ""  # Triton's; no inference is planned without it
        self.known: dict[bytes, Head] = {}  # without lines that differ from request to request
        self._headers = headers
        self._calls = calls
        self._invokes = invokes
        self._plans = plans
        self._contracts = contracts
        self._default_model = default_model
        self._max_body_bytes = max_body_bytes
        self._sites = sites
        self._operations = {
            (frontend, name): Operation(served, frontend, name)
            for frontend, name in (
                ("sagemaker", "invoke"),
                ("sagemaker", "invocations"),
                ("v2", "infer"),
                (INVOKE_ENDPOINT.contract, INVOKE_ENDPOINT.operation),
            )
        }

    def read(self, raw: bytes) -> tuple[Head, bytes]:
        """Read a head, which ends with the empty line. Return it with the lines for Triton that
        differ from request to request. Raises MisreadHead.
        """
        same, lines = split_differing_lines(raw)
        is_repeated = len({line.partition(b":")[0].lower() for line in lines}) < len(lines)
        if is_repeated or raw.count(b"\r\n") > MAX_LINES:  # lines that differ count as well
            return self._read_head(raw), b""
        head = self.known.get(same)
        if head is None:
            head = self._read_head(same)
            if self.host and len(same) <= _MAX_KNOWN_BYTES:
                if len(self.known) == _MAX_KNOWN:
                    self.known.clear()
                self.known[same] = head
        if not lines or head.plan is None:
            return head, b""
        more = b"\r\n".join([*lines, b""])
        return (self._read_head(raw), b"") if has_long_line(more) else (head, more)

    def _read_head(self, raw: bytes) -> Head:
        """Read a head that is not cached, and make a plan if it is an inference that can be
        answered without a task.
        """
        parsed = read_head(raw)
        head = Head(raw, parsed)
        head.needs_site_check = self._needs_site_check(parsed)
        is_plannable = self.host and self._plans and not parsed.has_duplicates
        if is_plannable and parsed.method == "POST" and head.match is not None:
            head.plan = self._make_plan(parsed, head, head.match)
        return head

    def _needs_site_check(self, head: RawHead) -> bool:
        """Return whether a page of another site may have sent the request, by its Origin and
        Host.
        """
        host = head.by_name.get(b"host")
        if host is None:  # at HTTP/1.0, which no browser speaks
            return b"origin" in head.by_name
        is_known = self._sites.knows_host(host.decode("utf-8", "surrogateescape"))
        return b"origin" in head.by_name or not is_known

    def _make_plan(self, parsed: RawHead, head: Head, match: Match) -> Plan | None:
        """Return the plan of an inference; None for what a handler answers or refuses."""
        is_too_large = parsed.length > self._max_body_bytes
        if is_too_large or head.needs_site_check or b"trace" in _read_connection(parsed):
            return None
        route = match.methods.get("POST")
        if route is None or route.scope is not INFERENCE:
            return None
        try:
            return self._plan_route(parsed, match, route, head.contract_name)
        except AdapterError:
            return None  # the handler words it

    def _plan_route(
        self, head: RawHead, match: Match, route: Route, contract_name: str
    ) -> Plan | None:
        """Return a plan for an inference by its route; None if its handler is to answer it."""
        operation = self._operations.get((route.contract, route.operation))
        if operation is None or route.contract != contract_name:
            return None
        if route.contract == "v2":
            plan = Plan(operation, self._contracts.v2, parse_model_id(match.names["model_name"]))
            fields = passed_on(head.headers)
            return self._complete_plan(plan, head, fields, match.below_model())
        if not self._invokes:
            return None
        contract: Contract = self._contracts.sagemaker
        if route is INVOKE_ENDPOINT:
            if self._calls is None:
                return None
            call = self._calls.read(match.names["endpoint_name"], head.headers)
            contract = call
            model_id = call.model_id
        elif "model_name" in match.names:
            model_id = parse_model_id(match.names["model_name"])
        elif self._default_model is not None:
            model_id = self._default_model
        else:
            return None
        plan = Plan(operation, contract, model_id)
        plan.needs_body = True
        return self._complete_plan(plan, head, forwarded(head.headers), "/infer")

    def _complete_plan(
        self, plan: Plan, head: RawHead, fields: Mapping[str, str], below_model: str
    ) -> Plan | None:
        """Set what the head decides about a plan: encoding, types, and the head for Triton. Return
        None if its handler is to answer the request.
        """
        encoding = head.by_name.get(b"content-encoding", b"").strip().lower()
        plan.is_packed = encoding in _PACKED
        is_long_packed = plan.is_packed and not 0 <= head.length <= MAX_PACKED_BYTES
        if encoding not in _ENCODINGS or is_long_packed:
            return None
        if plan.operation.is_v2:
            prefix = head.by_name.get(_HEADER_LENGTH)
            if prefix is not None:
                if not prefix.isdigit() or len(prefix) > _MAX_DIGITS:
                    return None
                plan.json_bytes = int(prefix)
        else:
            kind = head.by_name.get(b"content-type", b"")
            accept = head.by_name.get(b"accept", b"")
            if kind not in _JSON or accept not in _TAKE_JSON:
                kind_text = kind.decode("utf-8", "surrogateescape")
                plan.is_typed = is_typed(kind_text, accept.decode("utf-8", "surrogateescape"))
                is_length_known = head.length != CHUNKED and not plan.is_packed
                length = head.length if is_length_known else None
                plan.json_bytes = binary.json_header_bytes(kind_text, length)
        lines = self._write_lines(fields, leave_out=())
        uncompressed_lines = self._write_lines(fields, leave_out=("accept-encoding",))
        plan.write_head(self.host, below_model, lines, uncompressed_lines, head.length)
        return None if has_long_line(plan.upstream_head) else plan

    def _write_lines(self, fields: Mapping[str, str], leave_out: Collection[str]) -> bytes:
        """Write the header lines for Triton, without those that it must not get."""
        dropped = {_HEADER_LENGTH.decode(), *leave_out}
        pairs = [pair for pair in fields.items() if pair[0].lower() not in dropped]
        lines = [f"{name}: {value}\r\n" for name, value in self._headers.rewrite(pairs)]
        return "".join(lines).encode("utf-8", "surrogateescape")


def _read_connection(head: RawHead) -> bytes:
    """Return the value of Connection in lower case, or empty."""
    return head.by_name.get(b"connection", b"").lower()
