"""An error that nobody expected, in whatever serves a plain inference: the caller is told, and
nothing hangs, leaks or is counted for ever.
"""

import pytest

from adapter.dataplane.http_connection import Connection
from adapter.frontends.http import fast_path
from adapter.frontends.http.fast_path import Inference
from tests.fakes.http_triton import says
from tests.frontends.http.listener import LANE, MIB, head, opened, request


async def raises(*_, **__):
    raise RuntimeError("a bug")


def raises_at_once(*_, **__):
    raise RuntimeError("a bug")


def forgets(door, monkeypatch):
    monkeypatch.setattr(door.house.control, "lease", raises_at_once)


def looks_badly(door, monkeypatch):
    monkeypatch.setattr(door.lane.fast.dataplane, "check", raises_at_once)


def finds_no_upstream(door, monkeypatch):
    monkeypatch.setattr(door.lane.fast.dataplane._pool, "idle", raises_at_once)


def judges_badly(door, monkeypatch):
    """Only what Triton refuses is judged."""
    monkeypatch.setattr(door.house.control, "judged", raises)

    door.upstream.script = says(b'HTTP/1.1 500 No\r\nContent-Length: 13\r\n\r\n{"error":"x"}')


def begins_badly(door, monkeypatch):
    monkeypatch.setattr(Connection, "begin", raises_at_once)


def writes_no_head(door, monkeypatch):
    monkeypatch.setattr(fast_path, "head_of", raises_at_once)


FAULTS = (forgets, looks_badly, finds_no_upstream, judges_badly, begins_badly, writes_no_head)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_bug_in_an_inference_is_500_in_the_log_and_nothing_is_left_of_it(
    fault, caplog, monkeypatch
):
    async with opened() as door:
        caller = await door.connect()
        assert (await caller.ask(request(LANE))).status == 200
        script = door.upstream.script
        with monkeypatch.context() as broken:
            fault(door, broken)
            found = await caller.ask(request(LANE))
        assert (found.status, found.json()["code"]) == (500, "InternalError")
        assert (door.in_flight(), door.house.metrics.traffic.in_flight) == (0, 0)
        assert door.lane.fast.held == door.lane.fast.inflight.taken == 0
        door.upstream.script = script
        assert (await (await door.connect()).ask(request(LANE))).status == 200
    (record,) = [record for record in caplog.records if record.exc_info]
    assert (record.levelname, record.message) == ("ERROR", "request.failed")
    assert (record.path, record.model_id) == (LANE, "m")


@pytest.mark.parametrize("fault", [forgets, finds_no_upstream, begins_badly])
async def test_a_bug_before_a_large_body_has_come_is_500_and_the_connection_ends(
    fault, monkeypatch
):
    async with opened() as door:
        caller = await door.connect()
        fault(door, monkeypatch)
        await caller.send(head(LANE, f"Content-Length: {MIB}") + bytes(1000))
        assert (await caller.answer()).status == 500
        assert await caller.rest() == b""
        assert (door.in_flight(), door.house.metrics.traffic.in_flight) == (0, 0)
        assert door.lane.fast.inflight.taken == 0


async def test_a_bug_amid_an_answer_ends_the_connection(monkeypatch):
    async with opened() as door:
        caller = await door.connect()

        async def script(talk):
            await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + bytes(2_000_000))
            await door.gate.wait()
            await talk.say(bytes(3_000_000))

        door.upstream.script = script
        await caller.send(request(LANE))
        assert (await caller.head()).status == 200
        monkeypatch.setattr(Inference, "_write", raises_at_once)
        door.gate.set()
        assert len(await caller.rest()) < 5_000_000
        await door.until_lost()
        assert (door.in_flight(), door.house.metrics.traffic.in_flight) == (0, 0)
