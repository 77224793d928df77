"""How calls to Triton end early: connections lost, answers too late, callers that give up."""

import asyncio
import socket

import pytest

from adapter.errors import BackendTimeout, BackendUnavailable
from tests.cases import rows
from tests.fakes.http_triton import (
    ask,
    pieces_of,
    post,
    reads_itself,
    says,
    served,
)
from tests.frontends.http.listener import until

pytestmark = pytest.mark.both_loops

MIB = 2**20
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


# -- lost ---------------------------------------------------------------------------------------


async def test_reset_unbounded_answer_is_not_whole():
    async def script(talk):
        await talk.say(b"HTTP/1.1 200 OK\r\n\r\nabc")
        await go_on.wait()
        with talk.socket() as triton:
            triton.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
        talk.writer.transport.abort()

    go_on = asyncio.Event()
    async with served(script) as (plane, _), plane.forward(post(), None) as answer:
        go_on.set()
        with pytest.raises(BackendUnavailable):
            await answer.read()


# -- late ---------------------------------------------------------------------------------------


@rows("first", [b"", CHUNKED, CHUNKED + b"2\r\nab\r\n"])
@rows("is_stream", [False, True])
async def test_late_answer_is_a_timeout(first, is_stream):
    async def script(talk):
        await talk.say(first)
        await talk.end()

    async with served(script, seconds=0.1) as (plane, upstream):
        with pytest.raises(BackendTimeout, match=r"0\.1 s"):
            await ask(plane, post(is_stream=is_stream))
        await until(lambda: upstream.talks)
        await upstream.talks[0].ended.wait()


async def test_untaken_body_is_a_timeout():
    released = asyncio.Event()

    async def script(talk):
        await released.wait()
        await talk.end()

    async with served(reads_itself(script), seconds=0.2) as (plane, upstream):
        with pytest.raises(BackendTimeout):
            await ask(plane, post(pieces_of(*[bytes(MIB)] * 64)))
        released.set()
        await until(lambda: upstream.talks)
        await upstream.talks[0].ended.wait()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.slow
async def test_only_streams_may_last_for_ever(is_stream):
    async def script(talk):
        await talk.say(CHUNKED)
        for _ in range(10):
            await talk.say(b"2\r\nab\r\n")
            await asyncio.wait([asyncio.create_task(talk.ended.wait())], timeout=0.2)
        await talk.say(b"0\r\n\r\n")

    async with served(script, seconds=1.5) as (plane, _):
        if is_stream:
            assert await ask(plane, post(is_stream=True)) == b"ab" * 10
        else:
            with pytest.raises(BackendTimeout):
                await ask(plane)


# -- given up -----------------------------------------------------------------------------------


async def endless():
    while True:
        yield bytes(1000)
        await asyncio.sleep(0)


@pytest.mark.parametrize("body", [b"{}", None], ids=["whole", "stream"])
async def test_a_cancelled_call_closes_its_connection(body):
    reached = asyncio.Event()

    async def script(talk):
        reached.set()
        await talk.end()

    async with served(reads_itself(script)) as (plane, upstream):
        asking = asyncio.create_task(ask(plane, post(body or endless())))
        await reached.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await upstream.talks[0].ended.wait()
        assert len(asyncio.all_tasks()) <= 2  # this one, and Triton's


async def test_half_read_answer_closes_the_connection():
    async with served(says(CHUNKED + b"2\r\nab\r\n")) as (plane, upstream):
        async with plane.forward(post(), None) as answer:
            assert answer.status == 200
        await upstream.talks[0].ended.wait()
    assert len(upstream.requests) == 1
