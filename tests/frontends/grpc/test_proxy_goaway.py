"""How the gRPC proxy closes a connection: GOAWAY of RFC 9113 section 6.8, and nothing is lost."""

import asyncio

import pytest

from adapter.relay import frames
from adapter.relay.frames import Code
from tests.fakes.http2_triton import answer, scripted_triton
from tests.frontends.grpc.proxy_listener import (
    Wire,
    frame,
    proxy_before,
    wire_to,
)
from tests.frontends.grpc.test_proxy import echo
from tests.frontends.grpc.test_proxy_ends import status
from tests.frontends.grpc.test_proxy_flow_control import request

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


async def test_a_triton_that_is_lost_is_no_matter_for_the_callers_connection():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        async with scripted_triton(proxy) as behind:
            wire.greet()
            wire.send(request(1))
            triton = await behind.accepted()
            await triton.until(frames.DATA, 1)
            triton.send(answer(1))
            await wire.answer(1)
            triton.writer.close()
            await proxy.until_linkless()
        wire.send(request(3))
        assert status((await wire.answer(3))[1]) == 0
        assert frames.GOAWAY not in {got[0] for got in wire.got}


async def test_what_came_before_the_caller_heard_that_the_listener_closes_is_served():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(request(1))
        await wire.answer(1)
        closing = asyncio.create_task(proxy.server.close(5))
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
        await closing


async def test_a_pong_of_another_ping_does_not_count():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(request(1))
        await wire.answer(1)
        closing = asyncio.create_task(proxy.server.close(5))
        ping = await leaving(wire)
        wire.send(heard(b"adapter?"), request(3))
        assert status((await wire.answer(3))[1]) == 0
        wire.send(heard(ping))
        assert await last_taken(wire) == 3
        await closing


@pytest.mark.slow
async def test_who_does_not_answer_is_left_nevertheless():
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(request(1))
        await wire.answer(1)
        closing = asyncio.create_task(proxy.server.close(5))
        await leaving(wire)
        assert await last_taken(wire) == 1
        assert await wire.ended_with() == Code.NO_ERROR
        await closing
