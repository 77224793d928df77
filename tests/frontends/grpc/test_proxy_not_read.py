"""The gRPC proxy holds no more for a Triton, or a caller, that reads nothing."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.core.calls import RPC_NOT_STARTED
from adapter.relay import frames
from adapter.relay.flow_control import STREAM_WINDOW
from tests.fakes.http2_triton import pour
from tests.frontends.grpc.proxy_listener import (
    MIB,
    Wire,
    big_request,
    frame,
    limited,
    prefixed,
    request,
    status,
    until,
    wire_to,
)
from tests.frontends.grpc.test_proxy_flow_control import held

UNSENT = 2**19  # bytes that were written to a peer that reads nothing


async def come_to_rest(proxy) -> None:
    """Nothing more is taken, for a tenth of a second."""
    before = -1
    while before != (before := held(proxy)):  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_stalled_triton_makes_us_hold_no_more(proxy, upstream):
    callers, size = 8, 16 * MIB

    async def send(wire):
        wire.greet()
        sending = asyncio.create_task(wire.pour(1, prefixed(big_request("m", size))))
        triton = await upstream.accepted()
        triton.reader._transport.pause_reading()
        triton.widen()
        await sending

    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(wire_to(proxy.address)) for _ in range(callers)]
        sending = [asyncio.create_task(send(wire)) for wire in wires]
        await until(
            lambda: all(s.upstreams and s.upstreams[0].is_paused for s in proxy.server._sessions)
        )
        await until(lambda: len(proxy.server._sessions) == callers)
        assert 0 < held(proxy) < callers * (STREAM_WINDOW + UNSENT)
        for writer in upstream.writers:
            writer.transport.resume_reading()
        await asyncio.gather(*(drained(upstream, size) for _ in sending), *sending)


async def drained(upstream, size):
    """One of its connections, which has one request."""
    await Wire(*upstream.pairs.pop()).data(1, size)


async def test_stalled_caller_makes_us_hold_no_more(proxy, upstream, wire):
    wire.widen()
    wire.send(request(1))
    triton = await upstream.asked()
    wire.reader._transport.pause_reading()
    whole = prefixed(bytes(32 * MIB - 5))
    pouring = asyncio.create_task(pour(triton, 1, whole))
    session = proxy.session
    await until(lambda: session.is_paused and session.upstreams[0].buffered > 0)
    await come_to_rest(proxy)
    assert 0 < held(proxy) < STREAM_WINDOW + UNSENT
    wire.reader._transport.resume_reading()
    await wire.data(1, 32 * MIB)
    await wire.until(frames.HEADERS, 1)
    await pouring


@limited(max_inflight_bytes=64 * MIB)
async def test_unread_answers_of_renamed_models_are_bounded(proxy, wire):
    """The fallback server has each of them whole until its caller takes it."""

    async def answer_at_length(*_: object) -> bytes:
        return pb.ModelInferResponse(raw_output_contents=[bytes(20 * MIB)]).SerializeToString()

    proxy.answer_with(answer_at_length)
    for stream_id in (1, 3, 5):
        wire.send(request(stream_id, "team/a"))
        await wire.until(frames.HEADERS, stream_id)
    assert 60 * MIB < proxy.budget.held <= 64 * MIB
    wire.send(request(7, "team/a"))
    _, _, end = await wire.until(frames.HEADERS, 7)
    assert status(end) == "RESOURCE_EXHAUSTED"
    assert RPC_NOT_STARTED.encode() not in end
    wire.widen()
    for _ in range(3):
        await wire.until(frames.HEADERS)
    await until(lambda: not proxy.budget.held)


@pytest.mark.slow
async def test_caller_that_reads_no_answers_is_cut(proxy, wire):
    await until(lambda: proxy.server._sessions)
    session = proxy.session
    wire.reader._transport.pause_reading()
    async with asyncio.timeout(10):
        while not session.ended.is_set():
            wire.send(frame(frames.PING, 0, 0, bytes(8)) * 1000)
            # those limits are not what this is about
            session.glitches = session.small_frames = 0
            await asyncio.sleep(0)
    assert held(proxy) < 4 * MIB
