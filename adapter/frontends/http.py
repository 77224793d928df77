"""The edge of the application behind the http door: JSON answers, errors through one table."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from adapter.core.model import ModelId
from adapter.core.waiting import WAITED, Waited
from adapter.errors import AdapterError, InvalidRequest, MethodNotAllowed
from adapter.frontends import request_ids
from adapter.frontends.edge import (
    INTERNAL_ERROR,
    Observer,
    echoed_headers,
    encoded,
    error_body,
)
from adapter.frontends.http_lane.behind import Behind
from adapter.frontends.http_lane.head import HEAD_BYTES

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


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
    return response


class HttpEdge:
    """Wraps one handler for everything: errors, counts, headers that go back."""

    def __init__(self, handle: Handler, observer: Observer) -> None:
        self._handle = handle
        self._observer = observer

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        begun, waited = time.monotonic(), Waited()
        WAITED.set(waited)
        flight = self._observer.flight(request.raw_path)
        flight.count += 1
        try:
            response = await self._answered(request)
        finally:
            flight.count -= 1
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
        response.headers.update(echoed_headers(request.headers))
        return response


def handlers(
    serve: Handler, malformed: Callable[[AdapterError], None]
) -> Callable[[], web.RequestHandler]:
    """Makes a handler for one request each; `malformed` is told of what is no request."""
    return lambda: _OneRequest(
        # who hangs up is not computed for any more; operations of control outlive their callers
        web.Server(serve, handler_cancellation=True),
        malformed,
        loop=asyncio.get_running_loop(),
        # the lane has looked at the head already
        max_line_size=HEAD_BYTES,
        max_field_size=HEAD_BYTES,
        max_headers=HEAD_BYTES,
        # compressed bodies are Triton's to open
        auto_decompress=False,
    )


class _OneRequest(web.RequestHandler):
    """Its transport is told where the answer ends."""

    __slots__ = ("_malformed",)

    def __init__(
        self, server: web.Server, malformed: Callable[[AdapterError], None], **options: Any
    ) -> None:
        super().__init__(server, **options)
        self._malformed = malformed

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A target that is no URL gets the same JSON as any other bad request, and no traceback.

        A 500 from here would be a bug in the edge itself: aiohttp logs and answers that.
        """
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        error = InvalidRequest(f"this is no HTTP request: {' '.join(str(message or exc).split())}")
        self._malformed(error)
        response = error_answer(error, None)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        behind = self.transport
        if not isinstance(behind, Behind):  # the caller has gone
            return resp, True
        if not behind.may_be_kept():
            resp.force_close()
        done = await super().finish_response(request, resp, start_time)
        behind.answered(resp)
        return done
