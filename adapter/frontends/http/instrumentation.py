"""Headers that are passed on and given back, error bodies, log lines and counts over HTTP."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import TypeAlias
from urllib.parse import unquote, unquote_to_bytes

from adapter.core.calls import NOT_STARTED, RawHeaders
from adapter.core.model import ModelId
from adapter.core.triton_input import OF_THE_CONNECTION
from adapter.errors import (
    AboutMemory,
    AdapterError,
    InvalidRequest,
    MethodNotAllowed,
    OutOfMemory,
    TooManyConnections,
    TooManyWaiting,
    Unauthenticated,
    UnsupportedMediaType,
    drop_tracebacks,
    was_not_started,
)
from adapter.frontends.http import binary
from adapter.frontends.routes import CONTRACTS, INFERENCES
from adapter.frontends.status import HTTP, challenge, level_of, lookup
from adapter.telemetry.log import LogLimit, ids_of_headers
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.traffic import InFlight, Served

log = logging.getLogger(__name__)

# given back to the caller and written to the log, never used as a key
ECHOED = (
    "X-Amzn-SageMaker-Custom-Attributes",
    "X-Amzn-SageMaker-Inference-Id",
    "X-Request-Id",
)
# Headers of an invocation in SageMaker's contract that Triton gets; the others end here.
FORWARDED = (
    *("Accept-Encoding", "Content-Encoding", "traceparent", "tracestate"),
    "X-Amzn-SageMaker-Custom-Attributes",
)
# Headers of a call by OpenAI's API that Triton gets: the ids of its trace and of the request.
FORWARDED_IDS = ("traceparent", "tracestate", "X-Request-Id")

_HEADER_LENGTH = b"inference-header-content-length"
_DROPPED = frozenset(name.encode() for name in OF_THE_CONNECTION)
_JSON = [(b"Content-Type", b"application/json")]
_BINARY = binary.content_type(0).removesuffix("0").encode()

# In which clients of AWS name an operation whose path does not.
AWS_OPERATION = "X-Amz-Target"

# returns a text as JSON has it; `json.dumps` takes twice as long to find this function
quoted = json.encoder.encode_basestring_ascii

# Method, target and headers of a request. Only for its line in the log, if it gets one.
Asked: TypeAlias = Callable[[], tuple[str, str, Mapping[str, str]]]


def contract_of(target: str, headers: Mapping[str, str]) -> str:
    """Return whose contract a request is of, before it is looked at closely.

    AWS's other operations, which name themselves in a header, are for the endpoint to refuse.
    """
    first = _without_host(target)[1:].partition("?")[0].partition("/")[0]
    contract = CONTRACTS.get(unquote(first), "sagemaker")
    return "endpoint" if contract == "sagemaker" and AWS_OPERATION in headers else contract


def _without_host(target: str) -> str:
    """Return the origin form of a target in absolute form (RFC 9112, section 3.2.2)."""
    if target.startswith("/"):
        return target
    # the path may be missing, and a slash of the query does not begin one
    behind_host, question_mark, query = target.partition("://")[2].partition("?")
    return f"/{behind_host.partition('/')[2]}{question_mark}{query}"


def path_segments(target: str) -> list[str]:
    """Return the segments of a target's path. It is split at its raw slashes and only then decoded,
    so that `%2F` is part of a name. Raises InvalidRequest if it is not UTF-8.
    """
    raw = _without_host(target).partition("?")[0]
    try:
        return [unquote_to_bytes(part).decode() for part in raw.removeprefix("/").split("/")]
    except UnicodeError as error:  # a header may have what no UTF-8 has
        raise InvalidRequest(f"the path is not percent-encoded UTF-8: {raw[:200]!r}") from error


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request without those that are for one connection alone."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = OF_THE_CONNECTION | named
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


def list_call_headers(headers: Mapping[str, str], *, is_rewritten: bool) -> dict[str, str]:
    """Return the client's headers for a V2 call to Triton. Leave out Accept-Encoding if the answer
    `is_rewritten`: names in it are replaced, so it must not be compressed.
    """
    call_headers = passed_on(headers)
    if is_rewritten:
        return {
            name: value for name, value in call_headers.items() if name.lower() != "accept-encoding"
        }
    return call_headers


def forwarded(headers: Mapping[str, str], names: Sequence[str] = FORWARDED) -> dict[str, str]:
    """Return the headers of these names that a request has, for Triton: as a rule those of an
    invocation in SageMaker's contract.
    """
    return {name: value for name in names if (value := headers.get(name)) is not None}


def list_answer_headers(headers: RawHeaders, *, is_v2: bool) -> list[tuple[bytes, bytes]]:
    """Return those headers of Triton's answer that the client gets: for V2 all but those of the
    connection; for SageMaker only the content type and Content-Encoding.
    """
    if is_v2:
        dropped = _DROPPED | names_of_connection(headers)
        return [pair for pair in headers if pair[0].lower() not in dropped]
    fields = _JSON
    for name, value in headers:
        key = name.lower()
        if key == _HEADER_LENGTH:
            fields = [(b"Content-Type", _BINARY + value), *fields[1:]]
        elif key == b"content-encoding":
            fields = [*fields, (name, value)]
    return fields


def names_of_connection(fields: RawHeaders) -> set[bytes]:
    """Return the names, in lower case, of fields that are for one connection alone."""
    return {
        name.strip().lower()
        for key, value in fields
        if key.lower() == b"connection"
        for name in value.split(b",")
    }


def echoed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return those headers of a request that the answer to it repeats, if they are
    printable ASCII.
    """
    return {
        header: value
        for header in ECHOED
        if (value := headers.get(header)) is not None and value.isascii() and value.isprintable()
    }


def write_fields(headers: Mapping[str, str]) -> bytes:
    """Return headers as lines. Raises ValueError for one with a line break."""
    if not headers:
        return b""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\r") != len(headers) or text.count("\n") != len(headers):
        raise ValueError("a header of an answer has a line break in it")
    return text.encode("utf-8", "surrogateescape")


def error_status(error: AdapterError) -> int:
    """Return the HTTP status of an error; 500 for one that has none."""
    return (lookup(HTTP, error) or (500, ""))[0]


@dataclass(slots=True)
class Refusal:
    """Holds the answer to a request that failed."""

    status: int
    headers: Mapping[str, str]  # besides those that any such answer has
    body: str  # JSON
    # fields of the log that SageMaker's contract and V2 do not have
    logged: Mapping[str, object] = field(default_factory=dict)


_INTERNAL_FAILURE = Refusal(
    500,
    {},
    '{"error": "internal error; see the log", "code": "InternalError", "model_name": null}',
)


def own_refusal(error: AdapterError | None, model_id: ModelId | None) -> Refusal:
    """Return the answer for an error in SageMaker's container contract and in V2, None for a bug.
    `model_id`: the model that the path names, for errors that name none.
    """
    if error is None:
        return _INTERNAL_FAILURE
    status, code = lookup(HTTP, error) or (500, "InternalError")
    name = error.model_id or model_id
    # a third of what it takes to encode it as a dict
    shown_name = "null" if name is None else quoted(name)
    body = f'{{"error": {quoted(str(error))}, "code": "{code}", "model_name": {shown_name}}}'
    if isinstance(error, AboutMemory):
        more = asdict(error.figures) | {"matched": error.matched}
        body = f"{body[:-1]}, {json.dumps(more)[1:]}"
    return Refusal(status, _list_error_headers(error), body)


def _list_error_headers(error: AdapterError) -> dict[str, str]:
    """Return the headers that the status of an error asks for, such as Retry-After or Allow, and
    the mark of a request that was not started.
    """
    headers = {NOT_STARTED: "1"} if was_not_started(error) else {}
    match error:
        case TooManyConnections() | TooManyWaiting():
            headers["Retry-After"] = "1"
        case MethodNotAllowed():
            headers["Allow"] = error.allowed
        case UnsupportedMediaType():
            headers["Accept"] = error.accepted
        case Unauthenticated():
            headers["WWW-Authenticate"] = challenge(error)
    return headers


def encoded(body: str) -> bytes:
    """Return a body of JSON as bytes, with a line break behind it: on a terminal the prompt then
    starts on a line of its own.
    """
    return f"{body}\n".encode()


class Clock:
    """The time as answers give it, at the end of their heads; whoever owns it calls `tick` every
    now and then. `last`: of an answer behind which the connection closes.
    """

    def __init__(self) -> None:
        self.tick()

    def tick(self) -> None:
        """Write the Date line anew; called once a second."""
        self.line = f"Date: {formatdate(usegmt=True)}\r\n\r\n".encode()
        self.last = b"Connection: close\r\n" + self.line


class Instrumentation:
    """Notes what happens at one listener."""

    def __init__(self, metrics: Metrics, listener: str = "http") -> None:
        self.listener = listener
        self._metrics = metrics
        self._lines = LogLimit(listener)
        contracts = set(CONTRACTS.values())
        self._in_flight = {name: metrics.traffic.find_in_flight(name) for name in contracts}

    def in_flight(self, contract: str) -> InFlight:
        """Return the gauge of requests in flight of a contract."""
        return self._in_flight[contract]

    def served(self, frontend: str, operation: str) -> Served:
        """Return the counts of one operation of a frontend."""
        return self._metrics.traffic.served(frontend, operation)

    def record_refusal(
        self,
        error: AdapterError,
        asked: Asked,
        operation: str,
        model_id: ModelId | None = None,
        *,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """Note an error with which a request is answered. `model_id`: the model that the path
        names, for errors that name none; `more`: fields of the log that other contracts than our
        own have.
        """
        level = level_of(error)
        if log.isEnabledFor(level) and self._lines.admits(error, level):
            method, target, headers = asked()
            about = {**ids_of_headers(headers), "method": method, "path": target[:500]}
            if name := error.model_id or model_id:
                about["model_id"] = name
            self._write_log(level, error, about, more or {})
        if isinstance(error, OutOfMemory) and operation in INFERENCES:
            self._metrics.count_out_of_memory("infer", error.pattern)
        drop_tracebacks(error)

    def record_malformed(self, error: AdapterError, more: Mapping[str, object]) -> None:
        """Note what is no HTTP at all. `more`: as for `record_refusal`."""
        if self._lines.admits(error, logging.INFO):
            self._write_log(logging.INFO, error, {}, more)

    def _write_log(
        self,
        level: int,
        error: AdapterError,
        about: Mapping[str, str],
        more: Mapping[str, object],
    ) -> None:
        """Log an error that a request is answered with, as request.failed."""
        fields = {
            "listener": self.listener,
            "status": error_status(error),
            "reason": str(error)[:2000],
            "error": type(error).__name__,
        }
        log.log(level, "request.failed", extra={**fields, **about, **more})

    def record_bug(
        self, error: Exception, request: tuple[str, str], model_id: ModelId | None = None
    ) -> None:
        """Note an error that nobody expected. `request`: its method and target."""
        fields = {
            "listener": self.listener,
            "method": request[0],
            "path": request[1][:500],
            "status": HTTPStatus.INTERNAL_SERVER_ERROR.value,
            "model_id": model_id,
        }
        log.error("request.failed", exc_info=error, extra=fields)
        drop_tracebacks(error)
