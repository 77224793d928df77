"""How the gRPC proxy closes a connection: GOAWAY of RFC 9113 section 6.8, and nothing is lost."""

import asyncio

import pytest

from adapter.relay import frames
from adapter.relay.frames import Code
from adapter.relay.listener import RelayListener
from tests.frontends.grpc.proxy_listener import Wire, frame, request, status

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


async def test_streams_before_goaway_are_served(proxy, wire):
    wire.send(request(1))
    await wire.answer(1)
    closing = asyncio.create_task(proxy.server.close(5))
    ping = await leaving(wire)
    wire.send(request(3), heard(ping), request(5))
    assert await last_taken(wire) == 3
    data, trailers = await wire.answer(3)
    assert data
    assert status(trailers) == "OK"
    assert await wire.ended_with() == Code.NO_ERROR
    lasts = [int.from_bytes(told[3][:4]) for told in wire.got if told[0] == frames.GOAWAY]
    assert lasts == [ANY, 3, 3]  # though 5 was refused meanwhile
    assert (frames.RST_STREAM, 0, 5, b"\0\0\0\x07") in wire.got
    await closing


async def test_a_pong_of_another_ping_does_not_count(proxy, wire):
    wire.send(request(1))
    await wire.answer(1)
    closing = asyncio.create_task(proxy.server.close(5))
    ping = await leaving(wire)
    wire.send(heard(b"adapter?"), request(3))
    assert status((await wire.answer(3))[1]) == "OK"
    wire.send(heard(ping))
    assert await last_taken(wire) == 3
    await closing


@pytest.mark.slow
async def test_who_does_not_answer_is_left_nevertheless(proxy, wire):
    wire.send(request(1))
    await wire.answer(1)
    closing = asyncio.create_task(proxy.server.close(5))
    await leaving(wire)
    assert await last_taken(wire) == 1
    assert await wire.ended_with() == Code.NO_ERROR
    await closing


async def test_renewed_connection_ends_with_its_calls(proxy, wire):
    """Of a listener that was not ready for long: clients are to connect anew."""
    wire.send(request(1))
    await wire.answer(1)
    proxy.server.renew_connections()
    ping = await leaving(wire)
    wire.send(request(3), heard(ping))
    assert await last_taken(wire) == 3
    assert status((await wire.answer(3))[1]) == "OK"
    assert await wire.ended_with() == Code.NO_ERROR


async def test_unix_sockets_keep_their_connections(proxy, tmp_path):
    """ModelMesh, which has no load balancer in between, may never connect anew."""
    path = str(tmp_path / "s")
    server = RelayListener(proxy.context)
    await server.listen("", 0, path)
    try:
        wire = Wire(*await asyncio.open_unix_connection(path))
        wire.greet()
        wire.send(request(1))
        await wire.answer(1)
        server.renew_connections()
        wire.send(request(3))
        assert status((await wire.answer(3))[1]) == "OK"
        assert frames.GOAWAY not in {got[0] for got in wire.got}
        wire.writer.close()
    finally:
        await server.close(1)
