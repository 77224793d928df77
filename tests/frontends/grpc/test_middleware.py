"""Callers that leave while they are answered, at a real gRPC server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from adapter.frontends.grpc.middleware import Context, GrpcMiddleware
from adapter.telemetry.metrics import Metrics
from tests.frontends.http.listener import until

METHOD = "ModelStreamInfer"


@asynccontextmanager
async def serving(metrics: Metrics, act) -> AsyncIterator[str]:
    middleware = GrpcMiddleware(metrics, "grpc")
    handlers = {METHOD: middleware.stream(METHOD, act)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def ask_and_leave(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        messages = channel.stream_stream(f"/a.Service/{METHOD}")(iter([b"x"]))
        next(messages)
        messages.cancel()


async def test_a_caller_who_leaves_before_a_write_is_counted_as_cancelled_and_is_no_bug(caplog):
    """A write that waits for the caller to read fails before the task is cancelled."""
    metrics, callers = Metrics(), 20

    async def act(requests: AsyncIterator[bytes], context: Context) -> None:
        while True:
            await context.write(bytes(2**20))

    def counted(code: str) -> float:
        labels = {"frontend": "grpc", "method": METHOD, "code": code}
        return metrics.registry.get_sample_value("triton_adapter_requests_total", labels) or 0

    async with serving(metrics, act) as address:
        for _ in range(callers):
            await asyncio.to_thread(ask_and_leave, address)
        await until(lambda: counted("CANCELLED") + counted("INTERNAL") == callers)
    assert (counted("CANCELLED"), counted("INTERNAL")) == (callers, 0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
