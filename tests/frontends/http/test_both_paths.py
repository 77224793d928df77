"""On one connection requests are planned or go to handlers in any order: each has its own answer.

They are sent behind one another and cut anywhere. For minutes: tests/nightly/test_fuzz_http.py.
"""

import asyncio
import itertools
import json
import logging
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import pytest
import uvloop

from adapter.frontends.bodies import Limits
from adapter.frontends.http import answers
from adapter.frontends.http.connection import Request
from tests.fakes.http_triton import Talk
from tests.frontends.http.listener import (
    HANDLED,
    MAX_BODY,
    PLANNED,
    Answer,
    Caller,
    Listener,
    head,
    opened,
    request,
)

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
PATIENT = Limits(idle=60, head=60, body=60, answer=60, gone=60, linger=60)
SECONDS = 60  # for all answers of one connection
V2 = "/v2/models/m/infer"


@dataclass(frozen=True)
class Asked:
    """`said`: of the answer's body what tells that it is the one to this request."""

    data: bytes
    status: int
    said: dict[str, object]
    is_head: bool = False


class Ways:
    """`kinds` that there are; a request of each is unlike all others."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._number = 0
        self.kinds = {
            "plain": self._plain,
            "fails at Triton": self._fails,
            "large": self._large,
            "large answer": self._large_answer,
            "get": self._get,
            "head": self._head,
            "of no model": self._unknown,
            "no body": self._empty,
            "asks before": self._expects,
            "to the application": self._other,
            "not quite plain": self._odd,
        }

    def of_one_connection(self) -> list[Asked]:
        """Chunked ones at the end."""
        count = self._chance.randint(2, 12)
        found = [self._chance.choice(list(self.kinds.values()))() for _ in range(count)]
        if self._chance.random() < 0.3:
            found.append(self._chunked())
            found += [self._chance.choice((self._plain, self._get, self._chunked))()]
        return found

    def cut(self, data: bytes) -> list[bytes]:
        size = len(data)
        count = self._chance.choice((0, 1, 3, 10, 40))
        ats = [0, *sorted({self._chance.randrange(1, size) for _ in range(count)}), size]
        return [data[a:b] for a, b in itertools.pairwise(ats)]

    def _body(self, **more: object) -> tuple[bytes, dict[str, object]]:
        self._number += 1
        return json.dumps({"number": self._number} | more).encode(), {"number": self._number}

    def _path(self) -> str:
        return self._chance.choice((PLANNED, V2))

    def _plain(self) -> Asked:
        body, said = self._body()
        return Asked(request(self._path(), body), 200, said | {"by": "Triton"})

    def _fails(self) -> Asked:
        body, _ = self._body(fails=True)
        told = f"number {self._number}"
        return Asked(request(self._path(), body), 400, {"told": told})

    def _large(self) -> Asked:
        size = self._chance.choice((2**16, 2**18, 2**18 + 1, 600_000))
        body, said = self._body(filled="y" * size)
        return Asked(request(self._path(), body), 200, said | {"by": "Triton"})

    def _large_answer(self) -> Asked:
        size = self._chance.choice((2**16, 2**20, 2**20 + 100))
        body, said = self._body(answered=size)
        return Asked(request(self._path(), body), 200, said | {"by": "Triton"})

    def _get(self) -> Asked:
        self._number += 1
        said = {"number": None, "by": f"/app/{self._number}"}
        return Asked(head(f"/app/{self._number}", method="GET"), 200, said)

    def _head(self) -> Asked:
        return Asked(head(HANDLED, method="HEAD"), 200, {}, is_head=True)

    def _unknown(self) -> Asked:
        body, _ = self._body()
        name = f"nobody{self._number}"
        return Asked(request(f"/models/{name}/invoke", body), 404, {"model_name": name})

    def _empty(self) -> Asked:
        return Asked(request(PLANNED, b""), 400, {"code": "InvalidRequest"})

    def _expects(self) -> Asked:
        body, said = self._body()
        data = request(self._path(), body, "Expect: 100-continue")
        return Asked(data, 200, said | {"by": "Triton"})

    def _other(self) -> Asked:
        body, said = self._body()
        return Asked(request(HANDLED, body), 200, said | {"by": HANDLED})

    def _odd(self) -> Asked:
        body, said = self._body()
        fields = ("Connection: keep-alive, x", "TE: trailers", "Keep-Alive: timeout=5")
        data = request(self._path(), body, self._chance.choice(fields))
        return Asked(data, 200, said | {"by": "Triton"})

    def _chunked(self) -> Asked:
        body, said = self._body()
        at = self._chance.randrange(1, len(body))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (body[:at], body[at:]))
        data = head(self._path(), "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n"
        return Asked(data, 200, said | {"by": "Triton"})


def scripted(listener: Listener) -> None:
    """Both sides say who they are and what the request was."""

    async def triton(talk: Talk) -> None:
        asked = json.loads(listener.upstream.requests.pop().body)
        number = asked["number"]
        said = {"by": "Triton", "number": number, "x": "y" * asked.get("answered", 0)}
        line = b"200 OK"
        if "fails" in asked:
            line, said = b"400 Bad Request", {"error": f"number {number}"}
        body = json.dumps(said).encode()
        await talk.say(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (line, len(body), body))

    async def handle(asked: Request) -> answers.Answer | None:
        body = json.loads(await asked.read_body(MAX_BODY) or b'{"number":null}')
        return answers.answer_json({"by": asked.raw_path, "number": body["number"]})

    listener.upstream.script = triton
    listener.handle = handle  # type: ignore[method-assign]


async def answer_to(caller: Caller, asked: Asked) -> Answer:
    while (found := await (caller.head() if asked.is_head else _answer(caller))).status == 100:
        pass
    return found


async def _answer(caller: Caller) -> Answer:
    found = await caller.head()
    if found.status != 100:
        found.body = await caller.reader.readexactly(int(found.headers["content-length"]))
    return found


def check(asked: Asked, found: Answer) -> None:
    assert found.status == asked.status
    if asked.is_head:
        return
    said = found.json()
    expected = dict(asked.said)
    if told := expected.pop("told", None):
        assert told in str(said)
    assert expected.items() <= said.items()
    assert len(found.body) < 10_000 or said["x"].strip("y") == ""


async def play(ways: Ways, connections: int) -> Counter[str]:
    seen = Counter[str]()
    async with opened(limits=PATIENT) as listener:
        scripted(listener)
        for _ in range(connections):
            asked = ways.of_one_connection()
            caller = await listener.connect(limit=2**22)
            pieces = ways.cut(b"".join(one.data for one in asked))

            async def send(caller: Caller = caller, pieces: list[bytes] = pieces) -> None:
                for piece in pieces:
                    await caller.send(piece)
                    await asyncio.sleep(0)

            sending = asyncio.create_task(send())
            for number, one in enumerate(asked):
                try:
                    async with asyncio.timeout(SECONDS):
                        check(one, await answer_to(caller, one))
                except (AssertionError, TimeoutError, EOFError, ConnectionError) as error:
                    sent = [(each.data[:200], each.status) for each in asked[: number + 2]]
                    error.add_note(f"{number} of {sent}, cut {[len(each) for each in pieces]}")
                    raise
                seen[str(one.status)] += 1
            await sending
            assert not caller.reader._buffer  # type: ignore[attr-defined]
            listener.callers.remove(caller)
            caller.writer.close()
            await listener.until_lost()
        seen["handled"] = len(listener.handled)
    return seen


def test_each_request_has_its_own_answer_in_order_whichever_way_it_takes() -> None:
    sys.stdout.write(f"seed {SEED}\n")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(play(Ways(random.Random(SEED)), 20))
    sys.stdout.write(f"{dict(seen)}\n")
    assert min(seen[each] for each in ("200", "400", "404", "handled")) > 0


# A field that comes twice: an inference whose head has it is not planned.
HANDLED_FIELDS = ("X-A: 1", "X-A: 2")
IDS = (
    "X-Request-Id: 7",
    "X-Amzn-SageMaker-Inference-Id: i",
    "X-Amzn-SageMaker-Custom-Attributes: a=b",
)


async def unknown(listener: Listener) -> str:
    return "nobody"


async def being_loaded(listener: Listener) -> str:
    gate = listener.fakes.calls.hold("load")
    listener.fakes.begin(listener.fakes.load("slow"))
    await gate.reached.wait()
    return "slow"


async def too_deep(listener: Listener) -> str:
    return "m"


async def starting(listener: Listener) -> str:
    listener.fakes.start_again()
    return "nobody"


async def refused_by(
    listener: Listener, data: list[bytes], caplog: pytest.LogCaptureFixture
) -> tuple[bytes, dict[str, object]]:
    """All bytes of the answer but those of the date, and the fields of its line in the log."""
    caplog.clear()
    caller = await listener.connect()
    for piece in data:
        await caller.send(piece)
        await asyncio.sleep(0.01)
    raw = await caller.reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", raw)
    assert length is not None
    body = await caller.reader.readexactly(int(length[1]))
    (line,) = [record for record in caplog.records if record.message == "request.failed"]
    standard = vars(logging.makeLogRecord({})).keys()
    fields = {name: value for name, value in vars(line).items() if name not in standard}
    assert (await caller.ask(request(HANDLED))).status == 200, "the connection goes on"
    return re.sub(rb"Date: [^\r]+", b"Date:", raw) + body, fields


@pytest.mark.parametrize("pieces", [1, 2], ids=["whole", "the body behind its head"])
@pytest.mark.parametrize("path", ["/models/{}/invoke", "/v2/models/{}/infer"])
@pytest.mark.parametrize("why", [unknown, being_loaded, too_deep, starting])
async def test_both_paths_refuse_with_same_bytes_and_log(
    why: Callable[[Listener], Awaitable[str]],
    path: str,
    pieces: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = b"[" * 2000 if why is too_deep else b'{"a":1}'
    async with opened(limits=PATIENT) as listener, asyncio.timeout(SECONDS):
        caplog.set_level(logging.INFO)
        target = path.format(await why(listener))
        kind = ("v2", "infer") if target.startswith("/v2") else ("sagemaker", "invoke")
        found = []
        for more in ((), HANDLED_FIELDS):
            raw = request(target, body, *IDS, *more)
            cut = [raw] if pieces == 1 else [raw[: -len(body)], raw[-len(body) :]]
            before = listener.served(*kind)
            codes = dict(before.codes)
            found.append(await refused_by(listener, cut, caplog))
            served = listener.served(*kind)
            status = int(found[-1][0].split()[1])
            assert served.codes[status] > codes.get(status, 0)
        assert listener.handled.count(target) == 1
        assert found[0] == found[1]
        listener.fakes.calls.open_all()


@pytest.mark.parametrize("name", ["Authorization", "X-Amz-Date", "traceparent"])
@pytest.mark.parametrize("path", ["/models/nobody/invoke", "/v2/models/nobody/infer"])
async def test_a_refusal_is_logged_where_a_line_that_differs_comes_twice(
    path: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(limits=PATIENT) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        lines = (f"{name}: a", f"{name}: b", "X-Request-Id: 7")
        for target, status in ((path, 404), (path.replace("nobody", "m"), 200)):
            await caller.send(request(target, b"{}", *lines))
            assert (await caller.answer()).status == status
    assert [r.message for r in caplog.records if r.exc_info] == []
    assert "7" in {getattr(r, "request_id", None) for r in caplog.records}


@pytest.mark.parametrize("path", ["/models/nobody/invoke", "/v2/models/nobody/infer"])
async def test_a_refusal_calls_less_of_the_adapter_than_an_answer(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)  # a flood of them leaves few lines, as the next test says
    async with opened(limits=PATIENT) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        counts = []
        for target in (path, path.replace("nobody", "m")):
            await caller.ask(request(target))
            with counted_calls() as calls:
                await caller.ask(request(target))
            counts.append(calls.total())
        assert counts[0] <= counts[1], counts


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Calls of Python functions of the adapter, by their names."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("adapter."):
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("more", [(), HANDLED_FIELDS], ids=["planned", "handled"])
async def test_a_flood_of_refusals_leaves_some_lines_and_their_sum(
    more: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with opened(limits=PATIENT) as listener, asyncio.timeout(SECONDS):
        caller, raw = await listener.connect(), request("/models/nobody/invoke", b"{}", *more)
        sending = asyncio.create_task(caller.send(raw * 200))
        for _ in range(200):
            assert (await caller.answer()).status == 404
        await sending
        lines = summed_up = 0
        while lines + summed_up < 200:
            await asyncio.sleep(0.01)
            lines = sum(each.message == "request.failed" for each in caplog.records)
            summed_up = sum(getattr(each, "requests", 0) for each in caplog.records)
        assert lines + summed_up == 200
        assert summed_up


async def test_a_thousand_refusals_behind_one_another_are_answered_in_their_order() -> None:
    names = [f"nobody{number}" for number in range(1500)]
    async with opened(limits=PATIENT) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        data = b"".join(request(f"/models/{name}/invoke") for name in names)
        sending = asyncio.create_task(caller.send(data))
        for name in names:
            found = await caller.answer()
            assert (found.status, found.json()["model_name"]) == (404, name)
        await sending
        assert listener.handled == []
