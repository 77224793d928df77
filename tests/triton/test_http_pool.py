"""Connections to Triton that are kept for the next call, and those that must not be."""

import asyncio
import socket

import pytest

from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.triton.http_pool import Pool
from tests.cases import rows
from tests.fakes.http_triton import OK, ask, connections, pieces_of, post, says, served
from tests.frontends.http.listener import until

pytestmark = pytest.mark.both_loops

MIB = 2**20


async def test_concurrent_calls_have_and_keep_own_connections():
    async with served() as (plane, upstream):
        assert await asyncio.gather(*(ask(plane) for _ in range(8))) == [b"{}"] * 8
        assert connections(plane) == "<Pool: 8 connections, 8 idle>"
    assert len(upstream.talks) == 8


async def test_uploads_of_many_pieces_keep_the_connection_too():
    async with served() as (plane, upstream):
        for _ in range(20):
            body = pieces_of(*[bytes(MIB // 4)] * 8)
            await ask(plane, post(body, headers={"Content-Length": str(2 * MIB)}))
    assert len(upstream.talks) == 1


@rows(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        OK + OK,
    ],
)
async def test_ended_or_confused_connection_is_not_reused(raw):
    async with served(says(raw)) as (plane, upstream):
        for _ in range(2):
            assert await ask(plane) == b"{}"
            assert connections(plane).endswith(" 0 idle>")
        await upstream.talks[0].ended.wait()
    assert len(upstream.talks) == 2


async def test_connection_closed_by_triton_is_released():
    async with served() as (plane, upstream):
        await ask(plane)
        upstream.talks[0].writer.close()
        await until(lambda: connections(plane) == "<Pool: 0 connections, 0 idle>")


async def test_fresh_close_is_seen_before_writing():
    """The event loop has had no chance to notice: the request must go another way at once."""
    async with served() as (plane, upstream):
        await ask(plane)
        with upstream.talks[0].socket() as triton:
            triton.shutdown(socket.SHUT_WR)
        assert await ask(plane) == b"{}"
    assert (len(upstream.talks), len(upstream.requests)) == (2, 2)


async def test_an_answer_that_nobody_asked_for_is_nobodys():
    async with served() as (plane, upstream):
        await ask(plane)
        with upstream.talks[0].socket() as triton:
            triton.send(OK.replace(b"{}", b"[]"))
        assert await ask(plane) == b"{}"
        await upstream.talks[0].ended.wait()
    assert len(upstream.talks) == 2


async def test_only_long_idle_connections_are_closed():
    async with served() as (plane, upstream):
        plane._pool = Pool(
            Faults(Classifier(())), 10, answered_nothing=lambda _: None, keep_seconds=0.3
        )
        plane.connect(plane.host)
        await asyncio.gather(ask(plane), ask(plane))
        while not any(talk.ended.is_set() for talk in upstream.talks):
            await ask(plane)
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"
        await asyncio.gather(*(talk.ended.wait() for talk in upstream.talks))
        assert connections(plane) == "<Pool: 0 connections, 0 idle>"
