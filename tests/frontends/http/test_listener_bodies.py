"""Bodies that are still coming: nobody waits for them who has to go, nor for slow ones for ever."""

import asyncio
import gzip
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from adapter.core.model import ModelId
from adapter.core.states import ModelState
from adapter.core.tensors import ContentTypes, Tensor
from adapter.frontends.bodies import HeldBody
from adapter.frontends.http.chunks import ChunkDecoder
from adapter.runtime import byte_budget
from adapter.triton import checked_bodies
from tests.fakes.http_triton import OK, reads_itself, says
from tests.frontends.http.listener import (
    HANDLED,
    LONG,
    MIB,
    PLANNED,
    both,
    head,
    opened,
    request,
    turns,
    until,
)

NOT_STARTED = "x-triton-adapter-not-started"
FRAMES = ["Content-Length: 1000", f"Content-Length: {8 * MIB}", "Transfer-Encoding: chunked"]

frames = pytest.mark.parametrize("frame", FRAMES, ids=["whole", "streamed", "chunked"])


async def refused(caller) -> None:
    found = await caller.answer()
    assert found.refusal == (503, "NotStarted")
    assert (found.headers[NOT_STARTED], found.headers["connection"]) == ("1", "close")


@pytest.mark.parametrize("frame", FRAMES[1:], ids=["streamed", "chunked"])
async def test_unload_refuses_unfinished_large_bodies(listener, caller, frame):
    await caller.send(head(PLANNED, frame) + b"2\r\n{}")
    await until(lambda: listener.in_flight() == 1)
    unloading = asyncio.create_task(listener.fakes.unload("m"))
    await refused(caller)
    await unloading
    assert await caller.rest() == b""
    assert listener.in_flight() == 0
    assert not listener.whole_requests()


@pytest.mark.parametrize("fields", [(), ("X-A: 1", "X-A: 2")], ids=["by hand", "in a task"])
async def test_unload_spares_next_request_after_timeout(listener, caller, fields):
    """Its model still works on the request before it, of another model, whose body came slowly."""
    await listener.fakes.load("other")
    target = await listener.waiting(PLANNED)
    await caller.send(head(target, FRAMES[2], *fields))
    await until(lambda: listener.in_flight() == 1)
    await caller.send(b"2\r\n{}\r\n0\r\n\r\n")
    await listener.reached.wait()
    [connection] = listener.server.parts.dataplane._pool.connections
    connection._due = 0.0
    connection._time_is_up()
    assert (await caller.answer()).refusal == (504, "BackendTimeout")
    assert listener.abandoned() == 1
    await caller.send(head("/models/other/invoke", FRAMES[0], *fields) + b"{}")
    await until(lambda: listener.connection.request is not None)
    unloading = asyncio.create_task(listener.fakes.unload("m"))
    await listener.fakes.until_state("m", ModelState.UNLOADING)
    await turns(20)
    listener.upstream.script = says(OK)
    await caller.send(bytes(998))
    assert (await caller.answer()).status == 200
    listener.gate.set()
    await unloading


async def test_unload_does_not_wait_for_small_body(listener, caller):
    """It finds no model then."""
    await caller.send(head(PLANNED, FRAMES[0]) + b"{}")
    await listener.until_begun()
    await listener.fakes.unload("m")
    await caller.send(bytes(998))
    assert (await caller.answer()).refusal == (404, "ModelNotFound")
    assert not listener.upstream.requests


async def test_unload_waits_for_own_models_requests(listener):
    await listener.fakes.load("other")
    begun, busy = await listener.connect(), await listener.connect()
    await begun.send(head("/models/other/invoke", FRAMES[0]) + b"{}")
    await listener.hold(busy, PLANNED)
    await until(lambda: listener.in_flight() == 1)
    unloading = asyncio.create_task(listener.fakes.unload("m"))
    await until(lambda: listener.fakes.control.registry.get(ModelId("m")).state.value != "READY")
    listener.gate.set()
    assert (await busy.answer()).status == 200
    await unloading
    await begun.send(bytes(998))
    assert (await begun.answer()).status == 200


@both
@frames
async def test_a_drain_refuses_what_has_not_wholly_come(listener, caller, path, frame):
    await caller.send(head(path, frame) + b"2\r\n{}")
    await listener.until_begun()
    listener.drain.begin()
    closing = asyncio.create_task(listener.server.close(60))
    await refused(caller)
    assert await caller.rest() == b""
    caller.writer.close()
    await closing


async def test_drain_does_not_wait_for_begun_body(listener, caller):
    assert (await caller.ask(request(PLANNED))).status == 200
    listener.drain.begin()
    await caller.send(head(PLANNED, FRAMES[0]) + b"{}")
    await refused(caller)


async def test_body_that_begins_amid_drain_is_refused(listener):
    """Also once those that had begun before were refused."""
    listener.drain.begin()
    await listener.drain.wait_until_noticed()
    await turns(5)
    caller = await listener.connect()
    await caller.send(head(PLANNED, FRAMES[0]) + b"{}")
    await refused(caller)


SLOW = replace(LONG, slow=0.2)


@both
@frames
async def test_slow_body_is_refused_and_closed(listener, caller, path, frame):
    listener.server.limits = SLOW
    await caller.send(head(path, frame) + b"2\r\n{}\r\n")

    async def dribble() -> None:
        while True:
            await caller.send(b"1\r\n \r\n")
            await asyncio.sleep(0.01)

    dribbling = asyncio.create_task(dribble())
    found = await caller.answer()
    assert found.refusal == (408, "SlowBody")
    assert found.headers["connection"] == "close"
    dribbling.cancel()
    await asyncio.wait([dribbling])


async def test_time_before_100_is_not_the_callers(listener):
    limits = replace(SLOW, body=0.2)
    expecting = head("/app/late", "Content-Length: 2", "Expect: 100-continue")
    listener.server.limits = limits
    caller, silent = await listener.connect(), await listener.connect()
    await caller.send(expecting)
    await silent.send(expecting)
    await asyncio.sleep(4 * limits.slow)
    listener.gate.set()
    assert (await caller.head()).status == 100
    assert (await caller.ask(b"{}")).status == 200
    assert (await silent.head()).status == 100
    assert (await silent.answer()).refusal == (400, "InvalidRequest")


async def test_steady_body_is_taken_however_long(listener, caller):
    size = 4 * MIB
    listener.server.limits = replace(SLOW, rate=1000)
    await caller.send(head(PLANNED, f"Content-Length: {size}") + bytes(size // 32))
    for _ in range(31):
        await asyncio.sleep(0.02)
        await caller.send(bytes(size // 32))
    assert (await caller.answer()).status == 200


async def test_time_blocked_by_triton_is_not_callers(listener, caller):
    size, gate = 48 * MIB, asyncio.Event()

    async def script(talk):
        await gate.wait()
        await talk.body(talk.request_head)
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    script.reads_itself = True
    listener.server.limits = SLOW
    listener.upstream.script = script
    sending = asyncio.create_task(
        caller.send(head(PLANNED, f"Content-Length: {size}") + bytes(size))
    )
    await until(lambda: any(not c.transport.is_reading() for c in listener.server._connections))
    await asyncio.sleep(0.6)
    gate.set()
    await sending
    assert (await caller.answer()).status == 200


async def test_connection_is_kept_behind_an_early_answer(listener, caller):
    """Little is left of the body, and it comes before the next request."""
    listener.upstream.script = reads_itself(says(OK))
    body = bytes(300_000)
    await caller.send(head(PLANNED, f"Content-Length: {len(body)}") + body[:280_000])
    assert (await caller.answer()).status == 200
    await caller.send(body[280_000:] + request(PLANNED))
    assert (await caller.answer()).status == 200


async def test_body_is_sent_after_one_that_triton_left(listener, caller):
    """Triton took no more of the body before, and answered all the same."""
    gate = asyncio.Event()

    async def script(talk):
        if gate.is_set():
            await talk.body(talk.request_head)
            await talk.say(OK)
        else:
            await gate.wait()
            await talk.say(OK)
            await talk.end()

    piece = b"8000\r\n" + bytes(2**15) + b"\r\n"
    listener.upstream.script = reads_itself(script)
    await caller.send(head(PLANNED, FRAMES[2]))
    await until(lambda: bool(listener.upstream.talks))
    connection = listener.connection
    sent = 0
    while not connection.exchange.is_blocked:
        await caller.send(piece)
        sent += len(piece)
        await until(lambda: connection._arrival.received == sent)  # noqa: B023
    await caller.send(b"0\r\n\r\n")
    await until(lambda: connection.is_whole)
    gate.set()
    assert (await caller.answer()).status == 200
    await caller.send(head(PLANNED, FRAMES[2]) + piece + b"0\r\n\r\n")
    assert (await caller.answer()).status == 200


each_frame = pytest.mark.parametrize("frame", FRAMES[1:], ids=["of known length", "in chunks"])


@asynccontextmanager
async def all_taken(listener):
    """By a caller who may go on alone, while Triton takes nothing of its body."""
    budget = listener.budget
    with HeldBody(budget, 100 * MIB, is_reading=lambda: False) as other:
        await other.take(8 * MIB)
        yield other


@each_frame
async def test_large_body_over_limit_waits_for_room(frame):
    size = 4 * MIB
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener:
        budget = listener.budget
        caller = await listener.connect()
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, bytes(size))
        if frame == FRAMES[1]:
            frame, body = f"Content-Length: {size}", bytes(size)
        async with all_taken(listener):
            sending = asyncio.create_task(caller.send(head(PLANNED, frame) + body))
            await until(lambda: budget.waiting == 1)
            assert budget.held < 9 * MIB
        assert (await caller.answer()).status == 200
        await sending


@both
async def test_small_body_in_pieces_counts_and_waits(path):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener:
        budget = listener.budget
        async with all_taken(listener):
            caller = await listener.connect()
            await caller.send(head(PLANNED, FRAMES[0]) + b"{}")
            await until(lambda: budget.waiting == 1)
        await caller.send(bytes(998))
        assert (await caller.answer()).status == 200


@pytest.mark.parametrize("target", [PLANNED, "/v2/models/m/generate"])
async def test_small_body_counts_until_it_is_answered(listener, target):
    """The adapter keeps it until then."""
    budget = listener.budget
    await listener.waiting(PLANNED)
    caller = await listener.connect()
    await caller.send(head(target, FRAMES[0]) + b"{}")
    await until(lambda: budget.held == 2)
    await caller.send(b" " * 998)
    await listener.reached.wait()
    assert budget.held == 1000
    listener.gate.set()
    assert (await caller.answer()).status == 200
    await until(lambda: budget.held == 0)


async def test_small_whole_body_does_not_wait():
    async with opened(inflight_bytes=8 * MIB) as listener, all_taken(listener):
        caller = await listener.connect()
        assert (await caller.ask(request(PLANNED))).status == 200


@each_frame
async def test_caller_without_room_is_told_when_to_retry(frame, monkeypatch):
    monkeypatch.setattr(byte_budget, "_WAIT_SECONDS", 0.2)
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener:
        async with all_taken(listener):
            caller = await listener.connect()
            await caller.send(head(PLANNED, frame) + b"2\r\n{}\r\n")
            found = await caller.answer()
        assert found.refusal == (503, "TooManyWaiting")
        assert (found.headers["retry-after"], found.headers[NOT_STARTED]) == ("1", "1")


@pytest.mark.parametrize("content_type", ["image/png", "text/csv"])
async def test_whole_body_counts_until_answered(content_type):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener:
        budget, fakes = listener.budget, listener.fakes
        is_text = content_type == "text/csv"
        tensor = Tensor("IN", "FP32" if is_text else "BYTES", (-1, -1) if is_text else (1,))
        record = fakes.control.registry.serving(ModelId("m"))
        types = ContentTypes(
            (content_type,), options=frozenset(), is_batched=False, input=tensor, outputs=()
        )
        record.package = replace(record.inspected, content_types=types)
        target = await listener.waiting(PLANNED)
        caller = await listener.connect()
        asked = head(target, FRAMES[2], f"Content-Type: {content_type}")
        await caller.send(asked + b"3\r\n1,2\r\n0\r\n\r\n")
        await listener.reached.wait()
        assert budget.held > 0
        listener.gate.set()
        assert (await caller.answer()).status == 200
        await until(lambda: budget.held == 0)


async def test_checked_body_of_leaving_caller_is_released(listener, monkeypatch):
    checking, budget = asyncio.Event(), listener.budget

    async def turn() -> None:
        checking.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(checked_bodies, "_TURN_SECONDS", -1)
    monkeypatch.setattr(listener.server.parts.dataplane.turns, "turn", turn)
    caller = await listener.connect()
    piece = gzip.compress(b"{}")
    await caller.send(head(PLANNED, FRAMES[2], "Content-Encoding: gzip"))
    await caller.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    await checking.wait()
    assert budget.held == len(piece)
    caller.reset()
    await until(lambda: listener.in_flight() == 0)
    assert budget.held == 0


@each_frame
@pytest.mark.parametrize("how", ["leaves", "unload"])
async def test_departed_waiter_or_model_blocks_nobody(frame, how):
    async with opened(limits=LONG, inflight_bytes=8 * MIB) as listener:
        budget = listener.budget
        async with all_taken(listener):
            caller = await listener.connect()
            await caller.send(head(PLANNED, frame) + b"2\r\n{}\r\n")
            await until(lambda: budget.waiting == 1)
            if how == "leaves":
                caller.reset()
            else:
                unloading = asyncio.create_task(listener.fakes.unload("m"))
                await refused(caller)
                await unloading
        await until(lambda: budget.waiting == listener.in_flight() == 0)


async def test_tiny_chunks_are_parsed_with_turns_between(listener, monkeypatch):
    """A read of 256 KiB in chunks of one byte takes a tenth of a second to parse."""
    turn, parsed = 0, list[tuple[int, int]]()

    def counted(act: Callable[[object, bytes], object]) -> Callable[..., object]:
        def call(parser: object, piece: bytes) -> object:
            parsed.append((turn, len(piece)))
            return act(parser, piece)

        return call

    monkeypatch.setattr(ChunkDecoder, "feed", counted(ChunkDecoder.feed))
    body = b"1\r\nx\r\n" * 40_000 + b"0\r\n\r\n"
    callers = [await listener.connect() for _ in range(3)]
    for one in callers:
        await one.send(head(HANDLED, "Transfer-Encoding: chunked") + body)
    answers = [asyncio.create_task(one.answer()) for one in callers]
    while not all(one.done() for one in answers):
        turn += 1
        await asyncio.sleep(0)
    assert {one.result().status for one in answers} == {200}
    of_a_turn = Counter[int]()
    for at, size in parsed:
        of_a_turn[at] += size
    assert max(of_a_turn.values()) <= 64 * 1024
    assert listener.budget.buffered == 0
