"""Floods of frames that move nothing cost about what as many bytes of the plainest ones cost."""

import time
from contextlib import AsyncExitStack, asynccontextmanager
from struct import pack

import pytest

from adapter.protocols.http2 import frames
from adapter.protocols.http2.frames import Code
from tests.fakes.http2_triton import answer, scripted_triton
from tests.frontends.grpc.proxy_listener import frame, head_of, proxy_before, wire_to
from tests.frontends.grpc.test_proxy import echo
from tests.frontends.grpc.test_proxy_flow_control import request

STREAMS, FLOOD_BYTES = 900, 120_000
PRIORITY = frame(frames.PRIORITY, 0, 1, bytes(5))
PRIORITIES = PRIORITY * (FLOOD_BYTES // len(PRIORITY))


def settings(*windows: int) -> bytes:
    payload = b"".join(pack(">HL", frames.INITIAL_WINDOW_SIZE, window) for window in windows)
    return frame(frames.SETTINGS, 0, 0, payload)


def continuations(number: int, stream_id: int) -> bytes:
    more = frame(frames.CONTINUATION, 0, stream_id) * (number - 1)
    end = frame(frames.CONTINUATION, frames.END_HEADERS, stream_id)
    return frame(frames.HEADERS, frames.END_STREAM, stream_id, head_of()) + more + end


@asynccontextmanager
async def blocked_answers():
    """A caller who has no window for any of its answers, all of which are here."""
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxy_before(echo))
        behind = await stack.enter_async_context(scripted_triton(proxy))
        wire = await stack.enter_async_context(wire_to(proxy.address))
        wire.greet({frames.INITIAL_WINDOW_SIZE: 0})
        ids = range(1, 2 * STREAMS, 2)
        wire.send(*map(request, ids))
        triton = await behind.accepted()
        for stream_id in ids:
            await triton.until(frames.DATA, stream_id)
        triton.send(*(answer(stream_id, b"x" * 10) for stream_id in ids))
        await wire.until(frames.HEADERS, ids[-1])
        (session,) = proxy.server._sessions
        yield wire, session.downstream


async def cost_of(wire, caller, flood: bytes) -> float:
    """CPU seconds that the adapter alone takes to read that, or until it closes."""
    caller.glitches, spent, transport = 0, [], caller.transport
    receive = type(transport).data_received

    def timed(data: bytes) -> None:
        begun = time.thread_time()
        receive(transport, data)
        spent.append(time.thread_time() - begun)

    transport.data_received = timed
    # asyncio's transport keeps the method that it has found
    transport._transport.set_protocol(transport)
    wire.send(flood, frames.ping(b"the end!"))
    while (found := await wire.next()) is not None and found[0] != frames.GOAWAY:
        if found[0] == frames.PING and found[3] == b"the end!":
            break
    return sum(spent)


@pytest.mark.parametrize(
    "one",
    [
        settings(*[0, 0] * 32),
        settings(*[2**31 - 1, 0] * 32),
        settings(*[1, 0] * 1000),
        settings(),
        frames.window_update(0, 1),
    ],
    ids=["settings", "wide settings", "long settings", "empty settings", "window updates"],
)
async def test_a_flood_costs_about_what_as_many_bytes_of_the_plainest_frames_cost(one):
    async with blocked_answers() as (wire, caller):
        plain = await cost_of(wire, caller, PRIORITIES)
        flood = await cost_of(wire, caller, one * (FLOOD_BYTES // len(one) + 1))
        assert flood < 50 * plain  # it was hundreds


async def test_a_frame_of_too_many_settings_ends_the_connection():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(settings(*[1] * 64), frames.ping(b"all here"))
        await wire.until(frames.PING)
        wire.send(settings(*[1] * 65))
        assert await wire.ended_with() == Code.ENHANCE_YOUR_CALM


@pytest.mark.usefixtures("one_second")
async def test_continuations_count_as_frames_that_move_nothing():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        for stream_id in range(1, 201, 2):
            wire.send(continuations(300, stream_id))
        assert await wire.ended_with() == Code.ENHANCE_YOUR_CALM


@pytest.mark.usefixtures("one_second")
async def test_settings_that_change_the_windows_of_many_streams_count_for_each():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        for stream_id in range(1, 2 * STREAMS, 2):
            wire.send(frames.header_block(stream_id, head_of(), end=False))
        wire.send(*[settings(1), settings(2)] * 1000)
        assert await wire.ended_with() == Code.ENHANCE_YOUR_CALM


async def test_the_last_window_of_a_frame_of_settings_holds():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet({frames.INITIAL_WINDOW_SIZE: 0})
        wire.send(request(1), settings(2**31 - 1, 7, 0, 3))
        assert len((await wire.until(frames.DATA, 1))[2]) == 3
        wire.send(settings(0), settings(5), frames.window_update(1, 100_000))
        await wire.answer(1)


@pytest.mark.parametrize("windows", [(2**31, 1), (1, 2**31)])
async def test_each_window_of_a_frame_of_settings_is_judged(windows):
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(settings(*windows))
        assert await wire.ended_with() == Code.FLOW_CONTROL_ERROR
