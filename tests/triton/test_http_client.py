"""Requests to Triton's HTTP port and its answers, over a Triton that is a script of bytes."""

import asyncio
import gc
from contextlib import suppress

import pytest

from adapter.core.calls import MAX_LINE_BYTES, V2Call
from adapter.errors import BackendUnavailable, InferenceFailed, InvalidRequest
from tests.cases import rows
from tests.fakes.http_triton import (
    OK,
    ask,
    connections,
    pieces_of,
    post,
    reads_itself,
    says,
    served,
)

MIB = 2**20


# -- requests -----------------------------------------------------------------------------------


async def test_a_get_has_no_body_and_no_length():
    async with served() as (plane, upstream):
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        assert await ask(plane, V2Call("GET", "/models/m", headers)) == b"{}"
    assert upstream.requests[0].head.startswith(b"GET /v2/models/m HTTP/1.1\r\n")
    assert b"content-type" not in upstream.requests[0].head.lower()
    assert b"Content-Length" not in upstream.requests[0].head


@pytest.mark.parametrize("value", ["a\r\nX-B: 2", "a\nb", "a\rb", "a\0b"])
async def test_a_header_that_could_end_early_is_refused(value):
    async with served() as (plane, upstream):
        with pytest.raises(InvalidRequest):
            await ask(plane, post(headers={"X-A": value}))
    assert upstream.talks == []


async def test_unreadable_request_line_breaks_no_connection():
    async with served() as (plane, upstream):
        await ask(plane, post())
        with pytest.raises(InvalidRequest, match="8189"):
            await ask(plane, post(headers={"X-A": "a" * (MAX_LINE_BYTES - 4)}))
        await ask(plane, post(headers={"X-A": "a" * (MAX_LINE_BYTES - 5), "X-B": "b" * 8000}))
    assert len(upstream.talks) == 1


async def test_header_bytes_other_than_utf8_pass_unchanged():
    value = b"\xe4".decode("utf-8", "surrogateescape")
    async with served() as (plane, upstream):
        await ask(plane, post(headers={"X-A": value}))
    assert b"\r\nX-A: \xe4\r\n" in upstream.requests[0].head


@pytest.mark.parametrize("raw", [OK, b"no answer"], ids=["answered", "broken off"])
async def test_body_is_not_kept_for_garbage_collection(raw):
    freed = []

    class Body(bytes):
        def __del__(self):
            freed.append(self)

    call = post(Body(b"{}"))
    gc.disable()
    try:
        async with served(says(raw, closes=raw is not OK)) as (plane, _):
            with suppress(BackendUnavailable):
                await ask(plane, call)
            del call
            assert freed
    finally:
        gc.enable()


async def test_empty_piece_does_not_end_chunked_body():
    async with served() as (plane, upstream):
        await ask(plane, post(pieces_of(b"", b"ab", b"", b"c" * MIB, b"")))
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"
    assert (upstream.requests[0].body, upstream.requests[0].is_whole) == (b"ab" + b"c" * MIB, True)


@pytest.mark.parametrize("pieces", [(b"abc", b"d"), (b"abcd", b"ef")], ids=["short", "long"])
async def test_body_of_other_length_never_is_a_request(pieces):
    async with served() as (plane, upstream):
        with pytest.raises(InvalidRequest, match="5 bytes"):
            await ask(plane, post(pieces_of(*pieces), headers={"Content-Length": "5"}))
        await upstream.talks[0].ended.wait()
        assert connections(plane) == "<Pool: 0 connections, 0 idle>"
    assert [request.is_whole for request in upstream.requests] == [False]


@pytest.mark.parametrize("status", [200, 500])
async def test_early_answer_is_the_answer(status):
    never = asyncio.Event()
    is_left = False

    async def body():
        nonlocal is_left
        try:
            yield b"abc"
            await never.wait()
        finally:
            is_left = True

    script = reads_itself(says(b"HTTP/1.1 %d X\r\nContent-Length: 1\r\n\r\nx" % status))
    async with served(script) as (plane, upstream):
        if status == 200:
            assert await ask(plane, post(body())) == b"x"
        else:
            with pytest.raises(InferenceFailed, match=r"^x$"):
                await ask(plane, post(body()))
        await upstream.talks[0].ended.wait()
        assert connections(plane) == "<Pool: 0 connections, 0 idle>"
    assert is_left


async def test_answered_body_is_taken_no_further():
    given, go_on = 0, asyncio.Event()

    async def body():
        nonlocal given
        while True:
            yield b"abc"
            given += 1
            await go_on.wait()

    script = reads_itself(says(OK))
    async with served(script) as (plane, _), plane.forward(post(body()), None) as answer:
        assert await answer.read() == b"{}"
        go_on.set()
        for _ in range(50):
            await asyncio.sleep(0)
        assert given == 1


# -- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [204, 304])
async def test_some_statuses_have_no_body(status):
    call = V2Call("GET", "/health/live", {}, is_probe=True)
    async with served(says(b"HTTP/1.1 %d X\r\n\r\n" % status)) as (plane, _):
        async with plane.forward(call, None) as answer:
            assert (answer.status, await answer.read()) == (status, b"")
        assert connections(plane) == "<Pool: 1 connections, 1 idle>"


@rows(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length : 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}X\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"\x16\x03\x01 what is this",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * MIB,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: " + b"x" * MIB,
    ],
)
async def test_invalid_answer_ends_call_and_connection(raw):
    async with served(says(raw)) as (plane, upstream):
        with pytest.raises(BackendUnavailable) as caught:
            await ask(plane)
        assert caught.value.delivered
        await upstream.talks[0].ended.wait()
        assert connections(plane) == "<Pool: 0 connections, 0 idle>"
    assert len(upstream.requests) == 1
