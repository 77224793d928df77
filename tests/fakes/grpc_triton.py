"""A gRPC server in Triton's place, which does what a test says, and a data plane to it."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.triton.grpc import GrpcDataPlane
from tests.fakes.unread import unread

Act = Callable[[Any, Any], Any]


async def _decoupled(message: bytes, context: Any) -> bytes:
    """Only a model that is has streams of Triton's."""
    answer = pb.ModelConfigResponse()
    answer.config.model_transaction_policy.decoupled = True
    return bytes(answer.SerializeToString())


class _Echo(grpc.GenericRpcHandler):
    def __init__(self, act: Act) -> None:
        self._act = act

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.endswith("ModelConfig"):
            return grpc.unary_unary_rpc_method_handler(_decoupled)
        if details.method.endswith("ModelStreamInfer"):
            return grpc.stream_stream_rpc_method_handler(self._act)
        return grpc.unary_unary_rpc_method_handler(self._act)


@asynccontextmanager
async def dataplane_to(
    act: Act,
    *,
    timeout_seconds: float = 10,
    max_message_bytes: int = 2**20,
    unread_bytes: int = 2**28,
) -> AsyncIterator[GrpcDataPlane]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    server.add_generic_rpc_handlers((_Echo(act),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    dataplane = GrpcDataPlane(
        Faults(Classifier(())),
        timeout_seconds=timeout_seconds,
        max_message_bytes=max_message_bytes,
        unread=unread(unread_bytes),
    )
    dataplane.connect(f"127.0.0.1:{port}")
    try:
        yield dataplane
    finally:
        await dataplane.close()
        await server.stop(None)
