"""Windows, settings and buffers of the gRPC proxy: each connection has its own, nothing grows, and
no request waits for another's.
"""

import asyncio

import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.relay import frames
from adapter.relay.flow_control import CONNECTION_WINDOW, STREAM_WINDOW
from adapter.relay.frames import Code
from tests.fakes.http2_triton import answer, pour, untouched
from tests.frontends.grpc.proxy_listener import (
    MIB,
    Wire,
    begin,
    big_request,
    complete,
    data_frames,
    echo,
    frame,
    limited,
    prefixed,
    request,
    request_of,
    until,
)


def held(proxy) -> int:
    """All that the listener has in its memory of what passes."""
    total = 0
    for session in proxy.server._sessions:
        total += sum(len(stream.buffered) for stream in session.streams.values())
        for wire in (session, *session.upstreams):
            total += sum(stream.queued for stream in wire.streams.values())
            total += sum(map(len, wire.out)) + len(wire._rest)
            if wire._transport is not None:
                total += wire._transport.get_write_buffer_size()
    return total


async def test_windows_and_settings_end_where_they_are_said(proxy, upstream, wire):
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 70_000, frames.MAX_FRAME_SIZE: 20_000}))
    wire.send(frames.window_update(0, 1000), request(1), frames.window_update(1, 3))
    triton = await upstream.accepted({frames.INITIAL_WINDOW_SIZE: 80_000})
    await triton.until(frames.DATA, 1)
    triton.send(frames.window_update(0, 50_000), frames.window_update(1, 77))
    triton.send(answer(1))
    await wire.answer(1)
    for peer in (triton, wire):
        peer.send(frames.ping(b"all here"))
        while peer.got[-1][3] != b"all here":
            await peer.next()
        told = [dict(frames.read_settings(f[3])) for f in peer.got if f[0] == frames.SETTINGS]
        assert [one[frames.INITIAL_WINDOW_SIZE] for one in told if one] == [STREAM_WINDOW]
        assert [one[frames.HEADER_TABLE_SIZE] for one in told if one] == [0]
        updates = [(f[2], f[3]) for f in peer.got if f[0] == frames.WINDOW_UPDATE]
        greeting = CONNECTION_WINDOW - frames.DEFAULT_WINDOW
        assert updates == [(0, greeting.to_bytes(4, "big"))]


async def test_windows_are_returned_in_large_parts(proxy, upstream, wire):
    """Each frame that says so costs its peer as much as one that moves something."""
    message = prefixed(big_request("m", 2 * MIB))
    wire.widen()
    asking = asyncio.create_task(wire.pour(1, message, 2**16))
    triton = await upstream.accepted()
    triton.widen()
    await triton.data(1, len(message))
    await asking
    await pour(triton, 1, message)
    await wire.answer(1)
    for peer in (wire, triton):
        updates = [f[2] for f in peer.got if f[0] == frames.WINDOW_UPDATE]
        assert 2 <= updates.count(1) <= 2 * len(message) // STREAM_WINDOW
        # the first one is its greeting
        assert 2 <= updates.count(0) <= 1 + updates.count(1) + 2 * 2


async def test_600_kib_tensor_may_come_without_a_pause(proxy, upstream, wire):
    message = prefixed(big_request("m", 600 * 2**10))
    wire.send(begin(1), *data_frames(1, message))
    triton = await upstream.accepted()  # which takes nothing yet, so that nothing is given back
    triton.send(frames.window_update(0, MIB), frames.window_update(1, MIB), answer(1))
    await wire.answer(1)


@pytest.mark.parametrize("size", [2**14, 2**14 + 1, 2**15, 40_000, 2**16])
async def test_large_frames_are_cut_for_the_caller(proxy, upstream, wire, size):
    wire.widen()
    wire.send(request(1))
    triton = await upstream.asked()
    said = bytes(at % 251 for at in range(size - 5))
    triton.send(answer(1, said))
    assert (await wire.answer(1))[0][5:] == said
    sizes = [len(payload) for kind, _, _, payload in wire.got if kind == frames.DATA]
    assert max(sizes) == frames.FRAME_BYTES


async def answer_sized(message, _):
    """Answer with an id as long as the id of the request says."""
    size = int(pb.ModelInferRequest.FromString(message).id)
    return pb.ModelInferResponse(id="x" * size).SerializeToString()


def sized(stream_id: int, name: str, size: int) -> bytes:
    message = prefixed(request_of(name, id=str(size)))
    return begin(stream_id) + frame(frames.DATA, frames.END_STREAM, stream_id, message)


async def test_concurrent_answers_never_overrun_the_window(proxy, wire):
    proxy.answer_with(answer_sized)
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}))
    sizes = {1: 1, 3: 50_000, 5: 60_000, 7: 40_000, 9: 50_000}
    for stream_id, size in sizes.items():
        wire.send(sized(stream_id, "team/a" if stream_id in {3, 7} else "m", size))
    window, ended = frames.DEFAULT_WINDOW, set()
    while ended != sizes.keys():
        kind, flags, stream_id, payload = await wire.next()
        if kind == frames.DATA:
            window -= len(payload)
            assert window >= 0
            if window < 5:
                wire.send(frames.window_update(0, 10_000))
                window += 10_000
        elif kind == frames.HEADERS and flags & frames.END_STREAM:
            ended.add(stream_id)
    for stream_id, size in sizes.items():
        data = b"".join(f[3] for f in wire.got if (f[0], f[2]) == (frames.DATA, stream_id))
        assert len(pb.ModelInferResponse.FromString(data[5:]).id) == size


@pytest.mark.slow
async def test_closing_listener_waits_for_closed_windows(proxy, upstream, wire):
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 10_000}))
    wire.send(request(1))
    triton = await upstream.asked()
    triton.send(answer(1, bytes(16_000)))
    got = len((await wire.until(frames.DATA, 1))[2])
    assert got == 10_000
    await proxy.until_free("m")  # Triton has done with it
    closing = asyncio.create_task(proxy.server.close(10))
    await wire.until(frames.GOAWAY)
    assert not closing.done()
    wire.send(frames.window_update(1, 20_000))
    rest, _ = await wire.answer(1)
    assert got + len(rest) == 16_005
    await closing


@pytest.mark.parametrize("name", ["m", "team/a"])
async def test_unread_answer_holds_up_no_other(proxy, wire, name):
    """Of many answers a caller takes none but the last; nor does Triton wait for it."""
    proxy.answer_with(answer_sized)
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
    wire.send(frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW))
    for stream_id in range(1, 13, 2):
        wire.send(sized(stream_id, name, 2 * MIB))
    for _ in range(6):
        await wire.until(frames.HEADERS)
    for stream_id, other in ((101, "m"), (103, "team/a")):
        wire.send(sized(stream_id, other, 70_000), frames.window_update(stream_id, MIB))
        data, _ = await wire.answer(stream_id)
        assert len(data) > 70_000
    assert held(proxy) < 6 * MIB


async def test_untaken_request_holds_up_no_other(proxy, upstream, wire):
    message = prefixed(big_request("m", MIB))
    for stream_id in (1, 3, 5):
        wire.send(begin(stream_id))
        wire.send(*data_frames(stream_id, message)[:16])
    triton = await upstream.accepted({frames.INITIAL_WINDOW_SIZE: 10_000})
    triton.send(frames.window_update(0, MIB))
    for far in (1, 3, 5):
        await triton.until(frames.HEADERS, far)
    wire.send(request(7))
    await triton.until(frames.DATA, 7)
    triton.send(answer(7, b"seven"))
    assert (await wire.answer(7))[0][5:] == b"seven"


class Room:
    """What the connection's window allows, from now on."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.seen, self.left = wire, len(wire.got), CONNECTION_WINDOW

    async def take(self, size: int) -> None:
        while self.left < size:
            assert await self.wire.next() is not None
            for kind, _, of, payload in self.wire.got[self.seen :]:
                if (kind, of) == (frames.WINDOW_UPDATE, 0):
                    self.left += int.from_bytes(payload)
            self.seen = len(self.wire.got)
        self.left -= size


@limited(max_inflight_bytes=MIB)
async def test_crowd_of_unfinished_requests_is_all_answered(proxy, wire):
    """Many requests whose ends come last, and together more than may be held."""
    message = prefixed(big_request("m", 200_000))
    wire.widen()
    ids = range(1, 41, 2)
    for stream_id in ids:
        wire.send(begin(stream_id))
    await wire.until(frames.WINDOW_UPDATE, 0)
    room = Room(wire)
    for at in range(0, len(message), 2**14):
        for stream_id in ids:
            piece = message[at : at + 2**14]
            await room.take(len(piece))
            end = int(at + 2**14 >= len(message))
            wire.send(frame(frames.DATA, end, stream_id, piece))
    while len([f for f in wire.got if f[0] == frames.HEADERS and f[1] & 1]) < len(ids):
        assert await wire.next() is not None
    assert proxy.counted("OK") == len(ids)


# -- what Triton has of a request


async def test_small_request_reaches_triton_whole(proxy, upstream, wire):
    message = prefixed(big_request("m", 200_000))
    wire.send(begin(1))
    wire.send(*data_frames(1, message)[:12])
    wire.send(begin(3))
    wire.send(frames.reset(1, Code.CANCEL))
    wire.send(complete(3))
    triton = await upstream.asked()
    triton.send(answer(1, b"three"))
    assert (await wire.answer(3))[0][5:] == b"three"
    await untouched(triton)
    assert [got[2] for got in triton.got if got[0] == frames.HEADERS] == [1]


async def test_triton_gets_no_unfinished_request_whole(proxy, upstream, wire):
    """All bytes are here but the end is not: the last byte waits, so a reset meets no request."""
    message = prefixed(big_request("m", 300_000))
    first, rest = message[: 2**18], message[2**18 :]
    wire.send(begin(1), *data_frames(1, first, ends=False))
    triton = await upstream.accepted({frames.INITIAL_WINDOW_SIZE: MIB})
    triton.send(frames.window_update(0, MIB))
    await triton.until(frames.HEADERS, 1)
    wire.send(*data_frames(1, rest, ends=False))
    seen = len(await triton.data(1, len(message) - 1))
    assert seen == len(message) - 1
    assert proxy.in_flight("m") == 1
    wire.send(frames.reset(1, Code.CANCEL))
    assert await triton.reset_of(1) == Code.CANCEL
    await proxy.until_free("m")
    assert proxy.counted("CANCELLED") == 1

    wire.send(begin(3), *data_frames(3, message, ends=False))
    wire.send(frame(frames.DATA, frames.END_STREAM, 3))
    assert await triton.data(3, len(message)) == message
    assert triton.got[-1][1] & frames.END_STREAM
    wire.send(frames.reset(3, Code.CANCEL))
    await proxy.until_abandoned("m")
    triton.send(answer(3, b"x"))
    await proxy.until_free("m")
    resets = [found[2] for found in triton.got if found[0] == frames.RST_STREAM]
    assert resets == [1]


async def test_window_shrinking_during_answer_is_kept(proxy, wire):
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 30_000}))
    wire.send(frames.window_update(0, 2**30))
    wire.send(begin(1))
    wire.send(*data_frames(1, prefixed(big_request("m", 60_000))))
    got = len(await wire.data(1, 30_000))
    wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
    while (await wire.until(frames.SETTINGS))[0] != frames.ACK:
        pass
    wire.send(frames.window_update(1, 29_999 + 5))
    assert len((await wire.until(frames.DATA, 1))[2]) == 5
    wire.send(frames.window_update(1, MIB))
    data, _ = await wire.answer(1)
    assert got + 5 + len(data) > 60_000


async def test_the_window_of_a_stream_must_not_overflow(proxy, wire):
    wire.send(begin(1), frames.window_update(1, frames.MAX_WINDOW))
    assert await wire.reset_of(1) == Code.FLOW_CONTROL_ERROR
    wire.send(begin(3))
    wire.send(
        frames.settings({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW}), frames.window_update(3, 1)
    )
    assert await wire.reset_of(3) == Code.FLOW_CONTROL_ERROR
    wire.send(request(5))
    await wire.answer(5)


async def test_padding_of_large_frame_is_credited(proxy, wire):
    """The frame comes in two parts, so that it is handled piece by piece."""
    message = prefixed(big_request("m", MIB))[: 2**18 + 2**15]
    padding = 200
    payload = bytes([padding]) + message + bytes(padding)
    padded = frame(frames.DATA, frames.PADDED, 1, payload)
    wire.send(begin(1), padded[: 2**16])
    session = proxy.session
    await until(lambda: session.streams)
    stream = session.streams[1]
    await until(lambda: stream.received_bytes)
    assert stream.received_bytes < len(message)
    wire.send(padded[2**16 :])
    await until(lambda: stream.received_bytes == len(message))
    await until(lambda: stream.unannounced == len(payload))
    assert stream.receive_window + stream.unannounced == STREAM_WINDOW
    assert session._receive_window + session.unannounced == CONNECTION_WINDOW


async def test_second_name_under_way_reaches_no_model(proxy, wire):
    seen = []

    async def act(message, context):
        seen.append(pb.ModelInferRequest.FromString(message).model_name)
        return await echo(message, context)

    proxy.answer_with(act)
    await wire.pour(3, prefixed(big_request("m", 700_000) + b"\x0a\x06team/a"))
    _, trailers = await wire.answer(3)
    assert b"InvalidRequest: the message names its model more than once" in trailers
    wire.send(request(5))
    await wire.answer(5)
    assert seen == ["m"]
    assert proxy.in_flight("m") == 0
