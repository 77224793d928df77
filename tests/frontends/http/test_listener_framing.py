"""Where a request ends is for the listener alone to say: others are refused, and closed."""

import asyncio
import json

import pytest

from tests.cases import case
from tests.frontends.http.listener import PATHS, PLANNED, Listener, both, head, request

GOOD = request(PLANNED, b"smuggled")


def raw(path: str, *fields: bytes, line: bytes | None = None, body: bytes = b"") -> bytes:
    first = line or b"POST %s HTTP/1.1" % path.encode()
    return b"\r\n".join([first, b"Host: x", *fields, b"", body])


# What stands in for the head's fields, and for the body.
VECTORS = {
    "two lengths": ([b"Content-Length: 2", b"Content-Length: 3"], b"{}"),
    "two equal lengths": ([b"Content-Length: 2", b"Content-Length: 2"], b"{}"),
    "a list of lengths": ([b"Content-Length: 2, 2"], b"{}"),
    "a length with a sign": ([b"Content-Length: +2"], b"{}"),
    "a negative length": ([b"Content-Length: -2"], b"{}"),
    "a length in hex": ([b"Content-Length: 0x2"], b"{}"),
    "a length with a space": ([b"Content-Length: 2 0"], b"{}"),
    "an empty length": ([b"Content-Length:"], b"{}"),
    "a length beyond 64 bits": ([b"Content-Length: 18446744073709551618"], b"{}"),
    "a length of 5000 digits": ([b"Content-Length: " + b"0" * 4999 + b"2"], b"{}"),
    "length and chunks": ([b"Content-Length: 4", b"Transfer-Encoding: chunked"], b"0\r\n\r\n"),
    "chunks and length": ([b"Transfer-Encoding: chunked", b"Content-Length: 4"], b"0\r\n\r\n"),
    "another coding": ([b"Transfer-Encoding: gzip, chunked"], b"0\r\n\r\n"),
    "a coding behind chunked": ([b"Transfer-Encoding: chunked, gzip"], b"0\r\n\r\n"),
    "identity": ([b"Transfer-Encoding: identity"], b"0\r\n\r\n"),
    "chunked twice": ([b"Transfer-Encoding: chunked"] * 2, b"0\r\n\r\n"),
    "chunked behind another coding": (
        [b"Transfer-Encoding: x", b"Transfer-Encoding: chunked"],
        b"0\r\n\r\n",
    ),
    "chunked behind identity": (
        [b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"],
        b"0\r\n\r\n",
    ),
    "chunked, chunked": ([b"Transfer-Encoding: chunked, chunked"], b"0\r\n\r\n"),
    "xchunked": ([b"Transfer-Encoding: xchunked"], b"0\r\n\r\n"),
    "an empty coding": ([b"Transfer-Encoding:"], b"0\r\n\r\n"),
    "a quoted coding": ([b'Transfer-Encoding: "chunked"'], b"0\r\n\r\n"),
    "a tab in the coding": ([b"Transfer-Encoding: \x0bchunked"], b"0\r\n\r\n"),
    "a space before the colon": ([b"Transfer-Encoding : chunked"], b"0\r\n\r\n"),
    "a tab before the colon": ([b"Content-Length\t: 2"], b"{}"),
    "a folded line": ([b"X: a", b" Content-Length: 2"], b"{}"),
    "a folded coding": ([b"Transfer-Encoding:", b" chunked"], b"0\r\n\r\n"),
    "a line that begins with a space": ([b" X: a"], b""),
    "a bare LF": ([b"X: a\nContent-Length: 2"], b"{}"),
    "a bare CR": ([b"X: a\rContent-Length: 2"], b"{}"),
    "CR CR LF": ([b"X: a\r"], b""),
    "a NUL": ([b"X: a\0b"], b""),
    "a control character": ([b"X: a\x01b"], b""),
    "no colon": ([b"X"], b""),
    "no name": ([b": a"], b""),
    "a name with a space": ([b"X Y: a"], b""),
    "a name beyond ASCII": (["Ü: a".encode()], b""),
    "two hosts": ([b"Host: y"], b""),
    "more than 128 fields": ([b"X: y"] * 128, b""),
}

CHUNKS = {
    "no size": b"\r\n{}\r\n0\r\n\r\n",
    "words": b"zz\r\n{}\r\n0\r\n\r\n",
    "a sign": b"+2\r\n{}\r\n0\r\n\r\n",
    "0x": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a space behind": b"2 \r\n{}\r\n0\r\n\r\n",
    "a space before": b" 2\r\n{}\r\n0\r\n\r\n",
    "an underscore": b"0_2\r\n{}\r\n0\r\n\r\n",
    "beyond 64 bits": b"10000000000000002\r\n{}\r\n0\r\n\r\n",
    "a bare LF": b"2\n{}\r\n0\r\n\r\n",
    "a bare CR": b"2\r{}\r\n0\r\n\r\n",
    "a bare LF behind the chunk": b"2\r\n{}\n0\r\n\r\n",
    "a chunk that is longer": b"2\r\n{}}\r\n0\r\n\r\n",
    "a bare LF at the end": b"2\r\n{}\r\n0\r\n\n",
    "a bare CR in an extension": b"2;a\rb\r\n{}\r\n0\r\n\r\n",
    "an endless extension": b"2;" + b"a" * 1000,
    "a folded trailer": b"2\r\n{}\r\n0\r\nx: y\r\n z\r\n\r\n",
    "a trailer with a bare LF": b"2\r\n{}\r\n0\r\nx: y\nz: w\r\n\r\n",
    "a trailer without a colon": b"2\r\n{}\r\n0\r\nx\r\n\r\n",
    "endless trailers": b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 5000 + b"\r\n",
}

LINES = {
    "a tab": b"POST\t%s HTTP/1.1",
    "a space at the end": b"POST %s HTTP/1.1 ",
    "a space in front": b" POST %s HTTP/1.1",
    "no version": b"POST %s",
    "HTTP/0.9": b"POST %s HTTP/0.9",
    "HTTP/2.0": b"POST %s HTTP/2.0",
    "HTTP/1.2": b"POST %s HTTP/1.2",
    "http/1.1": b"POST %s http/1.1",
    "ICE": b"SOURCE %s ICE/1.0",
    "RTSP": b"POST %s RTSP/1.0",
    "CONNECT": b"CONNECT x:80 HTTP/1.1%.0s",
    "no such method": b"POSTER %s HTTP/1.1",
    "a NUL": b"POST %s\0 HTTP/1.1",
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM%.0s",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01%.0s",
    "a word": b"junk%.0s",
    "a fragment": b"POST %s#a HTTP/1.1",
    "a fragment behind a host": b"POST http://x%s#a HTTP/1.1",
    "another scheme": b"POST ftp://x%s HTTP/1.1",
    "a line break in the target": b"POST /\nmodel:%s HTTP/1.1",
}


def served(listener: Listener) -> list[bytes]:
    """The bodies of all requests that came through."""
    upstream = [asked.body for asked in listener.upstream.requests if asked.is_whole]
    return upstream + listener.bodies


async def refused(listener: Listener, data: bytes, *, after: bytes = b"") -> None:
    """With a good request behind it in the same write, which must not be one."""
    caller = await listener.connect()
    if after:
        assert (await caller.ask(after)).status == 200
    before = len(served(listener))
    await caller.send(data + GOOD)
    found = await caller.answer()
    assert found.refusal == (400, "InvalidRequest")
    assert found.headers["connection"] == "close"
    caller.writer.write_eof()
    assert await caller.rest() == b""
    seen = served(listener)
    assert b"smuggled" not in seen
    assert len(seen) == before
    other = await listener.connect()
    assert (await other.ask(request(PLANNED))).status == 200


@both
async def test_malformed_head_is_refused(listener, path):
    for vector, (fields, body) in VECTORS.items():
        with case(vector):
            await refused(listener, raw(path, *fields, body=body))


@pytest.mark.parametrize("before", PATHS)
async def test_also_behind_a_good_request(listener, before):
    for vector in ("two lengths", "length and chunks", "a folded line"):
        with case(vector):
            fields, body = VECTORS[vector]
            await refused(listener, raw(PLANNED, *fields, body=body), after=request(before))


async def test_http_2_is_refused_by_its_name(listener, caller):
    """A client of gRPC sends this to the wrong port; what is behind the preface is not text."""
    await caller.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
    assert (await caller.answer()).json()["error"].startswith("this is HTTP/2; ")


@both
async def test_malformed_request_line_is_refused(listener, path):
    for vector, line in LINES.items():
        with case(vector):
            await refused(listener, raw(path, line=line % path.encode()))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"CONNECT x:80 HTTP/1.1", "CONNECT is not served: this is not a proxy"),
        (b"GET * HTTP/1.1", "this is not an HTTP request: its target is *"),
    ],
)
async def test_refusal_names_the_fault_of_the_line(listener, caller, line, why):
    await caller.send(raw(PLANNED, line=line))
    assert json.loads((await caller.answer()).body)["error"] == why


@pytest.mark.parametrize("pieces", [1, 2, 40])
async def test_head_with_lf_alone_is_refused_early(listener, caller, pieces):
    data = b"GET /ping HTTP/1.1\nHost: localhost\nAccept: */*\n\n"
    size = len(data) // pieces + 1
    for at in range(0, len(data), size):
        await caller.send(data[at : at + size])
        await asyncio.sleep(0)
    async with asyncio.timeout(20):  # of 30 that a head may take
        found = await caller.answer()
    assert found.refusal == (400, "InvalidRequest")


@both
async def test_host_is_needed_except_in_http_1_0(listener, path):
    new = b"POST %s HTTP/1.1\r\nContent-Length: 0\r\n\r\n" % path.encode()
    await refused(listener, new)
    caller = await listener.connect()
    old = b"POST %s HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}" % path.encode()
    assert (await caller.ask(old)).status == 200


@both
async def test_http_1_0_has_no_chunks(listener, path):
    line = b"POST %s HTTP/1.0" % path.encode()
    data = raw(path, b"Transfer-Encoding: chunked", line=line, body=b"0\r\n\r\n")
    await refused(listener, data)


@both
async def test_malformed_chunks_are_refused(listener, path):
    for vector, chunks in CHUNKS.items():
        with case(vector):
            await refused(listener, raw(path, b"Transfer-Encoding: chunked", body=chunks))


@both
@pytest.mark.parametrize("field", [b"X: " + b"a" * 20_000, b"\r\n".join([b"X: a"] * 4000)])
async def test_a_head_that_is_too_long_is_refused(listener, path, field):
    await refused(listener, raw(path, field, b"Content-Length: 0"))


async def test_endless_head_is_refused(listener, caller):
    await caller.send(head(PLANNED)[:-2] + b"X: " + b"a" * 20_000)
    assert (await caller.answer()).refusal == (400, "InvalidRequest")


@pytest.mark.parametrize("path", [PLANNED, "/v2/models/m/infer"])
async def test_what_goes_on_to_triton_is_framed_anew(listener, caller, path):
    fields = (b"Transfer-Encoding: Chunked", b"Connection: X-Hop, TE", b"X-Hop: 1", b"TE: trailers")
    chunks = b"2;ext=1\r\n{}\r\n0\r\nX-Late: 9\r\n\r\n"
    assert (await caller.ask(raw(path, *fields, body=chunks))).status == 200
    assert (await caller.ask(raw(path, b"content-length: 002", body=b"{}"))).status == 200
    chunked, sized = listener.upstream.requests
    assert (chunked.body, sized.body) == (b"{}", b"{}")
    lines = chunked.head.lower().split(b"\r\n")
    assert [line for line in lines if b"length" in line or b"encoding" in line] == [
        b"transfer-encoding: chunked"
    ]
    assert not [line for line in lines if line.startswith((b"x-hop", b"te:", b"connection"))]
    assert sized.head.lower().count(b"content-length: 2\r\n") == 1


@pytest.mark.parametrize(
    "target",
    ["*", "http://x:99999/models", "http://[/models", "http:///models", "http://:80/models"],
)
async def test_a_target_that_is_no_url_is_refused(listener, caller, target, caplog):
    assert (await caller.ask(request(target))).refusal == (400, "InvalidRequest")
    assert await caller.rest() == b""
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
