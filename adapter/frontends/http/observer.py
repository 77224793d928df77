"""Headers that are passed on and given back, error bodies, log lines and counts over HTTP."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

from adapter.core.model import ModelId
from adapter.errors import AboutMemory, AdapterError, InvalidRequest, OutOfMemory, was_refused
from adapter.frontends.status import HTTP, lookup
from adapter.telemetry import request_ids
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.traffic import InFlight
from adapter.telemetry.waiting import Waited

log = logging.getLogger(__name__)

# given back to the caller and written to the log, never used as a key
ECHOED = (
    "X-Amzn-SageMaker-Custom-Attributes",
    "X-Amzn-SageMaker-Inference-Id",
    "X-Request-Id",
)
# Headers of an invocation in SageMaker's contract that Triton gets; the others end here.
FORWARDED = ("Accept-Encoding", "Content-Encoding", "traceparent", "tracestate")
# They concern one connection, not the call (RFC 9110 section 7.6.1), or are written anew.
OF_THE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "expect", "content-length"),
    }
)
NOT_STARTED = "X-Triton-Adapter-Not-Started"
INTERNAL_ERROR = {
    "error": "internal error; see the log",
    "code": "InternalError",
    "model_name": None,
}

_LINES = {one.value: f"HTTP/1.1 {one.value} {one.phrase}\r\n".encode() for one in HTTPStatus}

_V2 = frozenset({"/v2", "/v2/", "/v2?"})
_INFERENCES = frozenset({"invoke", "invocations", "infer", "generate", "generate_stream"})


def path_segments(target: str) -> list[str]:
    """The path, split at its raw slashes and only then decoded, so that `%2F` is part of a name."""
    if not target.startswith("/"):  # the absolute form
        target = "/" + target.partition("://")[2].partition("/")[2]
    raw = target.partition("?")[0]
    try:
        return [unquote_to_bytes(part).decode() for part in raw.removeprefix("/").split("/")]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the path is not percent-encoded UTF-8: {raw[:200]!r}") from error


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Without those that concern one connection only."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    dropped = OF_THE_CONNECTION | named
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


def call_headers(headers: Mapping[str, str], *, is_rewritten: bool) -> dict[str, str]:
    """`is_rewritten`: names in the answer will have to be put back, so it must not be packed."""
    return {
        name: value.lower() if name.lower() == "content-encoding" else value  # Triton knows no GZIP
        for name, value in passed_on(headers).items()
        if not is_rewritten or name.lower() != "accept-encoding"
    }


def echoed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        header: value
        for header in ECHOED
        if (value := headers.get(header)) is not None and value.isascii() and value.isprintable()
    }


def error_body(error: AdapterError, model_id: ModelId | None) -> tuple[int, dict[str, Any]]:
    """Status, and what is answered as JSON."""
    status, code = lookup(HTTP, error) or (500, "InternalError")
    name = error.model_id or model_id
    body: dict[str, Any] = {"error": str(error), "code": code, "model_name": name}
    if isinstance(error, AboutMemory):
        body |= asdict(error.figures) | {"matched": error.matched}
    return status, body


def encoded(body: Mapping[str, Any] | list[Any]) -> bytes:
    return json.dumps(body).encode()


class Clock:
    """The time as answers give it; whoever owns it calls `tick` every now and then."""

    def __init__(self) -> None:
        self.tick()

    def tick(self) -> None:
        self.line = f"Date: {formatdate(usegmt=True)}\r\n\r\n".encode()


def head_of(
    status: int, fields: Iterable[tuple[bytes, bytes]], rest: bytes, clock: Clock, *, is_last: bool
) -> bytes:
    """`rest` is of whole lines. `is_last`: the connection closes behind the answer."""
    close = b"Connection: close\r\n" if is_last else b""
    return b"%b%b%b%b%b" % (_LINES[status], lines_of(fields), rest, close, clock.line)


def lines_of(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % pair for pair in fields])


def json_answer(
    status: int,
    body: bytes,
    clock: Clock,
    fields: Iterable[tuple[bytes, bytes]] = (),
    *,
    echoed: bytes = b"",
    is_last: bool,
) -> bytes:
    rest = b"Content-Type: application/json\r\nContent-Length: %d\r\n%b" % (len(body), echoed)
    return head_of(status, fields, rest, clock, is_last=is_last) + body


class Observer:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._in_flight = {name: metrics.traffic.in_flight_of(name) for name in ("sagemaker", "v2")}

    def in_flight(self, target: str) -> InFlight:
        """Of whatever contract the request is, before it is looked at closely."""
        return self._in_flight["v2" if target[:4] in _V2 else "sagemaker"]

    def answered(
        self, frontend: str, operation: str, status: int, seconds: float, waited: Waited
    ) -> None:
        served = self._metrics.traffic.served(frontend, operation)
        served.count(status, seconds, waited.seconds)

    def refused(
        self,
        error: AdapterError,
        headers: Mapping[str, str],
        target: str,
        operation: str,
        model_id: ModelId | None = None,
    ) -> None:
        """`model_id`: the model that the path names, for errors that name none."""
        level = logging.INFO if was_refused(error) else logging.WARNING
        fields = request_ids.of_headers(headers) | {
            "path": target[:500],
            "reason": str(error)[:2000],
            "error": type(error).__name__,
        }
        if named := error.model_id or model_id:
            fields["model_id"] = named
        log.log(level, "request.failed", extra=fields)
        if isinstance(error, OutOfMemory) and operation in _INFERENCES:
            self._metrics.out_of_memory.labels("infer", error.pattern or "").inc()

    def malformed(self, error: AdapterError) -> None:
        """What is no HTTP at all."""
        fields = {"reason": str(error)[:500], "error": type(error).__name__}
        log.info("request.failed", extra=fields)
