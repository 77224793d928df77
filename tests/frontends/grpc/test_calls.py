"""Callers that leave while they are answered, at a real gRPC server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from adapter.errors import BackendUnavailable
from adapter.frontends.access import Access
from adapter.frontends.grpc.calls import GrpcCall, GrpcCalls, MessageLimits
from adapter.telemetry.metrics import Metrics
from tests.frontends.grpc.proxy_listener import INFER, request, until, wire_to

METHOD = "ModelStreamInfer"
KINDS = ("unary", "stream")


@asynccontextmanager
async def serving(
    metrics: Metrics, act, kind: str = "stream", method: str = f"/a.Service/{METHOD}"
) -> AsyncIterator[str]:
    service, name = method[1:].split("/")
    calls = GrpcCalls(metrics, Access("grpc"), MessageLimits())
    acts = {kind: {name: act}}
    server = grpc.aio.server()
    handler = calls.service(service, acts.get("unary", {}), acts.get("stream"))
    server.add_generic_rpc_handlers((handler,))
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


async def test_caller_leaving_before_write_counts_as_cancelled(caplog):
    """A write that waits for the caller to read fails before the task is cancelled."""
    metrics, callers = Metrics(), 20

    async def act(call: GrpcCall) -> None:
        while True:
            await call.context.write(bytes(2**20))

    def counted(code: str) -> float:
        labels = {"frontend": "grpc", "method": METHOD, "code": code}
        return metrics.registry.get_sample_value("triton_adapter_requests_total", labels) or 0

    async with serving(metrics, act) as address:
        for _ in range(callers):
            await asyncio.to_thread(ask_and_leave, address)
        await until(lambda: counted("CANCELLED") + counted("INTERNAL") == callers)
    assert (counted("CANCELLED"), counted("INTERNAL")) == (callers, 0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def fail(error: BaseException, kind: str) -> dict[bytes, bytes]:
    """Return the headers that answer a call of this kind whose work ends with the error."""

    async def act(*_: object) -> bytes:
        raise error

    async with serving(Metrics(), act, kind, INFER) as address, wire_to(address) as wire:
        wire.greet()
        wire.send(request(1))
        [head] = await wire.headers_of(1)
    return head


@pytest.mark.parametrize("kind", KINDS)
async def test_refusal_is_headers_alone(kind):
    """Envoy looks for the header that allows a retry in the first HEADERS, not in trailers."""
    head = await fail(BackendUnavailable("stopping", delivered=False), kind)
    assert (head[b"grpc-status"], head[b"x-triton-adapter-not-started"]) == (b"14", b"1")


@pytest.mark.parametrize("kind", KINDS)
async def test_caller_is_answered_when_shared_work_is_cancelled(kind):
    """A task that ends with CancelledError by itself makes gRPC answer nothing."""
    head = await fail(asyncio.CancelledError(), kind)
    text = b"BackendUnavailable: what this call waited for was cancelled; try again"
    assert (head[b"grpc-status"], head[b"grpc-message"]) == (b"14", text)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bug_is_internal_and_keeps_its_details(kind):
    head = await fail(KeyError("secret"), kind)
    text = b"InternalError: internal error; see the log"
    assert (head[b"grpc-status"], head[b"grpc-message"]) == (b"13", text)
