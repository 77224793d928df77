"""The states of a connection beneath HTTP/2, and what its end is told in each."""

import asyncio
from dataclasses import dataclass, field
from inspect import getmembers, isfunction

import pytest

from adapter.relay.frames import Code, ConnectionFault
from adapter.relay.session import RelaySession
from adapter.relay.transport import FrameTransport, State
from adapter.relay.upstream import Upstream
from adapter.runtime import clock
from adapter.runtime.turns import Turns


@dataclass
class Wire(asyncio.Transport):
    written: list[bytes] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    unsent: int = 0

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def write(self, data):
        self.written.append(data)

    def get_write_buffer_size(self):
        return self.unsent

    def pause_reading(self):
        self.ends.append("pause")

    def resume_reading(self):
        self.ends.append("resume")

    def close(self):
        self.ends.append("close")

    def abort(self):
        self.ends.append("abort")


class RecordingEnd(FrameTransport):
    def __init__(self, turns: Turns | None = None) -> None:
        super().__init__(turns or Turns())
        self.told: list[str] = []
        self.fails: Exception | None = None

    def handle_bytes(self, data: bytes, at: int = 0) -> int:
        self.told.append(f"received {data[at:]!r}")
        if self.fails is not None:
            raise self.fails
        return len(data)

    def close(self, code: int = Code.NO_ERROR, why: str = "") -> None:
        self.told.append(f"close {Code(code).name}")
        self.end_transport(code)

    def flush_all(self) -> None:
        pass

    def handle_lost(self) -> None:
        self.told.append("lost")

    def handle_closed(self) -> None:
        self.told.append("gone")


@pytest.fixture
def end():
    return RecordingEnd()


async def test_a_connection_goes_from_connecting_to_closed(end):
    transport, wire = end, Wire()
    assert (transport.state, transport.was_open) == (State.CONNECTING, False)
    transport.connection_made(wire)
    assert (transport.state, transport.was_open) == (State.OPEN, True)
    transport.end_transport(Code.NO_ERROR)
    assert (transport.state, wire.ends) == (State.CLOSING, ["close"])
    transport.connection_lost(None)
    assert transport.state is State.CLOSED
    assert end.told == ["lost", "gone"]


async def test_only_an_open_connection_writes_and_reads(end):
    transport, wire = end, Wire()
    transport.write([b"too early"])
    transport.connection_made(wire)
    transport.write([b"a", b"b"])
    transport.data_received(b"in")
    transport.end_transport(Code.NO_ERROR)
    transport.write([b"too late"])
    transport.data_received(b"too late")
    transport.connection_lost(None)
    assert wire.written == [b"ab"]
    assert [told for told in end.told if "received" in told] == ["received b'in'"]


async def test_connection_abandoned_before_made_closes_at_once(end):
    end.end_transport(Code.NO_ERROR)
    assert (end.state, end.told) == (State.CLOSED, ["lost", "gone"])
    wire = Wire()
    end.connection_made(wire)
    assert wire.ends == ["abort"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionFault(Code.PROTOCOL_ERROR, "odd"), "PROTOCOL_ERROR"),
        (KeyError(), "INTERNAL_ERROR"),
    ],
)
async def test_what_its_end_cannot_read_closes_it(end, error, code):
    end.connection_made(Wire())
    end.fails = error
    end.data_received(b"in")
    assert end.told[-2:] == [f"close {code}", "lost"]
    end.connection_lost(None)


class SlowEnd(RecordingEnd):
    """Takes longer over a byte than there is time in a turn."""

    def __init__(self, name: str, turns: Turns, handled: list[str]) -> None:
        super().__init__(turns)
        self.connection_made(Wire())
        self.name, self.handled = name, handled

    def handle_bytes(self, data: bytes, at: int) -> int:
        self.handled.append(self.name + chr(data[at]))
        return at + 1


async def test_long_work_goes_on_in_fair_turns():
    handled: list[str] = []
    turns = Turns()
    one, other = (SlowEnd(name, turns, handled) for name in "xy")
    asyncio.get_running_loop().call_soon(handled.append, "a turn")
    one.data_received(b"123")
    other.data_received(b"123")
    assert handled == ["x1", "y1"]
    assert one._transport.ends == ["pause"]
    for _ in range(10):
        await asyncio.sleep(0)
    assert handled == ["x1", "y1", "a turn", "x2", "y2", "x3", "y3"]
    assert other._transport.ends == ["pause", "resume"]


class CostlyEnd(RecordingEnd):
    """Takes most of a turn over whatever it reads."""

    def __init__(self, name: str, turns: Turns, handled: list[str], now: list[float]) -> None:
        super().__init__(turns)
        self.connection_made(Wire())
        self.name, self.handled, self.now = name, handled, now

    def handle_bytes(self, data: bytes, at: int) -> int:
        self.handled.append(self.name)
        self.now[0] += 0.0012
        return len(data)


async def test_all_connections_share_the_time_of_a_turn(monkeypatch):
    handled: list[str] = []
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    shared = Turns()
    ends = [CostlyEnd(str(i), shared, handled, now) for i in range(5)]
    asyncio.get_running_loop().call_soon(handled.append, "a turn")
    for end in ends:
        end.data_received(bytes(5000))
    ends[4].data_received(b"more")
    small = CostlyEnd("small", shared, handled, now)
    small.data_received(b"small")
    assert handled == ["0", "1", "small"]
    for _ in range(5):
        await asyncio.sleep(0)
    assert handled == ["0", "1", "small", "a turn", "2", "3", "4"]
    assert ends[4]._transport.ends == ["pause", "resume"]


async def test_what_was_left_is_dropped_with_its_connection():
    handled: list[str] = []
    end = SlowEnd("x", Turns(), handled)
    end.data_received(b"123")
    end.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert handled == ["x1"]


CONNECTIONS = (RelaySession, Upstream)


def test_both_connection_classes_have_own_code():
    """The interpreter's caches know one class for each line."""
    codes = [
        {name: found.__code__ for name, found in getmembers(cls, isfunction)} for cls in CONNECTIONS
    ]
    both = codes[0].keys() & codes[1].keys()
    assert {"data_received", "handle_bytes", "credit", "send", "flush"} <= both
    assert [name for name in both if codes[0][name] is codes[1][name]] == []


@pytest.mark.parametrize("kind", CONNECTIONS)
def test_a_connection_has_a_slot_for_each_attribute(kind):
    assert kind.__dictoffset__ == 0
