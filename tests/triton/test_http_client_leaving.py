"""Callers that leave, or had no answer in time: what Triton has of a call stays with Triton."""

import asyncio
import resource

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.errors import BackendTimeout, StubDied
from adapter.triton.connection import State
from tests.fakes.http_triton import OK, connections, post, reads_itself, served
from tests.fakes.lease import FakeLease, LeaseState
from tests.frontends.http.listener import until

MIB = 2**20
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SECONDS = 10


def make_lease() -> FakeLease:
    return FakeLease(
        ModelRecord(ModelId("m"), TritonName("m"), ModelSource("/m"), LoadedFor.PLATFORM)
    )


async def ask(plane, lease, call=None):
    with lease:
        async with plane.forward(call or post(), lease) as answer:
            return await answer.read()


async def left(asking):
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("said", [b"", CHUNKED, CHUNKED + b"1\r\n{\r\n"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("ending", ["left", "late"])
async def test_abandoned_call_lasts_until_its_answer(said, is_stream, ending):
    begun, gate = asyncio.Event(), asyncio.Event()
    rest = (CHUNKED + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")[len(said) :]

    async def script(talk):
        await talk.say(said)
        begun.set()
        await gate.wait()
        await talk.say(rest)

    async with served(script, seconds=0.1 if ending == "late" else SECONDS) as (plane, upstream):
        lease = make_lease()
        asking = asyncio.create_task(ask(plane, lease, post(is_stream=is_stream)))
        await begun.wait()
        if ending == "left":
            asking.cancel()
        with pytest.raises((asyncio.CancelledError, BackendTimeout)):
            await asking
        assert (lease.state, lease.record.usage.in_flight) == (LeaseState.ABANDONED, 1)
        assert connections(plane) == "<Pool: 1 connections, 0 idle>"
        gate.set()
        await until(lambda: lease.state == LeaseState.ENDED)
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"
        assert not upstream.talks[0].ended.is_set()
    assert (lease.record.usage.in_flight, lease.record.usage.abandoned) == (0, 0)


async def test_oldest_abandoned_call_gives_its_connection_to_another():
    """Triton answers none of them for now, and each has a descriptor of the adapter."""
    gate = asyncio.Event()

    async def script(talk):
        await gate.wait()
        await talk.say(OK)

    async with served(script, max_connections=2) as (plane, upstream):
        leases = []
        for count in (1, 2, 3):
            lease = make_lease()
            leases.append(lease)
            asking = asyncio.create_task(ask(plane, lease))
            await until(lambda count=count: len(upstream.requests) == count)
            await left(asking)
        await until(lambda: connections(plane) == "<Pool: 2 connections, 0 idle>")
        states = [lease.state for lease in leases]
        gate.set()
        assert states == [LeaseState.ENDED, LeaseState.ABANDONED, LeaseState.ABANDONED]
        await until(lambda: leases[2].state == LeaseState.ENDED)
        assert connections(plane) == "<Pool: 2 connections, 2 idle>"
        assert await ask(plane, make_lease()) == b"{}"
    # a connection that the adapter closed says nothing of Triton
    assert [lease.failures for lease in leases] == [[], [], []]


async def test_an_answer_that_nobody_wants_takes_no_memory():
    begun = asyncio.Event()
    size, piece = 128 * MIB, bytes(MIB)

    async def script(talk):
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            begun.set()
            await talk.say(piece)

    async with served(script, seconds=60) as (plane, _):
        lease = make_lease()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with lease:
            async with plane.forward(post(), lease):
                await begun.wait()
        assert lease.state == LeaseState.ABANDONED
        await until(lambda: lease.state == LeaseState.ENDED)
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def test_what_triton_says_late_is_heard():
    gate = asyncio.Event()
    text = b'{"error":"Stub process \'m_0_0\' is not healthy."}'

    async def script(talk):
        await gate.wait()
        head = b"HTTP/1.1 500 X\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
        await talk.say(head % len(text) + text)

    async with served(script) as (plane, upstream):
        lease = make_lease()
        asking = asyncio.create_task(ask(plane, lease))
        await upstream.asked(1)
        await left(asking)
        gate.set()
        await until(lambda: lease.state == LeaseState.ENDED)
    assert [type(error) for error in lease.failures] == [StubDied]


async def test_process_end_waits_for_nothing():
    async def script(talk):
        await talk.end()

    async with served(script) as (plane, upstream), asyncio.timeout(SECONDS):
        lease = make_lease()
        asking = asyncio.create_task(ask(plane, lease))
        await upstream.asked(1)
        await left(asking)
        await plane.close()
        assert lease.state == LeaseState.ENDED


async def test_incomplete_request_ends_with_its_caller():
    begun = asyncio.Event()

    async def body():
        yield b"{"
        begun.set()
        await asyncio.Event().wait()

    async with served(reads_itself(lambda talk: talk.end())) as (plane, upstream):
        lease = make_lease()
        headers = {"Content-Length": "2"}
        asking = asyncio.create_task(ask(plane, lease, post(body(), headers=headers)))
        await begun.wait()
        await left(asking)
        assert lease.state == LeaseState.ENDED
        await upstream.talks[0].ended.wait()


async def test_unread_body_ends_with_its_caller():
    """It is written to its end on this side, and most of it is still here."""
    read = asyncio.Event()

    async def script(talk):
        await read.wait()
        await talk.end()

    async with served(reads_itself(script)) as (plane, upstream):
        lease = make_lease()
        asking = asyncio.create_task(ask(plane, lease, post(bytes(64 * MIB))))
        await until(lambda: upstream.talks and upstream.talks[0].request_head)
        await left(asking)
        assert lease.state == LeaseState.ENDED
        read.set()
        await upstream.talks[0].ended.wait()


async def test_answer_there_at_departure_ends_the_call():
    async with served() as (plane, _):
        lease = make_lease()
        with lease:
            async with plane.forward(post(), lease):
                (connection,) = plane._pool.connections
                await until(lambda: connection.state == State.IDLE)
        assert lease.state == LeaseState.ENDED
