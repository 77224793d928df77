"""Clients are asked to connect anew while the adapter is not ready for long."""

import asyncio

import pytest

from adapter.frontends.unready import UNREADY_SECONDS, UnreadyConnections
from adapter.relay import frames
from adapter.relay.frames import Code
from adapter.relay.listener import RelayListener
from adapter.runtime import clock
from tests.frontends.grpc.proxy_listener import Wire, proxy_before, wire_to
from tests.frontends.grpc.test_proxy import echo
from tests.frontends.grpc.test_proxy_ends import status
from tests.frontends.grpc.test_proxy_flow_control import request
from tests.frontends.grpc.test_proxy_goaway import heard, last_taken, leaving

pytestmark = pytest.mark.both_loops


class Unready:
    """Polls as the adapter does, by a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_ready = True
        self.now = 100.0
        self.connections = UnreadyConnections(lambda: self.is_ready)
        monkeypatch.setattr(clock, "monotonic", lambda: self.now)

    async def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        await self.connections.poll()


@pytest.fixture
def unready(monkeypatch: pytest.MonkeyPatch) -> Unready:
    return Unready(monkeypatch)


async def answered(wire: Wire, stream_id: int) -> None:
    wire.send(request(stream_id))
    assert status((await wire.answer(stream_id))[1]) == 0


def goaways(wire: Wire) -> int:
    return sum(got[0] == frames.GOAWAY for got in wire.got)


async def test_goaway_is_sent_after_seconds_unready(unready):
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        unready.connections.add(proxy.server.renew_connections)
        wire.greet()
        await answered(wire, 1)
        await unready.pass_seconds(100)
        unready.is_ready = False
        await unready.pass_seconds(UNREADY_SECONDS - 1)
        await answered(wire, 3)
        assert goaways(wire) == 0
        await unready.pass_seconds(1)
        ping = await leaving(wire)
        wire.send(request(5), heard(ping))
        assert await last_taken(wire) == 5
        assert status((await wire.answer(5))[1]) == 0
        assert await wire.ended_with() == Code.NO_ERROR


async def test_new_connections_are_served_while_unready(unready):
    """Clients without a load balancer connect anew at once, and get GOAWAY again later."""
    async with proxy_before(echo) as proxy:
        unready.connections.add(proxy.server.renew_connections)
        await unready.pass_seconds(0)
        unready.is_ready = False
        await unready.pass_seconds(UNREADY_SECONDS)
        async with wire_to(proxy.address) as wire:
            wire.greet()
            await answered(wire, 1)
            await unready.pass_seconds(UNREADY_SECONDS - 1)
            await answered(wire, 3)
            assert goaways(wire) == 0
            await unready.pass_seconds(1)
            await leaving(wire)


async def test_connections_stay_before_the_adapter_was_ready(unready):
    unready.is_ready = False
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        unready.connections.add(proxy.server.renew_connections)
        wire.greet()
        for number in range(5):
            await unready.pass_seconds(UNREADY_SECONDS)
            await answered(wire, 2 * number + 1)
        assert goaways(wire) == 0


async def test_short_unreadiness_ends_no_connection(unready):
    async with proxy_before(echo) as proxy, wire_to(proxy.address) as wire:
        unready.connections.add(proxy.server.renew_connections)
        wire.greet()
        for number in range(5):
            unready.is_ready = number % 2 == 0
            await unready.pass_seconds(UNREADY_SECONDS - 1)
            await answered(wire, 2 * number + 1)
        assert goaways(wire) == 0


async def test_unix_sockets_keep_their_connections(tmp_path):
    """ModelMesh, which has no load balancer in between, may never connect anew."""
    async with proxy_before(echo) as proxy:
        path = str(tmp_path / "s")
        server = RelayListener(proxy.server._context)
        await server.listen("", 0, path)
        try:
            reader, writer = await asyncio.open_unix_connection(path)
            wire = Wire(reader, writer)
            wire.greet()
            await answered(wire, 1)
            server.renew_connections()
            await answered(wire, 3)
            assert goaways(wire) == 0
            writer.close()
        finally:
            await server.close(1)
