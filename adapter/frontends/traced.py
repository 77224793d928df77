"""A server span for each request at a door. In use only where there is a collector."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, TypeAlias

import grpc
from aiohttp import web

from adapter.errors import InvalidRequest
from adapter.frontends.grpc_edge import Context
from adapter.frontends.http import Handler, path_segments
from adapter.tracing import MODEL, Tracing

_Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

# The codes that the semantic conventions take for errors of a server.
_FAILURES = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
_SERVICES = ("/inference.", "/mmesh.")

# What a segment of a path may be followed by that callers choose.
_CHOSEN = {"models": "{model_name}", "versions": "{version}", "region": "{region}"}


def traced(serve: Handler, tracing: Tracing) -> Handler:
    async def with_span(request: web.BaseRequest) -> web.StreamResponse:
        with tracing.server(request.method, request.headers) as span:
            response = await serve(request)
            span.set_attribute("http.request.method", request.method)
            span.set_attribute("url.scheme", "http")
            span.set_attribute("url.path", request.path)
            span.set_attribute("http.response.status_code", response.status)
            if "operation" in request:
                route = route_of(request)
                span.update_name(f"{request.method} {route}")
                span.set_attribute("http.route", route)
            if "model_id" in request:
                span.set_attribute(MODEL, request["model_id"])
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                tracing.failed(span, str(response.status))
            return response

    return with_span


def route_of(request: web.BaseRequest) -> str:
    """The path without what callers choose: there are few of these."""
    try:
        segments = path_segments(request)
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
