"""Streams when Triton fails in ways that a real one does not on demand."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.runtime import clock
from tests.frontends.grpc.proxy_listener import (
    INFER,
    STREAM,
    ProxySetup,
    refusal,
    request,
    request_of,
)


def list_at_work(proxy: ProxySetup) -> set[str]:
    """Return the models that an exit of Triton at this moment would find at work."""
    return set(proxy.fakes.parts.leases.at_work.collect(clock.monotonic()))


async def test_broken_stream_ends_and_frees_its_models(proxy, channel):
    async def act(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    proxy.answer_with(act)
    call = channel.stream_stream(STREAM)()
    await call.write(request_of("m"))
    assert await refusal(call.read()) == (
        "UNAVAILABLE",
        "BackendUnavailable: the connection to Triton broke: Socket closed",
    )
    assert proxy.in_flight("m") == 0
    assert proxy.counted("UNAVAILABLE", "ModelStreamInfer", "grpc") == 1


@pytest.mark.parametrize("has_left", [False, True], ids=["caller waits", "caller has left"])
async def test_broken_stream_shows_its_models_at_work(proxy, channel, has_left):
    """A connection breaks before the process has ended: the exit is judged by what broke off."""
    begun: asyncio.Queue[None] = asyncio.Queue()
    breaks = asyncio.Event()

    async def act(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(aiter(requests))
        begun.put_nowait(None)
        await breaks.wait()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    proxy.answer_with(act)
    call = channel.stream_stream(STREAM)()
    for name in ("m", "team/a"):
        await call.write(request_of(name))
        await asyncio.wait_for(begun.get(), 10)
    if has_left:
        call.cancel()
        await proxy.until_abandoned("m")
    breaks.set()
    for name in ("m", "team/a"):
        await proxy.until_free(name)
    assert list_at_work(proxy) == {"m", "team/a"}


async def test_broken_abandoned_call_shows_model_at_work(proxy, upstream, wire):
    wire.send(request(1))
    triton = await upstream.asked()
    wire.writer.transport.abort()
    await proxy.until_abandoned("m")
    triton.writer.transport.abort()
    await proxy.until_free("m")
    assert list_at_work(proxy) == {"m"}


async def test_nameless_failure_is_of_its_streams_model(proxy, channel):

    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            if pb.ModelInferRequest.FromString(message).id == "fail":
                yield pb.ModelStreamInferResponse(error_message="bad").SerializeToString()

    proxy.answer_with(act)
    call = channel.stream_stream(STREAM)()
    for name, text in (("m", "go"), ("team/a", "fail")):
        await call.write(request_of(name, id=text))
    answer = pb.ModelStreamInferResponse.FromString(await call.read())
    assert answer.error_message == "InvalidRequest: bad"
    assert (proxy.in_flight("m"), proxy.in_flight("team/a")) == (1, 0)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert (proxy.in_flight("m"), proxy.in_flight("team/a")) == (0, 0)


async def test_each_model_has_its_stream_to_triton(proxy, channel):
    """Until it is idle and another model comes."""
    seen: list[list[str]] = []
    ends: asyncio.Queue[str] = asyncio.Queue()

    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        names: list[str] = []
        seen.append(names)
        async for message in requests:
            names.append(pb.ModelInferRequest.FromString(message).model_name)
            answer = pb.ModelInferResponse(model_name=names[0])
            answer.parameters["triton_final_response"].bool_param = True
            yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
        ends.put_nowait(names[0])

    proxy.answer_with(act)
    call = channel.stream_stream(STREAM)()

    async def ask(name: str) -> None:
        await call.write(request_of(name))
        answer = pb.ModelStreamInferResponse.FromString(await call.read()).infer_response
        assert answer.model_name == name

    for name in ("m", "m", "team/a"):
        await ask(name)
    first, second = seen
    assert await asyncio.wait_for(ends.get(), 10) == first[0]
    await ask("m")
    assert await asyncio.wait_for(ends.get(), 10) == second[0]
    assert seen == [["m", "m"], second, ["m"]]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_stream_ended_by_triton_is_no_success(proxy, channel):
    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(aiter(requests))
        return
        yield b""

    proxy.answer_with(act)
    call = channel.stream_stream(STREAM)()
    await call.write(request_of("m"))
    assert (await refusal(call.read()))[0] == "UNAVAILABLE"
    assert proxy.in_flight("m") == 0


async def test_failed_stream_request_counts_once(proxy, channel):
    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield pb.ModelStreamInferResponse(error_message="bad").SerializeToString()

    proxy.answer_with(act)
    call = channel.stream_stream(STREAM)()
    await call.write(request_of("m"))
    await call.read()
    assert proxy.fakes.control.registry.serving("m").usage.served == 1
    call.cancel()


async def test_metadata_passes_both_ways(proxy, channel):
    seen: dict[str, Any] = {}

    async def act(message: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last-bin", b"\xff"),))
        return pb.ModelInferResponse(model_name="m").SerializeToString()

    proxy.answer_with(act)
    metadata = (("traceparent", "00-ab-cd-01"), ("mm-model-id", "m"), ("x-bin", b"\x00"))
    call = channel.unary_unary(INFER)(b"", metadata=metadata)
    await call
    assert ("first", "1") in [*await call.initial_metadata()]
    assert ("last-bin", b"\xff") in [*await call.trailing_metadata()]
    assert seen.items() >= {"traceparent": "00-ab-cd-01", "x-bin": b"\x00"}.items()
    assert "mm-model-id" not in seen


async def test_lost_model_is_reported_in_the_stream(proxy, channel):
    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            name = pb.ModelInferRequest.FromString(message).model_name
            text = f"Request for unknown model: '{name}' is not found"
            yield pb.ModelStreamInferResponse(error_message=text).SerializeToString()

    proxy.answer_with(act)
    proxy.fakes.triton.models.clear()
    call = channel.stream_stream(STREAM)()
    await call.write(request_of("team/a"))
    answer = pb.ModelStreamInferResponse.FromString(await call.read())
    assert answer.error_message == (
        "Request for unknown model: 'team/a' is not found; "
        "ModelNotFound: Triton does not have the model: "
        "Request for unknown model: 'team/a' is not found"
    )
    await proxy.fakes.until_state("team/a", None)
    await call.write(request_of("team/a"))
    answer = pb.ModelStreamInferResponse.FromString(await call.read())
    assert answer.error_message.endswith("ModelNotFound: model 'team/a' is not loaded")
    call.cancel()


async def test_stream_is_told_that_its_model_returns(proxy, channel):
    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            text = "Request for unknown model: 'm' is not found"
            yield pb.ModelStreamInferResponse(error_message=text).SerializeToString()

    proxy.answer_with(act)
    proxy.fakes.load_lost_again()
    proxy.fakes.triton.models.clear()
    call = channel.stream_stream(STREAM)()
    await call.write(request_of("m"))
    answer = pb.ModelStreamInferResponse.FromString(await call.read())
    assert answer.error_message == "ModelNotReady: model 'm' is being loaded again"
    call.cancel()
