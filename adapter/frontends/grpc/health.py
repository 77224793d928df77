"""Serves grpc.health.v1 and server reflection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection

import grpc
from grpc_health.v1 import health_pb2 as pb  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from adapter.frontends.grpc.middleware import Context

_SERVICE = "grpc.health.v1.Health"
_POLL_SECONDS = 0.5


class Health:
    """Each service, and the empty name, has the readiness of the adapter."""

    def __init__(self, services: Collection[str], is_ready: Callable[[], bool]) -> None:
        self._services = frozenset(services) | {""}
        self._is_ready = is_ready

    def add_to(self, server: grpc.aio.Server) -> None:
        kinds = {
            "request_deserializer": pb.HealthCheckRequest.FromString,
            "response_serializer": pb.HealthCheckResponse.SerializeToString,
        }
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **kinds),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **kinds),
        }
        service = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        server.add_generic_rpc_handlers((service,))

    async def _check(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:200]!r}")
        return self._now(request.service)

    async def _watch(
        self, request: pb.HealthCheckRequest, _: Context
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        """Send changes, and end at NOT_SERVING: a server that stops waits for open calls."""
        sent = None
        while True:
            now = self._now(request.service)
            if now != sent:
                yield now
            if sent is not None and sent.status == pb.HealthCheckResponse.SERVING != now.status:
                return
            sent = now
            await asyncio.sleep(_POLL_SECONDS)

    def _now(self, service: str) -> pb.HealthCheckResponse:
        if service not in self._services:
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
        if self._is_ready():
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING)
        return pb.HealthCheckResponse(status=pb.HealthCheckResponse.NOT_SERVING)


def add_reflection(server: grpc.aio.Server, services: Collection[str]) -> None:
    """`services` besides health and reflection itself; their descriptors are protobuf's own."""
    names = [*services, _SERVICE, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
