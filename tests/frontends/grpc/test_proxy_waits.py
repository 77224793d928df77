"""Callers who send or read in their own time: they hold up neither an unload nor a drain."""

import asyncio
import contextlib
import signal
from contextlib import asynccontextmanager, closing

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.core.model import ModelId
from adapter.relay import frames
from adapter.relay.flow_control import STREAM_WINDOW
from adapter.relay.frames import Code
from adapter.relay.policy import CallerLimits
from tests.fakes.http2_triton import answer, pour, scripted_triton, untouched
from tests.frontends.grpc.proxy_listener import (
    MIB,
    STREAM,
    begin,
    big_request,
    data_frames,
    echo,
    frame,
    prefixed,
    proxy_before,
    request,
    request_of,
    status,
    wire_to,
)
from tests.grpc_calls import write_decoupled_model
from tests.running import embedded_adapter

SECONDS = 10
LONG = CallerLimits()
SHORT = CallerLimits(slow=0.3, answer=0.3, drain=0.1)


@asynccontextmanager
async def opened(patience: CallerLimits = LONG, window: int = 0):
    """The listener, the Triton behind it, and a caller who gives no window for answers."""
    async with (
        proxy_before(echo) as proxy,
        scripted_triton(proxy) as upstream,
        wire_to(proxy.address) as wire,
        asyncio.timeout(SECONDS),
    ):
        proxy.context.caller_limits = patience
        wire.greet({frames.INITIAL_WINDOW_SIZE: window})
        yield proxy, upstream, wire


def begun(size: int) -> bytes:
    """A request, and so much of its message of 3 MiB."""
    message = prefixed(big_request("m", 3 * MIB))[:size]
    return begin(1) + b"".join(data_frames(1, message, ends=False))


async def refused(wire) -> tuple[str, bool]:
    _, trailers = await wire.answer(1)
    return status(trailers), b"NotStarted" in trailers


async def unloading(proxy) -> asyncio.Task[None]:
    task = asyncio.create_task(proxy.fakes.unload("m"))
    get = proxy.fakes.control.registry.get
    while (found := get(ModelId("m"))) and found.state.value == "READY":  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return task


async def test_unload_refuses_unfinished_requests():
    async with opened() as (proxy, upstream, wire):
        wire.send(begun(280_000))
        triton = await upstream.asked()
        assert proxy.in_flight("m") == 1
        await (await unloading(proxy))
        assert await refused(wire) == ("UNAVAILABLE", True)
        await triton.until(frames.RST_STREAM, 1)
        assert not any(found[1] for found in triton.got if found[0] == frames.DATA)


async def test_unload_waits_for_whole_requests():
    async with opened(window=1000) as (proxy, upstream, wire):
        wire.send(request(1))
        triton = await upstream.asked()
        task = await unloading(proxy)
        triton.send(answer(1))
        _, trailers = await wire.answer(1)
        assert status(trailers) == "OK"
        await task


@pytest.mark.parametrize("size", [0, 1000, 280_000])
@pytest.mark.slow
async def test_drain_refuses_unfinished_requests(size):
    async with opened() as (proxy, _, wire):
        wire.send(begun(size))
        await wire.round_trip()
        proxy.server.start_drain_deadline()
        closing = asyncio.create_task(proxy.server.close(60))
        assert await refused(wire) == ("UNAVAILABLE", True)
        await closing
        assert proxy.in_flight("m") == 0


@pytest.mark.parametrize("size", [0, 1000, 280_000])
async def test_a_request_that_comes_slowly_is_refused(size):
    async with opened(SHORT) as (proxy, _, wire):
        wire.send(begun(size))
        if size > 2**18:
            proxy.context.caller_limits = CallerLimits(slow=0.3, rate=2**24)
        _, trailers = await wire.answer(1)
        assert (status(trailers), b"SlowBody" in trailers) == ("INVALID_ARGUMENT", True)
        await proxy.until_free("m")


async def test_unread_body_does_not_count_as_slow(monkeypatch):
    """A flood on other connections leaves the adapter itself no time for this one."""
    waiting = []
    async with opened(SHORT) as (proxy, _, wire):
        turns = proxy.context.turns
        wire.send(begun(1000))
        await wire.round_trip()
        monkeypatch.setattr(turns, "has_time", lambda: False)
        monkeypatch.setattr(turns, "wait", waiting.append)
        wire.send(frame(frames.DATA, 0, 1, bytes(2**14)))
        last = proxy.server._ticks + 8
        while proxy.server._ticks < last:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        [read_on] = waiting
        read_on()
        wire.send(frames.ping(b"was read"))
        assert await wire.next() == (frames.PING, frames.ACK, 0, b"was read")


@pytest.mark.slow
async def test_closed_window_does_not_make_caller_slow():
    async with opened(CallerLimits(slow=0.3, rate=2**24)) as (proxy, upstream, wire):
        wire.send(begun(STREAM_WINDOW))
        triton = await upstream.accepted({frames.INITIAL_WINDOW_SIZE: 0})
        await triton.until(frames.HEADERS, 1)
        await asyncio.sleep(0.8)
        assert proxy.in_flight("m") == 1


@asynccontextmanager
async def unread(patience: CallerLimits):
    """An answer of 2 MiB that its caller takes nothing of."""
    async with opened(patience) as (proxy, upstream, wire):
        wire.send(request(1))
        triton = await upstream.asked()
        whole = prefixed(bytes(2 * MIB))
        pouring = asyncio.create_task(pour(triton, 1, whole))
        await wire.until(frames.HEADERS, 1)
        try:
            yield proxy, wire, triton
            await pouring
            await untouched(triton)
        finally:
            pouring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pouring


async def test_unload_reads_answer_that_comes_later():
    async with opened(CallerLimits(drain=0.1)) as (proxy, upstream, wire):
        wire.send(request(1))
        triton = await upstream.asked()
        task = await unloading(proxy)
        whole = prefixed(bytes(2 * MIB))
        await pour(triton, 1, whole)
        await task
        await wire.until(frames.RST_STREAM, 1)
        await untouched(triton)


@pytest.mark.parametrize("is_draining", [True, False], ids=["in a drain", "in time"])
async def test_an_answer_that_nobody_takes_is_given_up(is_draining):
    limits = CallerLimits(drain=0.1) if is_draining else SHORT
    async with unread(limits) as (proxy, wire, _):
        if is_draining:
            proxy.server.start_drain_deadline()
        await wire.until(frames.RST_STREAM, 1)
        await proxy.until_free("m")


@pytest.mark.slow
async def test_slow_reader_gets_all_while_nothing_unloads():
    async with unread(CallerLimits(answer=1)) as (_, wire, _):
        for _ in range(8):
            await asyncio.sleep(0.2)
            wire.send(frames.window_update(1, 1))
        wire.send(frames.window_update(1, 4 * MIB), frames.window_update(0, 4 * MIB))
        data, trailers = await wire.answer(1)
        assert len(data) + 8 >= 2 * MIB
        assert status(trailers) == "OK"


async def test_unload_does_not_wait_for_slow_reader():
    async with unread(CallerLimits(drain=0.3)) as (proxy, wire, _):
        task = await unloading(proxy)
        while not task.done():
            wire.send(frames.window_update(1, 1))
            await asyncio.sleep(0.05)
        await wire.until(frames.RST_STREAM, 1)


async def test_drain_gives_up_old_unread_stream():
    """It has been open for longer than the time limit of a call, which a stream does not have."""

    async def act(requests, _):
        await anext(aiter(requests))
        answer = pb.ModelInferResponse(model_name="m", raw_output_contents=[bytes(MIB)])
        yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()

    async with (
        proxy_before(act, timeout_seconds=0.01) as proxy,
        wire_to(proxy.address) as wire,
    ):
        proxy.context.caller_limits = SHORT
        wire.greet({frames.INITIAL_WINDOW_SIZE: 1000})
        wire.send(begin(1, STREAM), frame(frames.DATA, 0, 1, prefixed(request_of("m"))))
        await wire.until(frames.DATA, 1)
        last = proxy.server._ticks + 2
        while proxy.server._ticks < last:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        proxy.server.start_drain_deadline()
        assert await wire.reset_of(1) == Code.CANCEL


@pytest.mark.triton
def test_end_does_not_wait_for_unread_stream(tmp_path):
    """It would for `drain_timeout_seconds`, and `stop` does not wait that long."""
    zeros = "for _ in range(200): send(values.repeat(2**17))"
    write_decoupled_model(tmp_path / "many", answer=zeros)

    async def ask(adapter) -> None:
        async with wire_to(adapter.grpc) as wire, asyncio.timeout(6 * SECONDS):
            wire.greet({frames.INITIAL_WINDOW_SIZE: 70_000})
            wire.send(begin(1, STREAM))
            wire.send(frame(frames.DATA, 0, 1, prefixed(request_of("many", 1.0))))
            await wire.until(frames.DATA, 1)
            adapter.process.send_signal(signal.SIGTERM)
            await wire.reader.read()  # until the adapter ends the connection

    flags = (f"--model-roots={tmp_path}", "--drain-timeout-seconds=200")
    with embedded_adapter(*flags) as adapter:
        with closing(adapter.client()) as client:
            assert client.load("many", tmp_path / "many").status == 200
        asyncio.run(ask(adapter))
