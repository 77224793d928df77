"""How the gRPC lane takes leave of a caller: RFC 9113 section 6.8, without losing what is on its
way.
"""

import asyncio

import grpc
import pytest

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code
from adapter.dataplane.relay.site import connect_to
from tests.lanes.grpc_lane_door import (
    Wire,
    frame,
    head_of,
    prefixed,
    relay_before,
    request_of,
    wire_to,
)
from tests.lanes.grpc_lane_triton import answer, scripted_triton
from tests.lanes.test_grpc_lane import echo
from tests.lanes.test_grpc_lane_ends import goaway, status
from tests.lanes.test_grpc_lane_windows import pieces, request

METADATA = "/inference.GRPCInferenceService/ModelMetadata"
ANY = frames.MAX_STREAM

pytestmark = pytest.mark.both_loops


async def leaving(wire: Wire) -> bytes:
    """GOAWAY that names no stream has come; the PING behind it, which is to be answered."""
    _, _, payload = await wire.until(frames.GOAWAY)
    assert payload == ANY.to_bytes(4, "big") + bytes(4)
    return (await wire.until(frames.PING))[2]


def heard(ping: bytes) -> bytes:
    return frame(frames.PING, frames.ACK, 0, ping)


async def last_taken(wire: Wire) -> int:
    _, _, payload = await wire.until(frames.GOAWAY)
    assert payload[4:8] == bytes(4)
    return int.from_bytes(payload[:4], "big")


async def test_what_came_before_the_caller_heard_of_a_lost_triton_is_served():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        async with scripted_triton(door) as behind:
            wire.greet()
            wire.send(request(1))
            triton = await behind.accepted()
            await triton.until(frames.DATA, 1)
            triton.send(answer(1))
            await wire.answer(1)
            triton.writer.close()
            ping = await leaving(wire)
        wire.send(request(3), heard(ping), request(5))
        assert await last_taken(wire) == 3
        data, trailers = await wire.answer(3)
        assert data
        assert status(trailers) == 0
        assert await wire.ended_with() == Code.NO_ERROR
        lasts = [int.from_bytes(told[3][:4]) for told in wire.got if told[0] == frames.GOAWAY]
        assert lasts == [ANY, 3, 3]  # though 5 was refused meanwhile
        assert (frames.RST_STREAM, 0, 5, b"\0\0\0\x07") in wire.got
        assert door.in_flight("m") == 0


async def test_what_comes_after_tritons_goaway_is_served_beside_it():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        async with scripted_triton(door) as behind:
            wire.greet()
            wire.send(request(1))
            triton = await behind.accepted()
            await triton.until(frames.DATA, 1)
            triton.send(goaway(ANY))
            ping = await leaving(wire)
            wire.send(request(3))
            assert status((await wire.answer(3))[1]) == 0
            wire.send(heard(ping))
            assert await last_taken(wire) == 3
            triton.send(answer(1, b"one"))
            assert (await wire.answer(1))[0][5:] == b"one"
        assert await wire.ended_with() == Code.NO_ERROR


async def test_a_pong_of_another_ping_does_not_count():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        wire.greet()
        wire.send(request(1))
        await wire.answer(1)
        closing = asyncio.create_task(door.server.close(5))
        ping = await leaving(wire)
        wire.send(heard(b"adapter?"), request(3))
        assert status((await wire.answer(3))[1]) == 0
        wire.send(heard(ping))
        assert await last_taken(wire) == 3
        await closing


@pytest.mark.slow
async def test_who_does_not_answer_is_left_nevertheless():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        wire.greet()
        wire.send(request(1))
        await wire.answer(1)
        closing = asyncio.create_task(door.server.close(5))
        await leaving(wire)
        assert await last_taken(wire) == 1
        assert await wire.ended_with() == Code.NO_ERROR
        await closing


async def test_the_window_that_triton_took_with_it_is_given_again():
    message = prefixed(request_of("m", *[1.0] * 10_000))
    part, sent = frames.HEAD_BYTES + frames.FRAME_BYTES, 3 * frames.FRAME_BYTES
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        async with scripted_triton(door) as behind:
            wire.greet()
            for stream_id, parts in ((1, 2), (3, 1)):
                wire.send(frames.header_block(stream_id, head_of(), end=False))
                wire.send(pieces(stream_id, message)[: parts * part])
            triton = await behind.accepted()
            while sum(len(got[3]) for got in triton.got if got[0] == frames.DATA) < sent:
                await triton.next()
            triton.writer.close()
            await leaving(wire)
        assert (frames.WINDOW_UPDATE, 0, 0, sent.to_bytes(4, "big")) in wire.got
        wire.send(frames.header_block(5, head_of(), end=False))
        wire.send(pieces(5, message))
        assert status((await wire.answer(5))[1]) == 0


async def test_the_window_of_what_a_lost_server_did_not_take_is_given_again():
    async with relay_before(echo) as door, scripted_triton(door) as beside:
        door.server._site.connect_server = connect_to(lambda: door.triton)
        async with wire_to(door.address) as wire:
            wire.greet()
            for stream_id in (1, 3):
                wire.send(frames.header_block(stream_id, head_of(METADATA), end=False))
            wire.send(pieces(1, bytes(frames.DEFAULT_WINDOW)))
            server = await beside.accepted()
            await server.until(frames.DATA, 1)
            given = 0
            while given < frames.DEFAULT_WINDOW // 2:
                given += int.from_bytes((await wire.until(frames.WINDOW_UPDATE, 0))[2])
            wire.send(pieces(3, bytes(2**15))[: 2**14 + 9])  # for which the server has no window
            wire.send(frame(frames.PING, 0, 0, b"all here"))
            await wire.until(frames.PING)
            server.writer.close()
            _, trailers = await wire.answer(3)
            assert status(trailers) == grpc.StatusCode.UNAVAILABLE.value[0]
            wire.send(frame(frames.PING, 0, 0, b"and more"))
            while wire.got[-1][3] != b"and more":
                await wire.next()
            updates = [got[3] for got in wire.got if got[0] == frames.WINDOW_UPDATE and not got[2]]
            assert sum(map(int.from_bytes, updates)) >= frames.DEFAULT_WINDOW + 2**14
