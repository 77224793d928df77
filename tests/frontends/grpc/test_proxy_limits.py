"""How much of a request is taken: its length as it was said, each message, and all together."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from adapter.frontends.bodies import HeldBody
from adapter.frontends.grpc.calls import MessageLimits
from adapter.relay import frames
from adapter.relay.flow_control import CONNECTION_WINDOW, STREAM_WINDOW
from adapter.relay.frames import Code
from adapter.runtime import byte_budget
from tests.frontends.grpc.proxy_listener import (
    INFER,
    MIB,
    ProxySetup,
    begin,
    big_request,
    channel_to,
    complete,
    data_frames,
    echo,
    frame,
    head_of,
    limited,
    prefixed,
    proxy_before,
    refusal,
    request_of,
    status,
    until,
)
from tests.grpc_calls import SERVICE

# -- content-length: RFC 9113 section 8.1.1


def with_length(length: int | bytes, stream_id: int = 1) -> bytes:
    text = length if isinstance(length, bytes) else str(length).encode()
    return begin(stream_id, INFER, (b"content-length", text))


@pytest.mark.parametrize("name", ["m", "team/a"])
async def test_a_call_that_says_its_length_is_served(proxy, wire, name):
    message = prefixed(request_of(name))
    wire.send(with_length(len(message)), frame(frames.DATA, 0, 1, message[:9]))
    wire.send(frame(frames.DATA, frames.END_STREAM, 1, message[9:]))
    data, _ = await wire.answer(1)
    assert len(data) > 5
    assert proxy.counted("OK") == (1 if name == "m" else 0)  # it went straight


@pytest.mark.parametrize("name", ["m", "team/a"])
@pytest.mark.parametrize("difference", [-1, 1])
async def test_wrong_length_ends_stream_before_any_model(proxy, wire, difference, name):
    asked = []

    async def act(message, context):
        asked.append(message)
        return await echo(message, context)

    message = prefixed(request_of(name))
    proxy.answer_with(act)
    wire.send(with_length(len(message) + difference))
    wire.send(frame(frames.DATA, frames.END_STREAM, 1, message))
    assert await wire.reset_of(1) == Code.PROTOCOL_ERROR
    wire.send(with_length(len(message), 3), frame(frames.DATA, frames.END_STREAM, 3, message))
    await wire.answer(3)
    assert len(asked) == 1
    assert proxy.in_flight("m") == 0


async def test_late_wrong_length_reaches_no_model(proxy, upstream, wire):
    message = prefixed(big_request("m", STREAM_WINDOW))
    most = 36  # frames: so much that more of the window is given, and less than all of it
    wire.send(with_length(len(message) + 1), *data_frames(1, message)[:most])
    triton = await upstream.accepted({frames.INITIAL_WINDOW_SIZE: MIB})
    triton.send(frames.window_update(0, MIB))
    await wire.until(frames.WINDOW_UPDATE, 1)
    wire.send(*data_frames(1, message)[most:])
    assert await wire.reset_of(1) == Code.PROTOCOL_ERROR
    assert await triton.reset_of(1) == Code.CANCEL
    taken = [f for f in triton.got if f[0] == frames.DATA and f[1] & frames.END_STREAM]
    assert taken == []
    await proxy.until_free("m")


@pytest.mark.parametrize("length", [b"", b"-1", b"1, 1", b"one", b"9" * 30])
async def test_a_length_that_is_none_ends_the_stream(proxy, wire, length):
    wire.send(with_length(length))
    assert await wire.reset_of(1) == Code.PROTOCOL_ERROR


async def test_a_length_and_no_body_ends_the_stream(proxy, wire):
    block = head_of(INFER, (b"content-length", b"7"))
    wire.send(frames.header_block(1, block, end=True))
    assert await wire.reset_of(1) == Code.PROTOCOL_ERROR


# -- of one message


def packed(address: str) -> grpc.aio.Channel:
    options = (("grpc.max_send_message_length", -1),)
    gzip = grpc.Compression.Gzip
    return grpc.aio.insecure_channel(address, options=options, compression=gzip)


async def test_only_fallback_has_its_own_limit():
    limits = MessageLimits(unary=MIB, stream=4 * MIB)
    async with proxy_before(echo, limits=limits) as proxy, channel_to(proxy.address) as channel:
        infer = channel.unary_unary(INFER)
        small, large = big_request("m", MIB // 2), big_request("m", 2 * MIB)
        assert len(await infer(large)) > 2 * MIB
        renamed = large.replace(b"\x01m", b"\x06team/a", 1)
        code, text = await refusal(infer(renamed))
        assert code == "RESOURCE_EXHAUSTED"
        assert f"message larger than max ({len(renamed)} vs. {MIB})" in text
        async with packed(proxy.address) as other:
            infer = other.unary_unary(INFER)
            assert len(await infer(small)) > MIB // 2
            code, text = await refusal(infer(large))
            assert code == "RESOURCE_EXHAUSTED"
            assert f"message larger than max ({len(large)} vs. {MIB})" in text


async def test_load_may_bring_files_above_other_limits():
    limits = MessageLimits(unary=1000, stream=4000)
    async with proxy_before(echo, limits=limits) as proxy, channel_to(proxy.address) as channel:
        for size, found in ((2000, "UNIMPLEMENTED"), (5000, "RESOURCE_EXHAUSTED")):
            call = channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad")(bytes(size))
            assert (await refusal(call))[0] == found  # the first came to the server
        code, _ = await refusal(channel.unary_unary(f"/{SERVICE}/ModelConfig")(bytes(2000)))
        assert code == "RESOURCE_EXHAUSTED"


# -- of all together


BEGUN = prefixed(big_request("m", MIB))


def begun(stream_id: int = 1, count: int = 1) -> bytes:
    """A large request, and so many of its DATA frames."""
    return begin(stream_id) + b"".join(data_frames(stream_id, BEGUN)[:count])


@pytest.fixture
async def taken(proxy: ProxySetup) -> AsyncIterator[HeldBody]:
    """All room is taken, by one who may go on alone while Triton takes nothing of its body."""
    with HeldBody(proxy.budget, 2**30, is_reading=lambda: False) as other:
        await other.take(proxy.budget.limit)
        yield other


@limited(max_inflight_bytes=MIB)
async def test_large_requests_wait_and_small_ones_go_on(proxy, channel, taken):
    infer = channel.unary_unary(INFER)
    large = asyncio.ensure_future(infer(BEGUN[5:]))
    await until(lambda: proxy.budget.waiting == 1)
    await infer(request_of())
    assert not large.done()
    taken.end()
    assert len(await large) == len(BEGUN) - 5
    assert (proxy.budget.held, proxy.budget.waiting) == (0, 0)


@limited(max_inflight_bytes=MIB)
@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("end", ["reset", "close", "unload"])
async def test_who_leaves_while_it_waits_keeps_nothing(proxy, wire, end):
    wire.send(begun())
    await until(lambda: proxy.budget.waiting)
    assert proxy.in_flight("m") == 1
    if end == "reset":
        wire.send(frames.reset(1, Code.CANCEL))
    elif end == "close":
        wire.writer.close()
    else:
        await proxy.fakes.unload("m")
        await wire.answer(1)
    await until(lambda: proxy.budget.held == MIB and not proxy.budget.waiting)


@limited(max_inflight_bytes=MIB)
@pytest.mark.usefixtures("taken")
async def test_deadline_holds_while_waiting_for_room(proxy, channel):
    call = channel.unary_unary(INFER)(BEGUN[5:], timeout=0.5)
    assert (await refusal(call))[0] == "DEADLINE_EXCEEDED"
    await until(lambda: not proxy.budget.waiting)


@limited(max_inflight_bytes=MIB)
@pytest.mark.usefixtures("taken")
async def test_request_without_room_is_refused_in_time(channel, monkeypatch):
    monkeypatch.setattr(byte_budget, "_WAIT_SECONDS", 0.2)
    code, text = await refusal(channel.unary_unary(INFER)(BEGUN[5:]))
    assert code == "RESOURCE_EXHAUSTED"
    assert "TooManyWaiting: there was no room for the body for 0.2 s" in text


@limited(max_inflight_bytes=MIB)
async def test_waiting_caller_may_send_one_window(proxy, wire, taken):
    wire.send(begun(1, STREAM_WINDOW // 2**14))
    await until(lambda: proxy.budget.held == MIB + STREAM_WINDOW)
    assert not [f for f in wire.got if f[0] == frames.WINDOW_UPDATE and f[2] == 1]
    taken.end()
    await wire.until(frames.WINDOW_UPDATE, 1)


@limited(max_inflight_bytes=MIB)
@pytest.mark.usefixtures("taken")
async def test_waiting_request_that_blocks_others_is_refused(proxy, wire):
    """The window of the connection is used up by two who wait."""
    wire.send(begun(1, 32), begun(3, 32))
    await until(lambda: proxy.budget.held == 2 * MIB)
    wire.send(begin(5))
    _, trailers = await wire.answer(3)
    assert status(trailers) == "RESOURCE_EXHAUSTED"
    assert b"too much is on its way to Triton" in trailers
    wire.send(complete(5))
    data, _ = await wire.answer(5)
    assert len(data) > 5
    assert proxy.budget.waiting == 1


@limited(max_inflight_bytes=MIB)
@pytest.mark.usefixtures("taken")
async def test_small_requests_leave_waiting_one_alone(proxy, wire):
    """They use up what the waiting request has left of the connection's window, and get it back."""
    wire.widen()
    wire.send(begun(1, 39))
    await until(lambda: proxy.budget.waiting)
    small = prefixed(big_request("m", 200_000))
    wire.send(begin(3), *data_frames(3, small))
    await wire.answer(3)
    window = CONNECTION_WINDOW - 39 * frames.FRAME_BYTES - len(small)
    large = prefixed(big_request("m", 250_000))
    wire.send(begin(5), *data_frames(5, large[:window], ends=False))
    await wire.until(frames.WINDOW_UPDATE, 0)
    wire.send(*data_frames(5, large[window:]))
    await wire.answer(5)
    assert proxy.budget.waiting == 1
