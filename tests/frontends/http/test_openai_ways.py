"""Calls for embeddings end in the same way whether their connection answers them or a task does.

A connection answers them without a task once the config of the model is known, unless their body
comes in chunks.
"""

import asyncio
import json
import logging
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from adapter.core.record import Usage
from adapter.core.states import ModelState
from adapter.frontends.openai import contract
from adapter.frontends.openai.text_models import read_rows
from tests.fakes.http_triton import Script, Talk, says
from tests.frontends.http.listener import LONG, Caller, Listener, head, opened, request, until

PATH = "/v1/embeddings"
SECONDS = 30
CONFIG = json.dumps(
    {
        "max_batch_size": 4096,
        "input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "VECTOR", "data_type": "TYPE_FP32", "dims": [2]}],
    }
).encode()
CHUNKED = "Transfer-Encoding: chunked"
WAYS = ((), (CHUNKED,))


def answer_of(body: bytes, *fields: str, status: str = "200 OK") -> bytes:
    """An answer of Triton."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


def rows_of(values: str, shape: list[int], datatype: str = "FP32") -> bytes:
    """The JSON of an inference's answer."""
    described = f'"name":"VECTOR","datatype":"{datatype}","shape":{shape}'
    return f'{{"model_name":"m","outputs":[{{{described},"data":[{values}]}}]}}'.encode()


PAIR = answer_of(rows_of("0.5,1.5,2,3", [2, 2]))
GOOD = answer_of(rows_of("0.5,1.5", [1, 2]), "Content-Type: application/json")


def play(infer: Script) -> Script:
    """Tell the config of the model, and answer an inference by a script."""

    async def script(talk: Talk) -> None:
        if talk.request_head.startswith(b"GET"):
            await talk.say(answer_of(CONFIG))
        else:
            await infer(talk)

    return script


def call(texts: object, *fields: str, **members: Any) -> bytes:
    """A call for the vectors of texts; with CHUNKED among its fields its body is one chunk."""
    body = json.dumps({"model": "m", "input": texts, **members}).encode()
    if CHUNKED not in fields:
        return request(PATH, body, *fields)
    return head(PATH, *fields) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@dataclass
class Outcome:
    """All that differs by how a call ends."""

    answer: bytes  # without its date
    asked: list[bytes]  # the lines of the head that Triton got
    logged: list[dict[str, object]]
    counted: dict[int | str, int]
    upstream_count: int  # of measured waits for Triton
    in_flight: int
    latencies: int
    has_answered: bool


@asynccontextmanager
async def known_model() -> AsyncIterator[tuple[Listener, Caller]]:
    """A listener that knows the config of its model."""
    async with opened(play(says(GOOD)), LONG) as listener:
        caller = await listener.connect()
        assert (await caller.ask(call("a"))).status == 200
        yield listener, caller


def usage(listener: Listener) -> Usage:
    [record] = listener.fakes.control.registry.records()
    return record.usage


async def outcome(infer: Script, raw: bytes, caplog: pytest.LogCaptureFixture) -> Outcome:
    """Ask for vectors of a model whose config is known."""
    async with known_model() as (listener, caller), asyncio.timeout(SECONDS):
        served = listener.served("openai", "embeddings")
        codes = dict(served.codes)
        waits = served.upstream._counts[-1]
        latencies = len(usage(listener).latencies)
        usage(listener).answered_at = 0
        caplog.clear()
        listener.upstream.script = play(infer)
        answer = await caller.ask(raw)
        listener.upstream.script = play(says(GOOD))
        listener.served("openai", "embeddings")
        seen = Outcome(
            re.sub(rb"'date': '[^']+'", b"", repr(answer).encode()),
            sorted(
                line
                for line in listener.upstream.requests[-1].head.splitlines()
                if not line.startswith(b"Host: ")
            ),
            [fields_of(record) for record in caplog.records if record.levelno > logging.DEBUG],
            {code: count - codes.get(code, 0) for code, count in served.codes.items()},
            served.upstream._counts[-1] - waits,
            listener.in_flight(),
            len(usage(listener).latencies) - latencies,
            usage(listener).answered_at > 0,
        )
        assert (await caller.ask(call("a"))).status == 200, "the connection goes on"
        return seen


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The event and fields of a line of the log."""
    standard = vars(logging.makeLogRecord({})).keys()
    fields = {name: value for name, value in vars(record).items() if name not in standard}
    return {"event": record.message, **fields}


TEXT = "Content-Type: text/plain"
TRACE = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ERROR = b'{"error":"in ensemble: CUDA out of memory. Tried to allocate 2.00 GiB"}'
HEADER = f"Inference-Header-Content-Length: {len(rows_of('', [1, 2]))}"


@pytest.mark.parametrize(
    ("infer", "asked", "status"),
    [
        pytest.param(says(GOOD), call("a"), 200, id="numbers"),
        pytest.param(
            says(answer_of(rows_of("", [1, 2]) + b"\0" * 8, HEADER)),
            call("a", encoding_format="base64"),
            200,
            id="base64",
        ),
        pytest.param(says(PAIR), call(["a", "b"]), 200, id="two texts"),
        pytest.param(says(GOOD), call([]), 400, id="no text"),
        pytest.param(says(GOOD), call("a", encoding_format="hex"), 400, id="encoding"),
        pytest.param(says(GOOD), call("a", dimensions=3), 400, id="dimensions"),
        pytest.param(says(GOOD), call("a", model="nobody"), 404, id="unknown model"),
        pytest.param(says(GOOD), call("a", "Content-Encoding: gzip"), 400, id="compressed"),
        pytest.param(says(GOOD), call("a", "Content-Encoding: identity"), 200, id="identity"),
        pytest.param(says(GOOD[:-30], GOOD[-30:]), call("a"), 200, id="in pieces"),
        pytest.param(
            says(answer_of(ERROR, TEXT, status="500 Error")), call("a"), 507, id="out of memory"
        ),
        pytest.param(
            says(answer_of(b'{"error":"bad"}', TEXT, status="400 Bad")),
            call("a"),
            400,
            id="refused",
        ),
        pytest.param(says(answer_of(rows_of("NaN,1", [1, 2]))), call("a"), 500, id="NaN"),
        pytest.param(says(answer_of(rows_of("1", [2, 2]))), call("a"), 500, id="wrong shape"),
        pytest.param(says(closes=True), call("a"), 503, id="closed before the answer"),
        pytest.param(says(GOOD[:-5], closes=True), call("a"), 503, id="closed in the answer"),
        pytest.param(
            says(GOOD), call("a", TRACE, "tracestate: a=b", "X-Request-Id: 7"), 200, id="ids"
        ),
        pytest.param(says(GOOD), call("a", f"X-Request-Id: {'7' * 9000}"), 400, id="long id"),
        pytest.param(says(GOOD), call("a", "X-Request-Id: \xe4"), 200, id="id is no ASCII"),
    ],
)
async def test_both_ways_end_alike(
    infer: Script, asked: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    head, _, body = asked.partition(b"\r\n\r\n")
    lines = re.sub(rb"Content-Length: \d+", CHUNKED.encode(), head)
    chunked = lines + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    by_hand = await outcome(infer, asked, caplog)
    in_task = await outcome(infer, chunked, caplog)
    assert b"status=%d," % status in by_hand.answer
    assert by_hand == in_task


@pytest.mark.parametrize("fields", WAYS)
async def test_ids_of_call_reach_triton(
    fields: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    ids = (TRACE, "tracestate: a=b", "X-Request-Id: 7")
    others = ("Authorization: Bearer a", "Accept-Encoding: gzip", "X-Other: b")
    seen = await outcome(says(GOOD), call("a", *ids, *others, *fields), caplog)
    assert {field.encode() for field in ids} <= {*seen.asked}
    assert not {field.encode() for field in others} & {*seen.asked}


@pytest.mark.parametrize("fields", WAYS)
async def test_large_answer_is_read_by_a_thread(
    fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading the vectors of many texts would hold the event loop for 0.1 s and more."""
    threads: list[threading.Thread] = []

    def read(*given: Any) -> list[bytes]:
        threads.append(threading.current_thread())
        return read_rows(*given)

    monkeypatch.setattr(contract, "read_rows", read)
    values = ",".join(["0.12345678901234567890,1.12345678901234567890"] * 2048)
    infer = says(answer_of(rows_of(values, [2048, 2])))
    seen = await outcome(infer, call(["a"] * 2048, *fields), caplog)
    assert b"status=200," in seen.answer
    assert threading.main_thread() not in threads[1:-1]
    assert len(threads) == 3


@pytest.mark.parametrize("fields", WAYS)
async def test_unread_vectors_count_until_they_are_taken(fields: tuple[str, ...]) -> None:
    """A call of 10 KB may have an answer of 100 MB, which its caller need not read."""
    values = ",".join(["0.1234567890123"] * 2048 * 512)
    vectors = answer_of(rows_of(values, [2048, 512]))
    many = call(["a"] * 2048, *fields)
    limit = 2 * len(vectors)
    async with (
        opened(play(says(vectors)), LONG, inflight_bytes=limit) as listener,
        asyncio.timeout(SECONDS),
    ):
        [reader, other] = [await listener.connect() for _ in range(2)]
        assert (await reader.ask(many)).status == 200
        await reader.send(many)
        await until(lambda: listener.budget.held > len(vectors) and not listener.in_flight())
        refused = await other.ask(many)
        assert (refused.status, refused.json()["error"]["code"]) == (429, "TooManyWaiting")
        # another machine would have the model compute once more
        assert "x-triton-adapter-not-started" not in refused.headers
        assert len((await reader.answer()).json()["data"]) == 2048
        assert (await other.ask(many)).status == 200
        await until(lambda: not listener.budget.held)


async def test_large_classes_are_answered_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their probabilities would hold the event loop longer than vectors do."""
    threads: list[threading.Thread] = []
    loads = json.loads

    def record(text: Any, **more: Any) -> Any:
        if text[:3] == b"[0.":
            threads.append(threading.current_thread())
        return loads(text, **more)

    monkeypatch.setattr(json, "loads", record)
    values = ",".join(["0.12345678901234567890,0.22345678901234567890"] * 2048)
    labels = answer_of(b'{"outputs":[{"data":["0.2:1:a label","0.1:0:another"]}]}')

    async def infer(talk: Talk) -> None:
        await talk.say(answer_of(rows_of(values, [2048, 2])))
        listener.upstream.script = play(says(labels))

    async with opened(play(infer), LONG) as listener, asyncio.timeout(SECONDS):
        caller = await listener.connect()
        asked = call(["a"] * 2048).replace(b"embeddings", b"classify")
        answer = await caller.ask(asked)
        assert (answer.status, len(threads)) == (200, 2048)
        assert threading.main_thread() not in threads
        assert answer.json()["data"][2047] == {
            "index": 2047,
            "label": "a label",
            "probs": [0.12345678901234567890, 0.22345678901234567890],
            "num_classes": 2,
        }


@pytest.mark.parametrize("fields", WAYS)
async def test_caller_who_leaves_has_model_held_until_answer(fields: tuple[str, ...]) -> None:
    gate = asyncio.Event()

    async def infer(talk: Talk) -> None:
        await gate.wait()
        await talk.say(GOOD)

    async with known_model() as (listener, caller), asyncio.timeout(SECONDS):
        latencies = len(usage(listener).latencies)
        listener.upstream.script = play(infer)
        await caller.send(call("a", *fields))
        await listener.upstream.asked(3)
        caller.reset()
        await until(lambda: listener.abandoned() == 1)
        assert listener.in_flight() == 1
        gate.set()
        await until(lambda: listener.in_flight() == 0)
        assert len(usage(listener).latencies) == latencies + 1


@pytest.mark.parametrize("fields", WAYS)
async def test_unload_waits_for_inference_in_flight(fields: tuple[str, ...]) -> None:
    gate = asyncio.Event()

    async def infer(talk: Talk) -> None:
        await gate.wait()
        await talk.say(GOOD)

    async with known_model() as (listener, caller), asyncio.timeout(SECONDS):
        listener.upstream.script = play(infer)
        await caller.send(call("a", *fields))
        await listener.upstream.asked(3)
        unloading = listener.fakes.begin(listener.fakes.unload("m"))
        await listener.fakes.until_state("m", ModelState.UNLOADING)
        other = await listener.connect()
        refusal = await other.ask(call("a", *fields))
        assert (refusal.status, refusal.json()["error"]["code"]) == (404, "model_not_found")
        assert not unloading.done()
        gate.set()
        assert (await caller.answer()).status == 200
        await unloading


@pytest.mark.parametrize("fields", WAYS)
async def test_late_answer_is_timeout_and_model_held(fields: tuple[str, ...]) -> None:
    gate = asyncio.Event()

    async def infer(talk: Talk) -> None:
        await gate.wait()
        await talk.say(GOOD)

    async with known_model() as (listener, caller), asyncio.timeout(SECONDS):
        for connection in listener.server.parts.dataplane._pool.connections:  # type: ignore[attr-defined]
            connection.seconds = 0.05
            connection._timer.cancel()
            connection._timer = None
        listener.upstream.script = play(infer)
        answer = await caller.ask(call("a", *fields))
        assert (answer.status, answer.json()["error"]["code"]) == (504, "BackendTimeout")
        assert (listener.in_flight(), listener.abandoned()) == (1, 1)
        gate.set()
        await until(lambda: listener.in_flight() == 0)
