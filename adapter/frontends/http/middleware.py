"""What aiohttp serves of the http listener: JSON answers, errors through one table, counts."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, HttpVersion11, web

from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    InvalidRequest,
    MethodNotAllowed,
    NotStarted,
    PayloadTooLarge,
)
from adapter.frontends.http.observer import (
    INTERNAL_ERROR,
    NOT_STARTED,
    Observer,
    echoed_headers,
    encoded,
    error_body,
)
from adapter.telemetry import request_ids
from adapter.telemetry.waiting import WAITED, Waited

log = logging.getLogger(__name__)

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def answer(body: Mapping[str, Any] | list[Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=encoded(body), content_type="application/json")


def method_not_allowed(request: web.BaseRequest, methods: Iterable[str]) -> MethodNotAllowed:
    allowed = ", ".join(methods)
    text = f"{request.method} is not allowed here; allowed: {allowed}"
    return MethodNotAllowed(text, allowed=allowed)


def ids_of(request: web.BaseRequest) -> dict[str, str]:
    """For the log."""
    return request_ids.of_headers(request.headers)


def error_answer(error: AdapterError, model_id: ModelId | None) -> web.Response:
    status, body = error_body(error, model_id)
    response = answer(body, status)
    if isinstance(error, MethodNotAllowed):
        response.headers["Allow"] = error.allowed
    if isinstance(error, NotStarted):
        response.headers[NOT_STARTED] = "1"
    return response


@dataclass(frozen=True, slots=True)
class Route:
    """A place under /v2: what it is called in metrics, and what each method does there.

    `needs` is what the setting `passthrough` must hold for it to be open.
    """

    operation: str
    methods: Mapping[str, Serve]
    needs: str | None = None

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        """HEAD is GET without the body."""
        handler = self.methods.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            raise method_not_allowed(request, self.methods)
        request["frontend"], request["operation"] = "v2", self.operation
        return await handler(request)


class HttpMiddleware:
    """Wraps one handler for everything: errors, counts, headers that go back."""

    def __init__(self, handle: Serve, observer: Observer) -> None:
        self._handle = handle
        self._observer = observer

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        begun, waited = time.monotonic(), Waited()
        WAITED.set(waited)
        in_flight = self._observer.in_flight(request.raw_path)
        in_flight.begin()
        try:
            response = await self._answered(request)
        finally:
            in_flight.end()
        frontend = request.get("frontend", "sagemaker")
        operation, seconds = request.get("operation", "other"), time.monotonic() - begun
        self._observer.answered(frontend, operation, response.status, seconds, waited)
        return response

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._handle(request)
        except AdapterError as error:
            operation, model_id = request.get("operation", "other"), request.get("model_id")
            self._observer.refused(error, request.headers, request.raw_path, operation, model_id)
            response = error_answer(error, model_id)
        except (ConnectionResetError, asyncio.CancelledError):
            raise  # the caller has gone
        except Exception:
            fields = {"path": request.raw_path[:500], "model_id": request.get("model_id")}
            log.exception("request.failed", extra=fields)
            response = answer(INTERNAL_ERROR, status=500)
        if not response.prepared:
            response.headers.update(echoed_headers(request.headers))
        return response


def chunks_of(request: web.BaseRequest, limit: int) -> AsyncIterator[bytes]:
    """As they arrive. PayloadTooLarge at once, or before the first byte too many."""
    known = request.content_length
    if known is not None and known > limit:
        raise PayloadTooLarge(f"the body has {known} bytes; at most {limit} are accepted")
    return _counted(request, limit)


async def whole_body(request: web.BaseRequest, limit: int) -> bytes:
    return b"".join([chunk async for chunk in chunks_of(request, limit)])


async def _counted(request: web.BaseRequest, limit: int) -> AsyncIterator[bytes]:
    seen = 0
    _say_continue(request)
    try:
        async for chunk in request.content.iter_any():
            seen += len(chunk)
            if seen > limit:
                raise PayloadTooLarge(f"the body has more than {limit} bytes")
            yield chunk
    except (ConnectionError, ClientError, web.RequestPayloadError) as error:
        raise InvalidRequest(f"the body broke off after {seen} bytes") from error


def _say_continue(request: web.BaseRequest) -> None:
    """To who waits for that before it sends the body."""
    content = request.content
    is_waiting = not (content.is_eof() or content.total_bytes) and request.version == HttpVersion11
    expects = request.headers.get("Expect", "").lower() == "100-continue"
    if is_waiting and expects and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
