"""Clients are asked to connect anew while the adapter is not ready for long."""

from types import SimpleNamespace

import pytest

from adapter.frontends import unready
from adapter.frontends.unready import UNREADY_SECONDS, UnreadyConnections
from tests.frontends.http.listener import PATHS, Caller, both, request


class Polls:
    """Polls as the adapter does, by a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_ready = True
        self.now = 100.0
        self.connections = UnreadyConnections(lambda: self.is_ready)
        monkeypatch.setattr(unready, "clock", SimpleNamespace(monotonic=lambda: self.now))

    async def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        await self.connections.poll()


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> Polls:
    return Polls(monkeypatch)


async def is_kept(caller: Caller, path: str) -> bool:
    """Ask; return whether the answer keeps the connection."""
    found = await caller.ask(request(path))
    assert found.status == 200
    if "connection" not in found.headers:
        return True
    assert found.headers["connection"] == "close"
    assert await caller.rest() == b""
    return False


@both
async def test_next_answer_closes_after_seconds_unready(listener, polls, path):
    polls.connections.add(listener.server.renew_connections)
    caller = await listener.connect()
    assert await is_kept(caller, path)
    await polls.pass_seconds(100)
    polls.is_ready = False
    await polls.pass_seconds(UNREADY_SECONDS - 1)
    assert await is_kept(caller, path)
    await polls.pass_seconds(1)
    assert not await is_kept(caller, path)


async def test_connection_closes_behind_the_answer_in_hand(listener, caller):
    """A request behind that answer is not begun, as in a drain."""
    await listener.hold(caller, PATHS[0], request(PATHS[0]))
    listener.server.renew_connections()
    listener.gate.set()
    found = await caller.answer()
    assert (found.status, found.headers["connection"]) == (200, "close")
    assert await caller.rest() == b""


async def test_new_connections_are_kept_while_unready(listener, polls):
    """Clients without a load balancer connect anew at once, and are asked again later."""
    polls.connections.add(listener.server.renew_connections)
    await polls.pass_seconds(0)
    polls.is_ready = False
    await polls.pass_seconds(UNREADY_SECONDS)
    caller = await listener.connect()
    assert await is_kept(caller, PATHS[0])
    await polls.pass_seconds(UNREADY_SECONDS - 1)
    assert await is_kept(caller, PATHS[0])
    await polls.pass_seconds(1)
    assert not await is_kept(caller, PATHS[0])


async def test_connections_stay_before_the_adapter_was_ready(listener, polls):
    polls.is_ready = False
    polls.connections.add(listener.server.renew_connections)
    caller = await listener.connect()
    for _ in range(3):
        await polls.pass_seconds(UNREADY_SECONDS)
        assert await is_kept(caller, PATHS[0])


async def test_short_unreadiness_ends_no_connection(listener, caller, polls):
    polls.connections.add(listener.server.renew_connections)
    for number in range(5):
        polls.is_ready = number % 2 == 0
        await polls.pass_seconds(UNREADY_SECONDS - 1)
        assert await is_kept(caller, PATHS[0])
