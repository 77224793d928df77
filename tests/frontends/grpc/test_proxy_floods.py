"""Floods of frames that move nothing cost about what as many bytes of the plainest ones cost."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from struct import pack

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.relay import frames
from adapter.relay.frames import Code
from adapter.relay.headers import encoded
from adapter.runtime import turns
from tests.cases import case
from tests.fakes.http2_triton import answer, scripted_triton
from tests.frontends.grpc.proxy_listener import (
    INFER,
    MIB,
    SECONDS,
    STREAM,
    begin,
    big_request,
    complete,
    echo,
    frame,
    head_of,
    prefixed,
    proxy_before,
    request,
    request_of,
    wire_to,
)

STREAMS, FLOOD_BYTES = 900, 12_000
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
async def blocked_answers(monkeypatch):
    """A caller who has no window for any of its answers, all of which are here. What it sends is
    handled in one turn of the event loop.
    """
    monkeypatch.setattr(turns, "_SECONDS", SECONDS)
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxy_before(echo))
        upstream = await stack.enter_async_context(scripted_triton(proxy))
        wire = await stack.enter_async_context(wire_to(proxy.address))
        wire.greet({frames.INITIAL_WINDOW_SIZE: 0})
        ids = range(1, 2 * STREAMS, 2)
        wire.send(*map(request, ids))
        triton = await upstream.accepted()
        for stream_id in ids:
            await triton.until(frames.DATA, stream_id)
        triton.send(*(answer(stream_id, b"x" * 10) for stream_id in ids))
        await wire.until(frames.HEADERS, ids[-1])
        session = proxy.session
        yield wire, session


async def cost_of(wire, caller, flood: bytes) -> float:
    """CPU seconds that the adapter alone takes to read that, or until it closes."""
    caller.glitches, caller.small_frames, spent, own = 0, 0, [], caller

    class Timed(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            begun = time.thread_time()
            own.data_received(data)
            spent.append(time.thread_time() - begun)

    timed = Timed()
    timed.pause_writing, timed.resume_writing = own.pause_writing, own.resume_writing
    timed.connection_lost = own.connection_lost
    own._transport.set_protocol(timed)
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
@pytest.mark.slow
async def test_flood_costs_no_more_than_plain_frames(one, monkeypatch):
    async with blocked_answers(monkeypatch) as (wire, caller):
        plain = await cost_of(wire, caller, PRIORITIES)
        flood = await cost_of(wire, caller, one * (FLOOD_BYTES // len(one) + 1))
        assert flood < 50 * plain  # it was hundreds


async def test_too_many_settings_end_the_connection(proxy, wire):
    wire.send(settings(*[1] * 64), frames.ping(b"all here"))
    await wire.until(frames.PING)
    wire.send(settings(*[1] * 65))
    assert await wire.ended_with() == Code.ENHANCE_YOUR_CALM
    assert proxy.shed == ["flood"]


MANY = 21_000  # more frames than a second's budget of those that move nothing
CLOSED = begin(3) + frames.reset(3, Code.CANCEL)
NO_FIELDS = frame(frames.CONTINUATION, 0, 1)
LONG_FIELDS = frame(frames.CONTINUATION, 0, 1, bytes(2**14))
# Bytes that are sent on one connection.
FLOODS = {
    "PING": frames.ping(bytes(8)) * MANY,
    "CONTINUATION without END_HEADERS": frame(frames.HEADERS, 0, 1) + NO_FIELDS * 1100,
    "CONTINUATION of many bytes": frame(frames.HEADERS, 0, 1) + LONG_FIELDS * 20,
    "CONTINUATION of many requests": b"".join(continuations(300, i) for i in range(1, 201, 2)),
    "windows of many streams": b"".join(begin(i) for i in range(1, 2 * STREAMS, 2))
    + (settings(1) + settings(2)) * 1000,
    "rapid reset": b"".join(begin(i) + frames.reset(i, Code.CANCEL) for i in range(1, 4201, 2)),
    "malformed heads": b"".join(begin(i, INFER, (b"te", b"x")) for i in range(1, 4201, 2)),
    "DATA behind each reset": b"".join(
        begin(i) + frames.reset(i, Code.CANCEL) + complete(i) for i in range(1, 2 * MANY, 2)
    ),
    "late DATA": CLOSED + frame(frames.DATA, 0, 3, bytes(50)) * MANY,
    "late DATA of no bytes": CLOSED + frame(frames.DATA, 0, 3) * MANY,
    "late trailers": CLOSED
    + frames.header_block(3, b"\x20" + encoded([(b"x-late", b"1")]), end=True) * MANY,
    "late RST_STREAM": CLOSED + frames.reset(3, Code.CANCEL) * MANY,
    "late WINDOW_UPDATE": CLOSED + frames.window_update(3, 100) * MANY,
    "late PRIORITY": CLOSED + frame(frames.PRIORITY, 0, 3, bytes(5)) * MANY,
}


@pytest.mark.usefixtures("one_second")
async def test_frames_that_move_nothing_end_their_connection(proxy, channel):
    for name, flood in FLOODS.items():
        with case(name):
            async with wire_to(proxy.address) as wire:
                wire.greet()
                wire.send(flood)
                assert await wire.ended_with() == Code.ENHANCE_YOUR_CALM
            await channel.unary_unary(INFER)(request_of())
    await proxy.until_free("m")


async def test_last_window_setting_of_a_frame_holds(proxy, wire):
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}))
    wire.send(request(1), settings(2**31 - 1, 7, 0, 3))
    assert len((await wire.until(frames.DATA, 1))[2]) == 3
    wire.send(settings(0), settings(5), frames.window_update(1, 100_000))
    await wire.answer(1)


@pytest.mark.parametrize("windows", [(2**31, 1), (1, 2**31)])
async def test_each_window_setting_is_checked(proxy, wire, windows):
    wire.send(settings(*windows))
    assert await wire.ended_with() == Code.FLOW_CONTROL_ERROR


def literal(name: bytes, value: bytes = b"") -> bytes:
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def heads(i: int) -> bytes:
    """900 fields that nobody has sent yet."""
    fields = b"".join(literal(b"%x" % (900 * i + j)) for j in range(900))
    return frames.header_block(2 * i + 1, head_of() + fields, end=True)


def known_heads(i: int) -> bytes:
    """120 fields of which all but one were sent before."""
    fields = literal(b"x-id", b"%d" % i) + literal(b"x", b"y") * 120
    return frames.header_block(2 * i + 1, head_of() + fields, end=False) + frames.reset(
        2 * i + 1, 8
    )


SMALL_FRAMES = {
    "DATA": frame(frames.DATA, 0, 1, b"\0"),
    "empty DATA": frame(frames.DATA, 0, 1),
    "DATA of a stream that is reset": frame(frames.DATA, 0, 3, b"\0"),
    "WINDOW_UPDATE": frames.window_update(0, 1),
    "PING": frames.ping(bytes(8)),
    "SETTINGS": settings(),
    "PRIORITY": PRIORITY,
    "unknown": frame(0x77, 0, 1),
}


@pytest.mark.parametrize("one", SMALL_FRAMES.values(), ids=SMALL_FRAMES)
async def test_small_frames_end_their_connection_however_slow(proxy, wire, one):
    wire.send(begin(1, STREAM))
    wire.send(frame(frames.DATA, 0, 1, prefixed(bytes(500_000))[:5]))
    twice = begin(3, STREAM)
    wire.send(twice, twice)
    await wire.until(frames.RST_STREAM, 3)
    session = proxy.session
    for _ in range(20):
        session.check_connection()  # as each second
        wire.send(one * 100, frames.ping(b"all here"))
        while (found := await wire.next()) is not None and found[3] != b"all here":
            pass
        if found is None:
            break
    kind, _, _, payload = wire.got[-1]
    assert (kind, payload[7]) == (frames.GOAWAY, Code.ENHANCE_YOUR_CALM)
    assert proxy.shed == ["flood"]


async def answer_each(requests, _):
    async for message in requests:
        yield pb.ModelStreamInferResponse(error_message=str(len(message))).SerializeToString()


@pytest.mark.slow
async def test_acknowledgements_are_no_small_frames(proxy, wire):
    """Each piece of an answer is acknowledged as the busiest of clients do: with its windows and a
    PING.
    """
    proxy.answer_with(answer_each)
    wire.send(begin(1, STREAM))
    for _ in range(1000):
        wire.send(frame(frames.DATA, 0, 1, prefixed(request_of())))
        size = len((await wire.until(frames.DATA, 1))[2])
        windows = (frames.window_update(one, size) for one in (0, 1))
        wire.send(*windows, frames.ping(bytes(8)))


@pytest.mark.usefixtures("one_second")
async def test_a_stream_of_small_messages_is_no_flood(proxy, channel):
    proxy.answer_with(answer_each)
    messages = [request_of("m", float(number)) for number in range(500)]
    answers = [answer async for answer in channel.stream_stream(STREAM)(iter(messages))]
    assert len(answers) == len(messages)
    # each costs 4 as it comes, most of which its answer gives back
    assert proxy.session.glitches < 2 * len(messages)


async def test_an_idle_client_may_ping_for_ever(proxy, wire):
    for _ in range(2000):
        wire.send(frames.ping(bytes(8)))
        await wire.until(frames.PING)
        session = proxy.session
        session.check_connection()


def tiny_data(i: int) -> bytes:
    start = begin(1, STREAM) if not i else b""
    return start + frame(frames.DATA, 0, 1, b"\0") * 50


@pytest.mark.parametrize("flood", [heads, known_heads, tiny_data])
@pytest.mark.usefixtures("one_second")
@pytest.mark.slow
async def test_flood_ends_its_connection_alone(proxy, wire, channel, flood):
    for i in range(500):
        wire.send(flood(i))
        if i % 10 == 9:
            answer = await channel.unary_unary(INFER)(request_of("m", float(i)))
            assert answer == await echo(request_of("m", float(i)), None)
        if wire.writer.is_closing():
            break
    assert await wire.ended_with() == Code.ENHANCE_YOUR_CALM
    assert i > 20


@pytest.mark.usefixtures("one_second")
@pytest.mark.slow
async def test_thousand_calls_with_own_ids_are_no_flood(proxy, wire):
    ids = range(1, 2001, 2)
    more = [(f"x-usual-{i}".encode(), b"z" * 20) for i in range(6)]
    for i in ids:
        own = [(b"traceparent", b"00-%055d" % i), (b"grpc-timeout", b"%dm" % (30_000 + i))]
        wire.send(begin(i, INFER, *more, *own))
    wire.send(*(frame(frames.DATA, 0, i, prefixed(request_of())[:9]) for i in ids))
    wire.send(*(frame(frames.DATA, 1, i, prefixed(request_of())[9:]) for i in ids))
    open_ids = set(ids)
    while open_ids:
        kind, flags, stream_id, _ = await wire.next()
        assert kind != frames.GOAWAY
        if kind == frames.HEADERS and flags & frames.END_STREAM:
            open_ids.discard(stream_id)


@pytest.mark.usefixtures("one_second")
@pytest.mark.slow
async def test_consecutive_small_calls_are_no_flood(proxy, wire):
    for i in range(1, 1001, 2):
        own = [(b"x-id-%d" % j, b"%036d" % i) for j in range(10)]
        wire.send(begin(i, INFER, *own))
        wire.send(complete(i))
        await wire.answer(i)
        wire.send(frames.window_update(0, 100), frames.ping(bytes(8)))


@pytest.mark.usefixtures("one_second")
@pytest.mark.slow
async def test_message_in_16_kib_frames_is_no_flood(proxy, channel):
    message = big_request("m", 16 * MIB)
    assert await channel.unary_unary(INFER)(message)
