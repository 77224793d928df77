"""Makes a client span for each call of a data plane, where there is a trace collector."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from adapter.core.calls import Hold, RpcAnswer, RpcCall, RpcStream, V2Call
from adapter.telemetry.tracing import CONTEXT_HEADERS, Tracing
from adapter.triton.grpc import SERVICE, GrpcDataPlane
from adapter.triton.http import HttpCall, HttpDataPlane


class TracedHttp:
    """Makes a client span for each call over HTTP."""

    def __init__(self, plane: HttpDataPlane, tracing: Tracing) -> None:
        self._plane = plane
        self._tracing = tracing

    @asynccontextmanager
    async def forward(self, call: V2Call, hold: Hold | None) -> AsyncIterator[HttpCall]:
        """Forward a call within a span."""
        record = hold.record if hold else None
        path = call.path.replace(f"/{record.name}", "/{model_name}", 1) if record else call.path
        model_id = record.asked_for if record else None
        with self._tracing.client(*_http(call.method, path), model_id) as span:
            headers = self._tracing.passed_on(call.headers)
            async with self._plane.forward(replace(call, headers=headers), hold) as answer:
                span.set_attribute("http.response.status_code", answer.status)
                yield answer


class TracedRpc:
    """Makes a client span for each call and stream over gRPC."""

    def __init__(self, plane: GrpcDataPlane, tracing: Tracing) -> None:
        self._plane = plane
        self._tracing = tracing

    async def call(self, call: RpcCall, message: bytes, hold: Hold | None) -> RpcAnswer:
        """Make a call within a span."""
        model_id = hold.record.asked_for if hold and hold.record else None
        with self._tracing.client(*_rpc(call.method), model_id) as span:
            answer = await self._plane.call(self._with_context(call), message, hold)
            span.set_attribute("rpc.response.status_code", "OK")
            return answer

    @asynccontextmanager
    async def stream(self, call: RpcCall, hold: Hold) -> AsyncIterator[RpcStream]:
        """Open a stream within a span."""
        with self._tracing.client(*_rpc(call.method), None):
            async with self._plane.stream(self._with_context(call), hold) as stream:
                yield stream

    def _with_context(self, call: RpcCall) -> RpcCall:
        kept = [(key, value) for key, value in call.metadata if key not in CONTEXT_HEADERS]
        return replace(call, metadata=[*kept, *self._tracing.passed_on({}).items()])


def _http(method: str, path: str) -> tuple[str, dict[str, str]]:
    """Return the name and the attributes of the span of a call over HTTP."""
    return f"{method} /v2{path}", {"http.request.method": method, "url.template": f"/v2{path}"}


def _rpc(method: str) -> tuple[str, dict[str, str]]:
    """Return the name and the attributes of the span of a call over gRPC."""
    name = f"{SERVICE.removeprefix('/')}/{method}"
    return name, {"rpc.system.name": "grpc", "rpc.method": name}
