"""Windows, settings and buffers of the gRPC lane: they pass from end to end, and nothing grows."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from adapter.dataplane.relay import frames
from adapter.dataplane.relay.frames import Code
from tests.lanes.grpc_lane_door import (
    INFER,
    channel_to,
    frame,
    head_of,
    prefixed,
    relay_before,
    request_of,
    wire_to,
)
from tests.lanes.grpc_lane_triton import GOOD, HEAD, answer, scripted_triton
from tests.lanes.test_grpc_lane import echo

MIB = 2**20
ALL = 2**31 - 1


def big_request(name: str, size: int) -> bytes:
    return pb.ModelInferRequest(
        model_name=name, raw_input_contents=[bytes(size)]
    ).SerializeToString()


def request(stream_id: int, name: str = "m") -> bytes:
    return frames.header_block(stream_id, head_of(), end=False) + frame(
        frames.DATA, frames.END_STREAM, stream_id, prefixed(request_of(name))
    )


def pieces(stream_id: int, message: bytes) -> bytes:
    """As DATA frames of the usual size, the last one ends the request."""
    size = frames.FRAME_BYTES
    last = (len(message) - 1) // size * size
    return b"".join(
        frame(frames.DATA, int(at == last), stream_id, message[at : at + size])
        for at in range(0, len(message), size)
    )


async def test_the_callers_windows_are_tritons_and_tritons_the_callers():
    async with (
        relay_before(echo) as door,
        scripted_triton(door) as behind,
        wire_to(door.address) as wire,
    ):
        wire.greet({frames.INITIAL_WINDOW_SIZE: 70_000, frames.MAX_FRAME_SIZE: 20_000})
        wire.send(frames.window_update(0, 1000), request(1), frames.window_update(1, 3))
        triton = await behind.accepted(
            {frames.INITIAL_WINDOW_SIZE: 80_000, frames.MAX_FRAME_SIZE: 30_000}
        )
        _, _, settings = await triton.until(frames.SETTINGS)
        told = dict(frames.read_settings(settings))
        assert told[frames.INITIAL_WINDOW_SIZE] == 70_000
        assert told[frames.MAX_FRAME_SIZE] == 20_000
        assert told[frames.HEADER_TABLE_SIZE] == 0
        _, stream_id, more = await triton.until(frames.WINDOW_UPDATE)
        assert (stream_id, int.from_bytes(more)) == (0, 1000)
        _, stream_id, more = await triton.until(frames.WINDOW_UPDATE)
        assert (stream_id, int.from_bytes(more)) == (1, 3)

        await wire.until(frames.SETTINGS)  # the adapter's own
        while (found := await wire.until(frames.SETTINGS))[0] & frames.ACK:
            pass
        told = dict(frames.read_settings(found[2]))
        assert told == {frames.INITIAL_WINDOW_SIZE: 80_000, frames.MAX_FRAME_SIZE: 30_000}
        triton.send(frames.window_update(0, 50_000))
        _, stream_id, more = await wire.until(frames.WINDOW_UPDATE)
        assert (stream_id, int.from_bytes(more)) == (0, 50_000)


async def test_settings_hold_when_the_other_end_has_taken_them():
    async with (
        relay_before(echo) as door,
        scripted_triton(door) as behind,
        wire_to(door.address) as wire,
    ):
        wire.send(frames.PREFACE, frames.settings({}), frame(frames.SETTINGS, frames.ACK))
        await wire.until(frames.SETTINGS)
        assert (await wire.until(frames.SETTINGS))[0] == frames.ACK
        wire.send(request(1))
        triton = await behind.accepted({frames.INITIAL_WINDOW_SIZE: 90_000})
        await triton.until(frames.SETTINGS)
        triton.send(frame(frames.SETTINGS, frames.ACK))
        assert (await wire.until(frames.SETTINGS))[0] == 0

        wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
        triton.send(frames.ping(b"in front"))
        wire.send(frames.ping(b"a caller"))
        await wire.until(frames.PING)
        assert [found[1] for found in wire.got if found[0] == frames.SETTINGS] == [0, 1, 0]
        while (found := await triton.until(frames.SETTINGS))[0] & frames.ACK:
            pass
        acks = [found for found in triton.got if found[:2] == (frames.SETTINGS, frames.ACK)]
        assert acks == []  # the caller has not taken Triton's
        assert frames.read_settings(found[2]) == [(frames.INITIAL_WINDOW_SIZE, 1)]
        triton.send(frame(frames.SETTINGS, frames.ACK))
        assert (await wire.until(frames.SETTINGS))[0] == frames.ACK
        wire.send(frame(frames.SETTINGS, frames.ACK))
        assert (await triton.until(frames.SETTINGS))[0] == frames.ACK


async def test_answers_of_both_never_overrun_the_window_and_all_arrive():
    async def act(message, context):
        size = int(pb.ModelInferRequest.FromString(message).id)
        return pb.ModelInferResponse(id="x" * size).SerializeToString()

    async with relay_before(act) as door, wire_to(door.address) as wire:
        wire.greet({frames.INITIAL_WINDOW_SIZE: ALL})
        sizes = {1: 1, 3: 50_000, 5: 60_000, 7: 40_000, 9: 50_000}
        for stream_id, size in sizes.items():
            name = "team/a" if stream_id in {3, 7} else "m"
            wire.send(frames.header_block(stream_id, head_of(), end=False))
            message = prefixed(request_of(name, id=str(size)))
            wire.send(frame(frames.DATA, frames.END_STREAM, stream_id, message))
        window, ended = 65_535, set()
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
async def test_what_the_server_beside_sent_is_a_debt_that_the_next_updates_pay():
    """And a door that closes waits for who has no window for the rest."""

    async def act(message, context):
        return pb.ModelInferResponse(id="x" * 39_000).SerializeToString()

    async with (
        relay_before(act) as door,
        scripted_triton(door) as behind,
        wire_to(door.address) as wire,
    ):
        wire.greet({frames.INITIAL_WINDOW_SIZE: ALL})
        wire.send(request(1))
        triton = await behind.accepted()
        await triton.until(frames.DATA, 1)
        wire.send(request(3, "team/a"))
        data, _ = await wire.answer(3)
        triton.send(answer(1, bytes(15_000)), frames.ping(b"a mark  "))
        await triton.until(frames.PING)
        (relay,) = door.server._relays
        assert relay.caller.exchanges == {}
        first, _ = await wire.answer(1)
        left = 65_535 - len(data) - len(first)

        wire.send(request(5))
        await triton.until(frames.DATA, 5)
        triton.send(answer(5, bytes(16_000)), frames.ping(b"a mark  "))
        await triton.until(frames.PING)
        closing = asyncio.create_task(door.server.close(10))
        await wire.until(frames.GOAWAY)
        assert not closing.done()
        got = sum(len(f[3]) for f in wire.got if (f[0], f[2]) == (frames.DATA, 5))
        assert got == left  # the rest waits
        for _ in range(30):
            wire.send(frames.window_update(0, 1000))
        rest, _ = await wire.answer(5)
        assert got + len(rest) == 16_005
        await closing
        while await triton.next() is not None:
            pass
        paid = [f for f in triton.got if (f[0], f[2]) == (frames.WINDOW_UPDATE, 0)]
        assert paid == []


async def test_a_window_that_shrinks_amid_an_answer_is_kept():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        wire.greet({frames.INITIAL_WINDOW_SIZE: 30_000})
        wire.send(frames.window_update(0, ALL - 70_000))
        wire.send(frames.header_block(1, head_of(), end=False))
        wire.send(pieces(1, prefixed(big_request("m", 60_000))))
        got = 0
        while got < 30_000:
            got += len((await wire.until(frames.DATA, 1))[2])
        wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: 1}))
        while (await wire.until(frames.SETTINGS))[0] != frames.ACK:
            pass
        wire.send(frames.window_update(1, 29_999 + 5))
        assert len((await wire.until(frames.DATA, 1))[2]) == 5
        wire.send(frames.window_update(1, MIB))
        data, _ = await wire.answer(1)
        assert got + 5 + len(data) > 60_000


async def until(condition, seconds: float = 10) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.02)


def held(door) -> int:
    """All that the lane has in its memory of what passes."""
    total = 0
    for relay in door.server._relays:
        for wire in (relay.caller, *relay.links):
            total += sum(map(len, wire.out)) + len(wire._rest)
            if wire._transport is not None:
                total += wire._transport.get_write_buffer_size()
        total += sum(one.size for one in relay.caller._waiting)
        total += sum(len(exchange.held) for exchange in relay.caller.exchanges.values())
    return total


@pytest.mark.slow
async def test_a_triton_that_reads_nothing_is_no_reason_to_hold_more():
    callers, size = 8, 16 * MIB
    async with relay_before(echo) as door, scripted_triton(door) as behind:

        async def send(wire):
            wire.greet()
            wire.send(frames.header_block(1, head_of(), end=False))
            message = prefixed(big_request("m", size))
            wire.send(frame(frames.DATA, 0, 1, message[:1000]))
            triton = await behind.accepted({frames.INITIAL_WINDOW_SIZE: ALL})
            triton.reader._transport.pause_reading()
            triton.send(frames.window_update(0, ALL - 65_535))
            await wire.until(frames.WINDOW_UPDATE)
            wire.send(pieces(1, message[1000:]))
            return triton

        async with asyncio.TaskGroup() as group, AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(wire_to(door.address)) for _ in range(callers)]
            tritons = [await group.create_task(send(wire)) for wire in wires]
            await until(lambda: all(r.triton.is_paused for r in door.server._relays))
            assert 0 < held(door) < callers * MIB
            for triton in tritons:
                triton.reader._transport.resume_reading()
                read = 0
                while read < size:
                    read += len((await triton.until(frames.DATA, 1))[2])


async def test_a_caller_that_reads_nothing_is_no_reason_to_hold_more():
    async with (
        relay_before(echo) as door,
        scripted_triton(door) as behind,
        wire_to(door.address) as wire,
    ):
        wire.greet({frames.INITIAL_WINDOW_SIZE: ALL})
        wire.send(frames.window_update(0, ALL - 65_535), request(1))
        triton = await behind.accepted()
        await triton.until(frames.DATA, 1)
        wire.reader._transport.pause_reading()
        whole = prefixed(bytes(32 * MIB - 5))
        triton.send(frames.header_block(1, HEAD, end=False))
        for at in range(0, len(whole), frames.FRAME_BYTES):
            triton.send(frame(frames.DATA, 0, 1, whole[at : at + frames.FRAME_BYTES]))
        triton.send(frames.header_block(1, GOOD, end=True))
        (relay,) = door.server._relays
        await until(lambda: relay.caller.is_paused)
        assert 0 < held(door) < MIB
        wire.reader._transport.resume_reading()
        read = 0
        while read < 32 * MIB:
            read += len((await wire.until(frames.DATA, 1))[2])
        await wire.until(frames.HEADERS, 1)


@pytest.mark.slow
async def test_who_makes_us_answer_and_reads_nothing_is_cut_off():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        wire.greet()
        await until(lambda: door.server._relays)
        (relay,) = door.server._relays
        wire.reader._transport.pause_reading()
        async with asyncio.timeout(10):
            while not relay.ended.is_set():
                wire.send(frame(frames.PING, 0, 0, bytes(8)) * 1000)
                relay.caller.chores = 0  # that limit is not what this is about
                await asyncio.sleep(0)
        assert held(door) < 4 * MIB


async def test_the_window_of_a_stream_must_not_overflow():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        wire.greet()
        wire.send(frames.header_block(1, head_of(), end=False), frames.window_update(1, ALL))
        _, _, code = await wire.until(frames.RST_STREAM, 1)
        assert int.from_bytes(code) == Code.FLOW_CONTROL_ERROR
        wire.send(frames.header_block(3, head_of(), end=False))
        wire.send(frames.settings({frames.INITIAL_WINDOW_SIZE: ALL}), frames.window_update(3, 1))
        _, _, code = await wire.until(frames.RST_STREAM, 3)
        assert int.from_bytes(code) == Code.FLOW_CONTROL_ERROR
        wire.send(request(5))
        await wire.answer(5)


async def test_large_frames_pass_in_the_pieces_that_they_come_in():
    async with relay_before(echo) as door, wire_to(door.address) as wire:
        wire.greet({frames.MAX_FRAME_SIZE: MIB, frames.INITIAL_WINDOW_SIZE: ALL})
        wire.send(frames.window_update(0, ALL - 65_535), request(1))
        await wire.answer(1)
        (relay,) = door.server._relays
        await until(lambda: relay.caller.max_frame > MIB)
        message = prefixed(big_request("m", 700_000))
        wire.send(frame(frames.SETTINGS, frames.ACK), frames.header_block(3, head_of(), end=False))
        whole = frame(frames.DATA, frames.END_STREAM, 3, message)
        for at in range(0, len(whole), 50_001):
            wire.send(whole[at : at + 50_001])
            await wire.writer.drain()
        data, _ = await wire.answer(3)
        assert len(pb.ModelInferResponse.FromString(data[5:]).raw_output_contents[0]) == 700_000


async def test_a_name_amid_a_frame_that_is_on_its_way_never_reaches_triton():
    seen = []

    async def act(message, context):
        try:
            seen.append(pb.ModelInferRequest.FromString(message).model_name)
        except DecodeError:  # as Triton does
            seen.append("nothing")
            return b""
        return await echo(message, context)

    async with relay_before(act) as door, wire_to(door.address) as wire:
        wire.greet()
        wire.send(request(1))
        await wire.answer(1)
        (relay,) = door.server._relays
        await until(lambda: relay.caller.max_frame > MIB)
        evil = big_request("m", 700_000) + b"\x0a\x06team/a"
        whole = frame(frames.DATA, frames.END_STREAM, 3, prefixed(evil))
        wire.send(frame(frames.SETTINGS, frames.ACK))
        wire.send(frames.header_block(3, head_of(), end=False), whole[:300_000])
        await until(lambda: relay.triton.is_within)
        wire.send(whole[300_000:])
        _, trailers = await wire.answer(3)
        assert b"InvalidRequest: the message names its model more than once" in trailers
        wire.send(request(5))
        await wire.answer(5)
        assert seen in (["m", "nothing", "m"], ["m", "m"])
        async with channel_to(door.address) as channel:
            await channel.unary_unary(INFER)(request_of())
