"""Heads that came before are not parsed again: they mean the same, and no more than that."""

import asyncio

import pytest

from adapter.dataplane import http1
from adapter.errors import InvalidRequest
from adapter.frontends.http_lane.head import Heads
from tests.lanes.http_door import LANE, head, opened, request, until
from tests.lanes.http_upstream import OK, ask, connections, says, served


def test_a_head_that_came_whole_is_found_again_whatever_lies_behind_it():
    heads, raw = Heads(), head(LANE, "Content-Length: 2", "X: y")
    first, rest = heads.read(None, raw + b"{}" + raw)
    assert (first.is_over, rest) == (True, b"{}" + raw)
    again, rest = heads.read(None, raw + b"[]")
    assert again is first
    assert rest == b"[]"
    assert heads.read(None, head(LANE, "Content-Length: 2", "X: z"))[0] is not first


def test_a_head_that_came_in_pieces_is_known_as_well():
    heads, raw = Heads(), head(LANE, "X: y")
    begun, rest = heads.read(None, raw[:20])
    assert (begun.is_over, rest) == (False, b"")
    assert heads.read(begun, raw[20:] + b"more") == (begun, b"more")
    assert heads.read(None, raw) == (begun, b"")


def test_what_is_refused_is_refused_each_time():
    heads = Heads()
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            heads.read(None, b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n")  # no Host


def test_so_many_heads_are_kept_and_no_long_ones():
    heads = Heads()
    for number in range(1000):
        heads.read(None, head(LANE, f"X: {number}"))
        assert len(heads._known) <= 256
    heads = Heads()
    heads.read(None, head(LANE, f"X: {'y' * 3000}"))
    assert not heads._known


async def test_one_head_with_many_bodies_asks_for_each_of_them():
    async with opened() as door:
        caller = await door.connect()
        bodies = [b"[%d]" % number for number in range(10, 30)]
        for body in bodies:
            assert (await caller.ask(request(LANE, body))).status == 200
        assert [asked.body for asked in door.upstream.requests] == bodies


@pytest.fixture
def none_known():
    http1._KNOWN.clear()
    yield http1._KNOWN
    http1._KNOWN.clear()


async def test_one_head_of_triton_with_many_bodies_brings_each_of_them(none_known):
    bodies = [b"[%d]" % number for number in range(10, 30)]
    left = list(bodies)

    async def script(talk):
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n" + left.pop(0))

    async with served(script) as (plane, _):
        assert [await ask(plane) for _ in bodies] == bodies
        assert len(none_known) == 1
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"


@pytest.mark.parametrize("behind", [b"H", OK])
async def test_a_known_answer_with_something_behind_it_ends_the_connection(none_known, behind):
    left = [OK, OK, OK + behind, OK]

    async def script(talk):
        await talk.say(left.pop(0))

    async with served(script) as (plane, upstream):
        assert [await ask(plane) for _ in range(4)] == [b"{}"] * 4
        assert len(upstream.talks) == 2


async def test_a_known_head_whose_body_comes_later_is_waited_for(none_known):
    gate, first = asyncio.Event(), True

    async def script(talk):
        nonlocal first
        if first:
            first = False
            await talk.say(OK)
            return
        await talk.say(OK[:-1])
        await gate.wait()
        await talk.say(OK[-1:])

    async with served(script) as (plane, _):
        assert await ask(plane) == b"{}"
        asking = asyncio.create_task(ask(plane))
        await until(lambda: any(connection._pieces for connection in plane._pool._open))
        gate.set()
        assert await asking == b"{}"


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    ],
)
async def test_only_what_a_head_says_by_itself_is_kept(none_known, raw):
    async with served(says(raw)) as (plane, _):
        assert [await ask(plane) for _ in range(3)] == [b"{}"] * 3
    assert not none_known


async def test_answers_with_ever_other_lengths_are_forgotten_again(none_known):
    sizes = iter(range(2, 2000))

    async def script(talk):
        size = next(sizes)
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))

    async with served(script) as (plane, _):
        for size in range(2, 1200):
            assert len(await ask(plane)) == size
            assert len(none_known) <= 1024
