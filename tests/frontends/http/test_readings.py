"""Where a request ends has one reading: ours is h11's.

The same bytes are sent in several cuts. What is served is what h11 reads, in its order and with its
bodies; what either refuses is the last that is answered. For minutes: make nightly, fuzz_http.
"""

import asyncio
import hashlib
import json
import os
import random
import re
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import pytest
import uvloop

from adapter.frontends.http import answers
from adapter.frontends.http.connection import Request
from tests.fakes.http_triton import Talk
from tests.frontends.http.listener import (
    HANDLED,
    LONG,
    MAX_BODY,
    PLANNED,
    Answer,
    Caller,
    Listener,
    both,
    head,
    opened,
    request,
    turns,
    until,
)
from tests.frontends.http.readings import Read, Reading, Stream, Streams, read_by_h11

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
SECONDS = 60  # for one connection
# of a request that Triton gets, whatever the client's looked like
UPSTREAM_HEAD = re.compile(
    rb"POST /v2/models/m/infer HTTP/1\.1\r\n([!-9;-~]+: [\t -~\x80-\xff]*\r\n)+\r\n"
)


def said_of(method: str, target: str, body: bytes) -> dict[str, str]:
    """What a request is answered with: which one it was. Triton has its own name for the path."""
    return {"method": method, "target": target, "body": hashlib.sha256(body).hexdigest()}


class Served:
    """A listener whose two sides answer each request with what reached them."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.upstream_heads: list[bytes] = []
        listener.handle = self._handle  # type: ignore[method-assign]
        listener.upstream.script = self._triton

    async def _triton(self, talk: Talk) -> None:
        asked = self._listener.upstream.requests.pop()
        self.upstream_heads.append(asked.head)
        if not asked.is_whole:
            return
        body = json.dumps(said_of("POST", "inference", asked.body)).encode()
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async def _handle(self, asked: Request) -> answers.Answer | None:
        body = await asked.read_body(MAX_BODY)
        return answers.answer_json(said_of(asked.method, asked.raw_path, body))

    async def answers(self, pieces: list[bytes], methods: list[str]) -> list[Answer]:
        """To all of it, until the connection ends. The methods say which have no body."""
        caller = await self._listener.connect()
        reading = asyncio.create_task(caller.rest())
        with suppress(ConnectionError, RuntimeError):  # uvloop's, where it has ended
            for piece in pieces:
                await caller.send(piece)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            caller.writer.write_eof()
        async with asyncio.timeout(SECONDS):
            data = await reading
            caller.writer.close()
            await self._listener.until_lost()
        self._listener.callers.remove(caller)
        return list(parsed(data, methods))


def parsed(data: bytes, methods: list[str]):
    """Answers, of which each has a length."""
    left = [*methods, *["HEAD"] * 100]  # one that broke off may have been any
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end, f"half an answer: {head!r}"
        first, *lines = head.decode().split("\r\n")
        version, status, *_ = first.split(" ")
        assert version in {"HTTP/1.1", "HTTP/1.0"}, first
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        assert len(headers) == len(lines), f"a header twice: {head!r}"
        if status == "100":
            continue
        # a refusal may stand where the answer to a HEAD would, and has a body
        is_bare = left.pop(0) == "HEAD" and not data.startswith(b"{")
        size = 0 if is_bare else int(headers["content-length"])
        assert len(data) >= size, f"half a body: {head!r}"
        yield Answer(int(status), headers, data[:size])
        data = data[size:]


def is_answer_to(found: Answer, asked: Read) -> bool:
    """The method and the body tell, of a body that no other request has."""
    target = found.json()["target"]
    if target == "inference":
        target = asked.target if "/m/" in asked.target else ""
    said = said_of(asked.method, found.json()["target"], asked.body)
    return found.json() == said and target == asked.target


@dataclass(frozen=True)
class Judged:
    whole: int
    refused: int


def judge(stream: Stream, reading: Reading, answers: list[Answer]) -> Judged:
    """AssertionError where two readings of the same bytes show."""
    assert len(answers) <= len(reading.requests) + 1, "more was answered than asked"
    for number, found in enumerate(answers):
        is_last = number + 1 == len(answers)
        if not is_last:
            assert found.headers.get("connection") != "close", "answered behind a last answer"
        if number == len(reading.requests):
            assert 400 <= found.status < 500, "what is no request was served"
            assert reading.verdict in {"refused", "cut"}, "answered behind the end"
            continue
        asked = reading.requests[number]
        if found.status == 200:
            if asked.method != "HEAD":
                assert is_answer_to(found, asked), f"another request was served: {asked}"
        elif asked.body and found.status != 404:
            assert 400 <= found.status < 500, found
            is_about_its_coding = "Content-Encoding" in found.json()["error"]  # and whole
            assert is_last or is_about_its_coding, "served on behind a refusal"
            assert not stream.is_ordinary, "refused"
    if stream.is_ordinary and "connection" not in answers[-1].headers:
        assert len(answers) == len(reading.requests), "not all was answered"
    refused = sum(found.status >= 400 for found in answers)
    return Judged(len(answers) - refused, refused)


async def play(made: Streams, streams: int) -> Counter[str]:
    """So many streams, each in several cuts."""
    seen = Counter[str]()
    async with opened(limits=LONG) as listener:
        served = Served(listener)
        for number in range(streams):
            stream = made.odd() if number % 3 else made.ordinary()
            reading = read_by_h11(stream.strictly)
            seen[reading.verdict] += 1
            for pieces in made.cuts(stream.data):
                found = await _judged(served, stream, reading, pieces)
                seen["answered"] += found.whole
                seen["turned down"] += found.refused
    for upstream_head in served.upstream_heads:
        assert UPSTREAM_HEAD.fullmatch(upstream_head), upstream_head
        names = [line.partition(b":")[0] for line in upstream_head.lower().split(b"\r\n")]
        assert names.count(b"host") == 1, upstream_head
        assert names.count(b"content-length") + names.count(b"transfer-encoding") == 1, (
            upstream_head
        )
    return seen


async def _judged(served: Served, stream: Stream, reading: Reading, pieces: list[bytes]) -> Judged:
    answers: list[Answer] = []
    try:
        answers = await served.answers(pieces, [one.method for one in reading.requests])
        return judge(stream, reading, answers)
    except (AssertionError, TimeoutError) as error:
        said = [(one.status, one.body[:200]) for one in answers]
        cuts = [len(one) for one in pieces][:100]
        error.add_note(f"{cuts} of\n{stream.data!r:.3000}\nanswered {said}\nread {reading!r:.3000}")
        raise


def test_served_requests_match_h11_in_any_cut(caplog: pytest.LogCaptureFixture) -> None:
    sys.stdout.write(f"seed {SEED}\n")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(play(Streams(random.Random(SEED)), 60))
    sys.stdout.write(f"{dict(seen)}\n")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert min(seen[each] for each in ("open", "refused", "answered", "turned down")) > 0


@pytest.mark.parametrize("behind", [b"zz\r\n", b"2\r\n{}X\r\n", b"0\r\nX Y: z\r\n\r\n"])
@both
async def test_malformed_body_is_refused_at_once(
    listener: Listener, caller: Caller, path, behind
) -> None:
    """However many reads come behind that: nobody waits for the rest of such a body."""
    await caller.send(head(path, "Transfer-Encoding: chunked") + b"2\r\n{")
    await until(lambda: not any(one.is_idle() for one in listener.server._connections))
    noise = behind + b"noise" * 20
    for each in [b"}\r\n", *(noise[at : at + 1] for at in range(len(noise)))]:
        await caller.send(each)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    async with asyncio.timeout(SECONDS):
        assert (await caller.answer()).refusal == (400, "InvalidRequest")
        assert await caller.rest() == b""
    assert listener.whole_requests() == []


@pytest.mark.parametrize("behind", [b"zz\r\n", b"0\r\n X\r\n\r\n", b"0\r\n\n"])
@both
async def test_malformed_chunk_end_is_refused_at_once(
    listener: Listener, caller: Caller, path, behind
) -> None:
    """Who reads such a body is woken by the chunk's end, for nothing, before the error."""
    await caller.send(head(path, "Transfer-Encoding: chunked") + b"2\r\n{}")
    await until(lambda: not any(one.is_idle() for one in listener.server._connections))
    await turns(50)
    await caller.send(b"\r\n" + behind)
    async with asyncio.timeout(SECONDS):
        assert (await caller.answer()).refusal == (400, "InvalidRequest")
        assert await caller.rest() == b""


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "first", [b"", request(PLANNED), request(HANDLED)], ids=["", "planned", "handled"]
)
async def test_half_closed_chunked_requests_get_all_answers(
    listener: Listener, caller: Caller, count, first
) -> None:
    chunked = head(PLANNED, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
    await caller.send(first + chunked * count + head(HANDLED, method="GET"))
    caller.writer.write_eof()
    async with asyncio.timeout(SECONDS):
        found = list(parsed(await caller.rest(), []))
    assert [one.status for one in found] == [200] * (bool(first) + count + 1)


@pytest.mark.parametrize("kind", ["h2c", "websocket"])
@both
async def test_body_of_upgrade_request_is_not_skipped(listener: Listener, path, kind) -> None:
    """It is answered as though it asked for none; what comes behind is answered or not served."""
    upgrade = ("Connection: Upgrade", f"Upgrade: {kind}")
    data = request(path, b"{}", *upgrade) + head("/app/1", method="GET") + request(PLANNED)
    served = Served(listener)
    for at in range(1 if kind == "h2c" else 2, len(data), 2):
        found = await served.answers([data[:at], data[at:]], [])
        assert found[0].status == 200
        assert [one.json()["target"] for one in found[1:]] in ([], ["/app/1", "inference"])
