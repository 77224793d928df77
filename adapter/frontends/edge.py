"""What the http door says and notes of a request, be it the lane or the application that serves."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import unquote_to_bytes

from adapter.core.model import ModelId
from adapter.errors import AboutMemory, AdapterError, CallerError, InvalidRequest, OutOfMemory
from adapter.frontends.status import HTTP, lookup
from adapter.metrics import Metrics

log = logging.getLogger(__name__)

# given back to the caller and written to the log, never used as a key
_ECHOED = ("X-Amzn-SageMaker-Custom-Attributes", "X-Amzn-SageMaker-Inference-Id")
_LOGGED = {
    "X-Amzn-SageMaker-Target-Model": "target_model",
    "X-Amzn-SageMaker-Inference-Id": "inference_id",
    "X-Amzn-SageMaker-Custom-Attributes": "custom_attributes",
}
# They concern one connection, not the call (RFC 9110 section 7.6.1), or are written anew.
_OF_THE_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization"),
        *("proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "expect", "content-length"),
    }
)
INTERNAL_ERROR = {
    "error": "internal error; see the log",
    "code": "InternalError",
    "model_name": None,
}

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
    dropped = _OF_THE_CONNECTION | named
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


def logged_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {field: headers[header] for header, field in _LOGGED.items() if header in headers}


def echoed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        header: value
        for header in _ECHOED
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


class Observer:
    """The children of metrics are kept: to look one up by its labels costs more than to count."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._inc: dict[tuple[str, str, int], Callable[[], None]] = {}
        self._observe: dict[tuple[str, str], Callable[[float], None]] = {}

    def answered(self, frontend: str, operation: str, status: int, seconds: float) -> None:
        inc = self._inc.get((frontend, operation, status))
        if inc is None:
            inc = self._metrics.requests.labels(frontend, operation, status).inc
            self._inc[frontend, operation, status] = inc
        inc()
        observe = self._observe.get((frontend, operation))
        if observe is None:
            observe = self._metrics.request_seconds.labels(frontend, operation).observe
            self._observe[frontend, operation] = observe
        observe(seconds)

    def refused(
        self, error: AdapterError, headers: Mapping[str, str], target: str, operation: str
    ) -> None:
        level = logging.INFO if isinstance(error, CallerError) else logging.WARNING
        fields = logged_headers(headers) | {
            "path": target[:500],
            "reason": str(error)[:2000],
            "error": type(error).__name__,
        }
        log.log(level, "request.failed", extra=fields)
        if isinstance(error, OutOfMemory) and operation in _INFERENCES:
            self._metrics.out_of_memory.labels("infer", error.pattern or "").inc()

    def malformed(self, error: AdapterError) -> None:
        """What is no HTTP at all."""
        fields = {"reason": str(error)[:500], "error": type(error).__name__}
        log.info("request.failed", extra=fields)
