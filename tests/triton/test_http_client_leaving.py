"""Callers that leave, or had no answer in time: what Triton has of a call stays with Triton."""

import asyncio
import resource
from dataclasses import replace

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.errors import BackendTimeout, NotTaken, StubDied
from adapter.triton.connection import State
from tests.fakes.http_triton import OK, connections, post, reads_itself, served
from tests.fakes.lease import FakeLease, LeaseState
from tests.frontends.http.listener import until

MIB = 2**20
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
SECONDS = 10


class Failures:
    """What leases ended with."""

    def __init__(self) -> None:
        self._leases: list[FakeLease] = []

    @property
    def seen(self) -> list[BaseException]:
        return [error for lease in self._leases for error in lease.failures]

    def lease(self) -> FakeLease:
        record = ModelRecord(ModelId("m"), TritonName("m"), ModelSource("/m"), LoadedFor.PLATFORM)
        self._leases.append(FakeLease(record))
        return self._leases[-1]


@pytest.fixture
def failures():
    return Failures()


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
async def test_abandoned_call_lasts_until_its_answer(failures, said, is_stream):
    begun, gate = asyncio.Event(), asyncio.Event()
    rest = (CHUNKED + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")[len(said) :]

    async def script(talk):
        await talk.say(said)
        begun.set()
        await gate.wait()
        await talk.say(rest)

    async with served(script) as (plane, upstream):
        lease = failures.lease()
        asking = asyncio.create_task(ask(plane, lease, post(is_stream=is_stream)))
        await begun.wait()
        await left(asking)
        assert (lease.state, lease.record.usage.in_flight) == (LeaseState.ABANDONED, 1)
        assert connections(plane) == "<Pool: 1 connections, 0 idle>"
        gate.set()
        await until(lambda: lease.state == LeaseState.ENDED)
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"
        assert not upstream.talks[0].ended.is_set()
    assert (lease.record.usage.in_flight, lease.record.usage.abandoned, failures.seen) == (0, 0, [])


async def test_oldest_abandoned_call_gives_its_connection_to_another(failures):
    """Triton answers none of them for now, and each has a descriptor of the adapter."""
    gate = asyncio.Event()

    async def script(talk):
        await gate.wait()
        await talk.say(OK)

    async with served(script, max_connections=2) as (plane, upstream):
        leases = []
        for count in (1, 2, 3):
            lease = failures.lease()
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
        assert await ask(plane, failures.lease()) == b"{}"
    assert failures.seen == [], "that its connection was closed says nothing of Triton"


@pytest.mark.parametrize("said", [b"", CHUNKED])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_late_call_lasts_until_its_answer(failures, said, is_stream):
    gate = asyncio.Event()

    async def script(talk):
        await talk.say(said)
        await gate.wait()
        await talk.say((CHUNKED + b"0\r\n\r\n")[len(said) :])

    async with served(script, seconds=0.1) as (plane, upstream):
        lease = failures.lease()
        with pytest.raises(BackendTimeout, match=r"0\.1 s"):
            await ask(plane, lease, post(is_stream=is_stream))
        assert lease.state == LeaseState.ABANDONED
        passed = asyncio.get_running_loop().time() + 0.3
        await until(lambda: asyncio.get_running_loop().time() > passed)
        assert not upstream.talks[0].ended.is_set()
        gate.set()
        await until(lambda: lease.state == LeaseState.ENDED)
        (connection,) = plane._pool.connections
        connection.seconds = SECONDS
        assert await ask(plane, failures.lease()) == b""  # the connection is as good as new
        assert len(upstream.talks) == 1


async def test_an_answer_that_nobody_wants_takes_no_memory(failures):
    begun = asyncio.Event()
    size, piece = 128 * MIB, bytes(MIB)

    async def script(talk):
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // len(piece)):
            begun.set()
            await talk.say(piece)

    async with served(script, seconds=60) as (plane, _):
        lease = failures.lease()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with lease:
            async with plane.forward(post(), lease):
                await begun.wait()
        assert lease.state == LeaseState.ABANDONED
        await until(lambda: lease.state == LeaseState.ENDED)
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def test_what_triton_says_late_is_heard(failures):
    gate = asyncio.Event()
    text = b'{"error":"Stub process \'m_0_0\' is not healthy."}'

    async def script(talk):
        await gate.wait()
        head = b"HTTP/1.1 500 X\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
        await talk.say(head % len(text) + text)

    async with served(script) as (plane, upstream):
        lease = failures.lease()
        asking = asyncio.create_task(ask(plane, lease))
        await upstream.asked(1)
        await left(asking)
        gate.set()
        await until(lambda: lease.state == LeaseState.ENDED)
    assert [type(error) for error in failures.seen] == [StubDied]


async def test_process_end_waits_for_nothing(failures):
    async def script(talk):
        await talk.end()

    async with served(script) as (plane, upstream), asyncio.timeout(SECONDS):
        lease = failures.lease()
        asking = asyncio.create_task(ask(plane, lease))
        await upstream.asked(1)
        await left(asking)
        await plane.close()
        assert lease.state == LeaseState.ENDED


async def test_incomplete_request_ends_with_its_caller(failures):
    begun = asyncio.Event()

    async def body():
        yield b"{"
        begun.set()
        await asyncio.Event().wait()

    async with served(reads_itself(lambda talk: talk.end())) as (plane, upstream):
        lease = failures.lease()
        headers = {"Content-Length": "2"}
        asking = asyncio.create_task(ask(plane, lease, post(body(), headers=headers)))
        await begun.wait()
        await left(asking)
        assert lease.state == LeaseState.ENDED
        await upstream.talks[0].ended.wait()


async def test_unread_body_ends_with_its_caller(failures):
    """It is written to its end on this side, and most of it is still here."""
    read = asyncio.Event()

    async def script(talk):
        await read.wait()
        await talk.end()

    async with served(reads_itself(script)) as (plane, upstream):
        lease = failures.lease()
        asking = asyncio.create_task(ask(plane, lease, post(bytes(64 * MIB))))
        await until(lambda: upstream.talks and upstream.talks[0].request_head)
        await left(asking)
        assert lease.state == LeaseState.ENDED
        read.set()
        await upstream.talks[0].ended.wait()


async def test_answer_there_at_departure_ends_the_call(failures):
    async with served() as (plane, _):
        lease = failures.lease()
        with lease:
            async with plane.forward(post(), lease):
                (connection,) = plane._pool.connections
                await until(lambda: connection.state == State.IDLE)
        assert lease.state == LeaseState.ENDED


async def test_unread_stream_is_cut_and_read_out(failures):
    event, cut, sent = bytes(2**18), asyncio.Event(), asyncio.Event()
    chunk = b"%x\r\n%b\r\n" % (len(event), event)

    async def script(talk):
        await talk.say(CHUNKED)
        for _ in range(64):
            await talk.say(chunk)
        await talk.say(b"0\r\n\r\n")
        sent.set()

    async with served(script, unread_bytes=2**20) as (plane, _):
        lease = failures.lease()
        call = replace(post(is_stream=True), on_cut=cut.set)
        with lease:
            async with plane.forward(call, lease) as answer:
                chunks = answer.chunks()
                await anext(chunks)
                async with asyncio.timeout(30):
                    await cut.wait()
                with pytest.raises(ConnectionResetError) as raised:
                    await anext(chunks)
        assert isinstance(raised.value.__cause__, NotTaken)
        await sent.wait()
        await until(lambda: lease.state == LeaseState.ENDED)
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"
