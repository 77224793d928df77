"""Makes a server span for each request, where there is a trace collector."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
from aiohttp import web

from adapter.errors import InvalidRequest
from adapter.frontends.grpc.middleware import Context
from adapter.frontends.http.middleware import Serve
from adapter.frontends.http.observer import path_segments
from adapter.telemetry.tracing import MODEL, Tracing

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

# codes that are server errors by the semantic conventions
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_SERVICES = ("/inference.", "/mmesh.")

# segments of a path that a client's choice follows, and its placeholder
_CHOSEN = {
    "models": "{model_name}",
    "versions": "{version}",
    "region": "{region}",
    "endpoints": "{endpoint_name}",
}


def traced(serve: Serve, tracing: Tracing) -> Serve:
    async def with_span(request: web.BaseRequest) -> web.StreamResponse:
        with tracing.server(request.method, request.headers) as span:
            response = await serve(request)
            _describe(tracing, span, request.method, request.raw_path, response.status)
            if "operation" in request:
                _name(span, request.method, request.raw_path)
            if "model_id" in request:
                span.set_attribute(MODEL, request["model_id"])
            return response

    return with_span


def _describe(tracing: Tracing, span: "Span", method: str, target: str, status: int) -> None:
    span.set_attribute("http.request.method", method)
    span.set_attribute("url.scheme", "http")
    span.set_attribute("url.path", target.partition("?")[0])
    if status:
        span.set_attribute("http.response.status_code", status)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        tracing.failed(span, str(status))


def _name(span: "Span", method: str, target: str) -> None:
    route = template_of(target)
    span.update_name(f"{method} {route}")
    span.set_attribute("http.route", route)


def template_of(target: str) -> str:
    """Return the path with placeholders for what clients choose, so that there are few."""
    try:
        segments = path_segments(target)
    except InvalidRequest:
        return ""
    return "".join(
        f"/{segment if segment == 'stats' else _CHOSEN.get(before, segment)}"
        for before, segment in zip(["", *segments], segments, strict=False)
    )


class TracedCalls(grpc.aio.ServerInterceptor):
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Found]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Found:
        handler, method = await continuation(handler_call_details), handler_call_details.method
        if handler is None or not method.startswith(_SERVICES):
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        if handler.request_streaming:  # all of ours are of one of two kinds, and of bytes
            act = self._traced(method.removeprefix("/"), metadata, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(act)
        act = self._traced(method.removeprefix("/"), metadata, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(act)

    def _traced(self, method: str, metadata: Sequence[tuple[str, str | bytes]], act: Any) -> Any:
        async def with_span(given: bytes | AsyncIterator[bytes], context: Context) -> Any:
            headers = {key: value for key, value in metadata if isinstance(value, str)}
            with self._tracing.server(method, headers) as span:
                span.set_attribute("rpc.system.name", "grpc")
                span.set_attribute("rpc.method", method)
                try:
                    return await act(given, context)
                finally:
                    code = _code(context)
                    span.set_attribute("rpc.response.status_code", code)
                    if code in _FAILURES:
                        self._tracing.failed(span, code)

        return with_span


def _code(context: Context) -> str:
    code = context.code() or grpc.StatusCode.OK
    return str(getattr(code, "name", code))
