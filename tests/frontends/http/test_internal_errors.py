"""An error that nobody expected, in whatever serves a plain inference: the caller is told, and
nothing hangs, leaks or is counted for ever.
"""

import pytest

from adapter.control.triton import RequestFailures
from adapter.frontends.http.answers import StreamedAnswer
from adapter.triton.connection import Connection
from tests.fakes.http_triton import says
from tests.frontends.http.listener import (
    MIB,
    PLANNED,
    head,
    request,
)


async def raises(*_, **__):
    raise RuntimeError("a bug")


def raises_at_once(*_, **__):
    raise RuntimeError("a bug")


def forgets(listener, monkeypatch):
    monkeypatch.setattr(listener.fakes.control.registry, "serving", raises_at_once)


def judges_badly(listener, monkeypatch):
    """Only what Triton refuses is judged."""
    monkeypatch.setattr(RequestFailures, "judge", raises)
    listener.upstream.script = says(b'HTTP/1.1 500 No\r\nContent-Length: 13\r\n\r\n{"error":"x"}')


def begins_badly(_, monkeypatch):
    monkeypatch.setattr(Connection, "begin", raises_at_once)


FAULTS = (forgets, judges_badly, begins_badly)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_bug_in_inference_is_500_and_logged(listener, caller, fault, caplog, monkeypatch):
    assert (await caller.ask(request(PLANNED))).status == 200
    script = listener.upstream.script
    with monkeypatch.context() as broken:
        fault(listener, broken)
        found = await caller.ask(request(PLANNED))
    assert (found.status, found.json()["code"]) == (500, "InternalError")
    assert (listener.in_flight(), listener.fakes.metrics.traffic.in_flight) == (0, 0)
    assert listener.budget.held == 0
    listener.upstream.script = script
    assert (await (await listener.connect()).ask(request(PLANNED))).status == 200
    (record,) = [record for record in caplog.records if record.exc_info]
    assert (record.levelname, record.message) == ("ERROR", "request.failed")
    assert (record.path, record.model_id) == (PLANNED, "m")
    assert (record.listener, record.method, record.status) == ("http", "POST", 500)


@pytest.mark.parametrize("fault", [forgets, begins_badly])
async def test_bug_before_large_body_ends_the_connection(listener, caller, fault, monkeypatch):
    fault(listener, monkeypatch)
    await caller.send(head(PLANNED, f"Content-Length: {MIB}") + bytes(1000))
    assert (await caller.answer()).status == 500
    assert await caller.rest() == b""
    assert (listener.in_flight(), listener.fakes.metrics.traffic.in_flight) == (0, 0)
    assert listener.budget.held == 0


async def test_a_bug_amid_an_answer_ends_the_connection(listener, caller, monkeypatch):

    async def script(talk):
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + bytes(2_000_000))
        await listener.gate.wait()
        await talk.say(bytes(3_000_000))

    listener.upstream.script = script
    await caller.send(request(PLANNED))
    assert (await caller.head()).status == 200
    monkeypatch.setattr(StreamedAnswer, "add", raises_at_once)
    listener.gate.set()
    assert len(await caller.rest()) < 5_000_000
    await listener.until_lost()
    assert (listener.in_flight(), listener.fakes.metrics.traffic.in_flight) == (0, 0)
