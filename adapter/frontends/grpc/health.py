"""Serves grpc.health.v1 and server reflection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health_pb2 as pb  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from adapter.frontends.grpc.calls import Context

_SERVICE = "grpc.health.v1.Health"
_V1 = "grpc.reflection.v1.ServerReflection"
_V1ALPHA = reflection.SERVICE_NAME
_V1_FILE = "grpc/reflection/v1/reflection.proto"
_OWN = (_SERVICE, _V1ALPHA, _V1)
_POLL_SECONDS = 0.5


class Health:
    """Answers that each service of the listener, and the empty name, is as ready as the adapter."""

    def __init__(self, services: Collection[str], is_ready: Callable[[], bool]) -> None:
        self._services = frozenset(("", *services, *_OWN))
        self._is_ready = is_ready

    def service(self) -> grpc.GenericRpcHandler:
        """Return what answers the methods."""
        kinds = {
            "request_deserializer": pb.HealthCheckRequest.FromString,
            "response_serializer": pb.HealthCheckResponse.SerializeToString,
        }
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **kinds),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **kinds),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, handlers)

    async def _check(
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Answer Check: the service's state, and NOT_FOUND for a service that the
        listener lacks.
        """
        if request.service not in self._services:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            context.set_details(f"no service {request.service[:200]!r}")
        return self._read_state(request.service)

    async def _watch(
        self, request: pb.HealthCheckRequest, _: Context
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        """Answer Watch: send each change of the service's state, and end the call once that falls
        to NOT_SERVING, as a server that stops waits for open calls.
        """
        sent = None
        while True:
            now = self._read_state(request.service)
            if now != sent:
                yield now
            if sent is not None and sent.status == pb.HealthCheckResponse.SERVING != now.status:
                return
            sent = now
            await asyncio.sleep(_POLL_SECONDS)

    def _read_state(self, service: str) -> pb.HealthCheckResponse:
        """Return the present state of a service: that of the adapter, or SERVICE_UNKNOWN."""
        if service not in self._services:
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
        if self._is_ready():
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVING)
        return pb.HealthCheckResponse(status=pb.HealthCheckResponse.NOT_SERVING)


class _Pool:
    """Finds the file of a method, for which ghz asks, too. protobuf's default pool does not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(descriptor_pool.Default(), name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - the pool's name for it
        """Return the file of a symbol, or of a method."""
        pool = descriptor_pool.Default()
        with suppress(KeyError):
            return pool.FindMethodByName(symbol).containing_service.file
        return pool.FindFileContainingSymbol(symbol)


def reflection_services(
    names: Collection[str],  # of the services beside health and reflection
) -> list[grpc.GenericRpcHandler]:
    """Return both versions of server reflection, whose messages are the same on the wire. The
    descriptors of all services are in protobuf's default pool.
    """
    _describe_v1()
    answer = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer([*names, *_OWN], _Pool()).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": answer}
    return [grpc.method_handlers_generic_handler(name, handlers) for name in (_V1ALPHA, _V1)]


def _describe_v1() -> None:
    """Make the descriptor of reflection v1, where grpcio-reflection does not bring it."""
    pool = descriptor_pool.Default()
    with suppress(KeyError):
        pool.FindFileByName(_V1_FILE)
        return
    alpha = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text = text_format.MessageToString(alpha).replace("reflection.v1alpha", "reflection.v1")
    v1 = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    v1.name = _V1_FILE
    pool.AddSerializedFile(v1.SerializeToString())
