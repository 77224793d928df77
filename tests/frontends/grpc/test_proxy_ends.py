"""How requests and connections of the gRPC proxy end: time limits, GOAWAY, floods, its close."""

import asyncio

import pytest

from adapter.relay import frames
from adapter.relay.frames import Code
from tests.fakes.http2_triton import GOOD, HEAD, answer, pour, untouched
from tests.frontends.grpc.proxy_listener import (
    INFER,
    begin,
    complete,
    data_frames,
    frame,
    head_of,
    limited,
    prefixed,
    refusal,
    request,
    request_of,
    status,
    until,
    wire_to,
)


def goaway(last: int, code: int = 0) -> bytes:
    return frames.goaway(last, code, "as told")


@pytest.mark.parametrize("limit", [b"300m", b"200000u", b"1S"])
@pytest.mark.slow
async def test_deadline_holds_while_the_caller_waits(proxy, upstream, wire, limit):
    block = head_of(INFER, (b"grpc-timeout", limit))
    wire.send(frames.header_block(1, block, end=False))
    wire.send(complete(1))
    triton = await upstream.accepted()
    _, trailers = await wire.answer(1)
    assert status(trailers) == "DEADLINE_EXCEEDED"
    assert b"BackendTimeout: the caller's deadline has passed" in trailers
    assert (proxy.in_flight("m"), proxy.abandoned("m")) == (1, 1)
    triton.send(answer(1))
    await proxy.until_free("m")
    await untouched(triton)


@limited(timeout_seconds=0.5)
async def test_stalled_answer_is_given_up_in_time(proxy, upstream, wire):
    wire.send(request(1))
    triton = await upstream.accepted()
    triton.send(frames.header_block(1, HEAD, end=False))
    triton.send(frame(frames.DATA, 0, 1, b"\0\0\0\0\x09begun"))
    _, trailers = await wire.answer(1)
    assert status(trailers) == "DEADLINE_EXCEEDED"
    assert b"BackendTimeout: no answer from Triton within 0.5 s" in trailers
    assert (proxy.in_flight("m"), proxy.abandoned("m")) == (1, 1)
    triton.send(frame(frames.DATA, 0, 1, b"late"), frames.header_block(1, GOOD, end=True))
    await proxy.until_free("m")
    await untouched(triton)


@pytest.mark.slow
async def test_tritons_goaway_lets_calls_end_then_reconnects(proxy, upstream, wire):
    wire.send(request(1), request(3), request(5))
    triton = await upstream.accepted()
    await triton.until(frames.DATA, 5)
    triton.send(goaway(2**31 - 1))  # as grpc announces that it will go
    triton.send(goaway(3))
    _, trailers = await wire.answer(5)
    assert status(trailers) == "UNAVAILABLE"
    wire.send(request(7))
    second = await upstream.asked()
    second.send(answer(1, b"seven"))
    assert (await wire.answer(7))[0][5:] == b"seven"
    triton.send(answer(1, b"one"), answer(3, b"three"))
    assert (await wire.answer(1))[0][5:] == b"one"
    assert (await wire.answer(3))[0][5:] == b"three"
    assert await triton.ended_with() == Code.NO_ERROR
    assert frames.GOAWAY not in {got[0] for got in wire.got}
    assert proxy.in_flight("m") == 0


@pytest.mark.slow
async def test_triton_dying_amid_an_answer_is_unavailable(proxy, upstream, wire):
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 2**20}))
    wire.send(frames.window_update(0, 2**20), begin(1))
    wire.send(request(3))
    triton = await upstream.asked()
    triton.send(frames.header_block(1, HEAD, end=False))
    half = b"\0" + (99_995).to_bytes(4, "big") + bytes(49_995)
    triton.send(*data_frames(1, half, 10_000, ends=False))
    await wire.until(frames.HEADERS, 3)
    triton.writer.close()
    _, trailers = await wire.answer(3)
    assert status(trailers) == "UNAVAILABLE"
    wire.send(complete(1))
    second = await upstream.asked()
    second.send(answer(1, b"again"))
    assert (await wire.answer(1))[0][5:] == b"again"
    assert proxy.in_flight("m") == 0


async def test_a_refused_stream_is_unavailable(proxy, upstream, channel):
    asking = asyncio.ensure_future(refusal(channel.unary_unary(INFER)(request_of())))
    triton = await upstream.accepted()
    triton.send(frames.reset(1, Code.REFUSED_STREAM))
    assert (await asking)[0] == "UNAVAILABLE"


async def test_more_streams_than_were_agreed_are_refused(proxy, wire):
    for stream_id in range(1, 2_003, 2):
        wire.send(begin(stream_id))
    _, stream_id, code = await wire.until(frames.RST_STREAM)
    assert (stream_id, int.from_bytes(code)) == (2_001, Code.REFUSED_STREAM)
    assert proxy.shed == ["streams"]


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX",
    ],
    ids=["TLS", "HTTP/1.1", "nearly"],
)
async def test_other_protocols_are_closed_at_once(proxy, sent):
    async with wire_to(proxy.address) as wire:
        wire.send(sent)
        assert await wire.ended_with() == Code.PROTOCOL_ERROR
        ours = [frames.SETTINGS, frames.WINDOW_UPDATE, frames.GOAWAY]
        assert [found[0] for found in wire.got] == ours


@pytest.mark.slow
async def test_slow_reader_gets_all_from_a_closing_proxy(proxy, upstream, wire):
    wire.widen()
    wire.send(request(1))
    triton = await upstream.asked()
    wire.reader._transport.pause_reading()
    pouring = asyncio.create_task(pour(triton, 1, prefixed(bytes(2**23))))
    await until(lambda: proxy.session.is_paused)
    closing = asyncio.create_task(proxy.server.close(10))
    await asyncio.sleep(0)
    wire.reader._transport.resume_reading()
    await wire.data(1, 2**23 + 5)
    assert await wire.ended_with() == Code.NO_ERROR
    await pouring
    await closing


async def test_closing_listener_waits_beside_lost_model(proxy, upstream):
    """Two models work for a client who has left; the lost one keeps nobody waiting."""
    await proxy.fakes.load("lost")
    async with wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(request(1), request(3, "lost"))
        triton = await upstream.accepted()
        await triton.until(frames.DATA, 3)
    await proxy.until_abandoned("lost")
    (session,) = proxy.server._sessions
    closing = asyncio.create_task(proxy.server.close(30))
    proxy.fakes.parts.leases.lose(proxy.fakes.control.registry.serving("lost"))
    assert not session.is_done
    triton.send(answer(1))
    await closing
    assert proxy.in_flight("m") == 0
    assert session.is_done


RESERVED = 1 << 31


@pytest.mark.parametrize("name", ["m", "team/a"])
@pytest.mark.parametrize("masked", [(0, RESERVED), (RESERVED, 0), (RESERVED, RESERVED)])
async def test_reserved_bit_of_stream_ids_is_ignored(proxy, wire, masked, name):
    """RFC 9113 section 4.1."""
    of_head, of_data = masked
    wire.send(
        frame(frames.HEADERS, frames.END_HEADERS, 1 | of_head, head_of()),
        complete(1 | of_data, name),
    )
    assert status((await wire.answer(1))[1]) == "OK"


@limited(timeout_seconds=1)
async def test_failing_look_spares_other_connections_time_limits(proxy, caplog):
    async with wire_to(proxy.address) as first, wire_to(proxy.address) as second:
        for wire in (first, second):
            wire.greet()
            wire.send(begin(1))
            wire.send(frame(frames.PING, 0, 0, bytes(8)))
            await wire.until(frames.PING)
        odd, _ = (session for session in proxy.server._sessions if session.streams)
        odd.streams[1].deadline = None  # which no clock compares with
        told = asyncio.create_task(first.answer(1)), asyncio.create_task(second.answer(1))
        async with asyncio.timeout(10):
            await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)
        (done,) = [task for task in told if task.done()]
        assert status(done.result()[1]) == "DEADLINE_EXCEEDED"
        assert "request.failed" in {record.message for record in caplog.records}
        odd.streams[1].deadline = 0.0
        await asyncio.gather(*told)
