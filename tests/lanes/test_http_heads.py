"""Heads of requests that came before are not parsed again: they mean the same, and no more."""

import pytest

from adapter.errors import InvalidRequest
from adapter.frontends.http_lane.head import Heads
from tests.lanes.http_door import LANE, head, opened, request


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
