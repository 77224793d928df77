"""The edge of the http door: every answer of ours is JSON, every error goes through one table."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes

from aiohttp import web

from adapter.core.model import ModelId
from adapter.core.waiting import WAITED, Waited
from adapter.errors import (
    AboutMemory,
    AdapterError,
    CallerError,
    InvalidRequest,
    OutOfMemory,
)
from adapter.frontends import request_ids
from adapter.frontends.drain import Drain
from adapter.frontends.status import HTTP, lookup
from adapter.metrics import Metrics

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# given back to the caller and written to the log, never used as a key
_ECHOED = (
    "X-Amzn-SageMaker-Custom-Attributes",
    "X-Amzn-SageMaker-Inference-Id",
    "X-Request-Id",
)
_V2 = frozenset({"/v2", "/v2/", "/v2?"})
_INFERENCES = frozenset({"invoke", "invocations", "infer", "generate", "generate_stream"})


def answer(body: Mapping[str, Any] | list[Any], status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=json.dumps(body).encode(), content_type="application/json"
    )


def method_not_allowed(request: web.BaseRequest, allowed: str) -> web.Response:
    response = answer(
        {
            "error": f"{request.method} is not allowed here; allowed: {allowed}",
            "code": "MethodNotAllowed",
            "model_name": None,
        },
        status=405,
    )
    response.headers["Allow"] = allowed
    return response


def path_segments(request: web.BaseRequest) -> list[str]:
    """The path, split at its raw slashes and only then decoded, so that `%2F` is part of a name."""
    raw = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path
    raw = raw.partition("?")[0]
    try:
        return [unquote_to_bytes(part).decode() for part in raw.removeprefix("/").split("/")]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the path is not percent-encoded UTF-8: {raw[:200]!r}") from error


def ids_of(request: web.BaseRequest) -> dict[str, str]:
    """For the log."""
    return request_ids.of_headers(request.headers)


def error_answer(error: AdapterError, model_id: ModelId | None) -> web.Response:
    status, code = lookup(HTTP, error) or (500, "InternalError")
    name = error.model_id or model_id
    body: dict[str, Any] = {"error": str(error), "code": code, "model_name": name}
    if isinstance(error, AboutMemory):
        body |= asdict(error.figures) | {"matched": error.matched}
    return answer(body, status)


class HttpEdge:
    """Wraps one handler for everything: errors, counts, headers that go back."""

    def __init__(self, handle: Handler, metrics: Metrics, drain: Drain) -> None:
        self._handle = handle
        self._metrics = metrics
        self._drain = drain
        self._flights = {name: metrics.traffic.flight(name) for name in ("sagemaker", "v2")}

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        begun, waited = time.monotonic(), Waited()
        WAITED.set(waited)
        flight = self._flights["v2" if request.raw_path[:4] in _V2 else "sagemaker"]
        flight.count += 1
        try:
            response = await self._answered(request)
        finally:
            flight.count -= 1
        if self._drain.is_on:
            _close_after(request, response)
        self._count(request, response.status, time.monotonic() - begun, waited.seconds)
        return response

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            response = await self._handle(request)
        except AdapterError as error:
            self._log(request, error)
            response = error_answer(error, request.get("model_id"))
        except (ConnectionResetError, asyncio.CancelledError):
            raise  # the caller has gone
        except Exception:
            log.exception("request.failed", extra={"path": request.raw_path[:500]})
            body = {"error": "internal error; see the log", "code": "InternalError"}
            response = answer(body | {"model_name": None}, status=500)
        if not response.prepared:
            echo(request, response)
        return response

    def _log(self, request: web.BaseRequest, error: AdapterError) -> None:
        level = logging.INFO if isinstance(error, CallerError) else logging.WARNING
        fields = ids_of(request) | {
            "path": request.raw_path[:500],
            "reason": str(error)[:2000],
            "error": type(error).__name__,
        }
        log.log(level, "request.failed", extra=fields)
        if isinstance(error, OutOfMemory) and request.get("operation") in _INFERENCES:
            self._metrics.out_of_memory.labels("infer", error.pattern or "").inc()

    def _count(
        self, request: web.BaseRequest, status: int, seconds: float, waited: float | None
    ) -> None:
        method = request.get("operation", "other")
        frontend = request.get("frontend", "sagemaker")
        self._metrics.traffic.served(frontend, method).count(status, seconds, waited)


def echo(request: web.BaseRequest, response: web.StreamResponse) -> None:
    for header in _ECHOED:
        value = request.headers.get(header)
        if value is not None and value.isascii() and value.isprintable():
            response.headers[header] = value


def _close_after(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Callers are to go elsewhere with their next request."""
    if response.prepared:  # too late to say so
        if request.protocol is not None:
            request.protocol.close()
    else:
        response.force_close()


class _Connection(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP gets the same JSON as any other bad request, and no traceback in the log.

        A 500 from here would be a bug in the edge itself: aiohttp logs and answers that.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        reason = " ".join((message or str(exc)).split())[:500]
        log.info("request.failed", extra={"reason": reason, "error": "InvalidRequest"})
        response = error_answer(InvalidRequest(f"this is no HTTP request: {reason}"), None)
        response.force_close()
        return response


def server_of(serve: Handler) -> web.Server:
    # who hangs up is not computed for any more; operations of control outlive their callers
    return _Server(serve, handler_cancellation=True)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        # compressed bodies are Triton's to open
        loop = asyncio.get_running_loop()
        return _Connection(self, loop=loop, auto_decompress=False)
