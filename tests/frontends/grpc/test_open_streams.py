"""Streams that stay open: each counts in the byte budget from its first frame to its end."""

import asyncio

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.relay import frames
from adapter.relay.frames import Code
from tests.frontends.grpc.proxy_listener import (
    INFER,
    STREAM,
    begin,
    channel_to,
    complete,
    frame,
    limited,
    prefixed,
    refusal,
    request_of,
    until,
    wire_to,
)

TWO = 2**20  # the budget of which two streams fill a share
FIGURES = "2 open streams hold 131072 of 131072 bytes (one 8th of max_inflight_body_bytes, and"


async def each(requests, context):
    """Answer each request of a stream; and a call that is none."""
    async for message in requests:
        name = pb.ModelInferRequest.FromString(message).model_name
        answer = pb.ModelInferResponse(model_name=name)
        yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()


@limited(max_inflight_bytes=TWO)
async def test_stream_too_many_is_refused_with_figures(proxy, channel):
    """The other streams go on."""
    proxy.answer_with(each)
    calls = [channel.stream_stream(STREAM)() for _ in range(2)]
    for call in calls:
        await call.write(request_of("m"))
        assert await call.read()
    refused = channel.stream_stream(STREAM)()
    with pytest.raises(grpc.aio.AioRpcError, match="TooManyWaiting") as error:
        await refused.read()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert FIGURES in error.value.details()
    assert ("x-triton-adapter-not-started", "1") in tuple(error.value.trailing_metadata())
    for call in calls:
        await call.write(request_of("m"))
        assert await call.read()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    await until(lambda: proxy.budget.held == 0)
    again = channel.stream_stream(STREAM)()
    await again.write(request_of("m"))
    assert await again.read()
    again.cancel()


@limited(max_inflight_bytes=TWO)
async def test_refused_stream_is_unavailable_to_blocking_client(proxy):
    """It sends its request meanwhile. A grpc.aio client shows INTERNAL instead where its write
    fails (grpc/grpc#36066), whichever server has refused the stream.
    """

    def call_in_thread(address: str) -> grpc.RpcError:
        with grpc.insecure_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as error:
                next(channel.stream_stream(STREAM)(iter([request_of("m")])))
            return error.value

    proxy.answer_with(each)
    async with wire_to(proxy.address) as first, wire_to(proxy.address) as second:
        for wire in (first, second):
            wire.greet()
            wire.send(begin(1, STREAM))
        await until(lambda: proxy.budget.held == TWO // 8)
        for _ in range(10):
            error = await asyncio.to_thread(call_in_thread, proxy.address)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert FIGURES in error.details()


@limited(max_inflight_bytes=TWO)
async def test_connection_with_most_streams_makes_room_for_another(proxy, wire):
    proxy.answer_with(each)
    async with channel_to(proxy.address) as other, channel_to(proxy.address) as third:
        wire.send(*(begin(i, STREAM) for i in (1, 3)))
        wire.send(frame(frames.DATA, 0, 3, prefixed(request_of("m"))))
        await wire.until(frames.DATA, 3)
        call = other.stream_stream(STREAM)()
        await call.write(request_of("m"))
        assert await call.read()
        _, _, trailers = await wire.until(frames.HEADERS, 3)
        assert b"most of them, 2, on this connection" in trailers
        assert b"x-triton-adapter-not-started" not in trailers
        refused = third.stream_stream(STREAM)()
        with pytest.raises(grpc.aio.AioRpcError, match="TooManyWaiting") as error:
            await refused.read()
        assert FIGURES in error.value.details()
        wire.send(complete(1, "m"))
        assert (await wire.answer(1))[0]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await until(lambda: proxy.budget.held == 0)


@limited(max_inflight_bytes=TWO)
async def test_calls_are_served_beside_full_streams(proxy, wire, channel):
    wire.send(*(begin(i, STREAM) for i in (1, 3, 5)))
    _, trailers = await wire.answer(5)
    assert FIGURES.encode() in trailers
    for name in ("m", "team/a"):  # to Triton itself, and not
        assert await channel.unary_unary(INFER)(request_of(name))
    assert (await refusal(channel.unary_unary(INFER)(request_of("none"))))[0] == "NOT_FOUND"


def of_both(kind: int, flags: int, payload: bytes) -> bytes:
    return b"".join(frame(kind, flags, stream_id, payload) for stream_id in (1, 3))


ENDS = {
    "the caller resets it": of_both(frames.RST_STREAM, 0, Code.CANCEL.to_bytes(4, "big")),
    "the caller ends it": of_both(frames.DATA, frames.END_STREAM, b""),
    "Triton ends it": of_both(frames.DATA, 0, prefixed(request_of("m"))),
    "it fails": of_both(frames.DATA, 0, b"\0\0\0\0\1\xff"),
    "its connection breaks the protocol": frame(frames.WINDOW_UPDATE, 0, 0, bytes(4)),
    "its connection closes": b"",
}


@pytest.mark.parametrize("end", ENDS)
async def test_ended_stream_counts_no_more(proxy, wire, end):
    async def act(requests, context):
        async for _ in requests:
            context.set_code(grpc.StatusCode.INTERNAL)
            return
        yield b""

    proxy.answer_with(act)
    wire.send(*(begin(i, STREAM) for i in (1, 3)))
    await until(lambda: proxy.budget.held == 2 * 2**16)
    if ENDS[end]:
        wire.send(ENDS[end])
    else:
        wire.writer.transport.abort()
    await until(lambda: proxy.budget.held == 0)


async def test_broken_server_connection_ends_its_streams(proxy, wire):
    proxy.answer_with(each)
    wire.send(begin(1, STREAM))
    await until(lambda: proxy.budget.held == 2**16)
    session = proxy.session
    await until(lambda: session.upstreams[0].was_open)
    session.upstreams[0].close()
    session.flush()
    await wire.answer(1)
    await until(lambda: proxy.budget.held == 0)
