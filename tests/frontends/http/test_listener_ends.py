"""How connections at the http listener end: callers hang up, dawdle or never stop; the drain."""

import asyncio
import socket
from contextlib import contextmanager
from dataclasses import replace

import pytest

from adapter.core.calls import NOT_STARTED
from adapter.frontends.drain import Drain
from adapter.frontends.http import answers
from adapter.frontends.http.server import Connections
from tests.fakes.http_triton import OK, says
from tests.frontends.http.listener import (
    HANDLED,
    LONG,
    MIB,
    PATHS,
    PLANNED,
    both,
    head,
    opened,
    request,
    until,
)


async def let_go(listener, path):
    """Its connection has ended, and what serves it; what Triton works on goes on there."""
    await listener.until_lost()
    if path == PLANNED:
        await until(lambda: listener.abandoned() == 1)
        assert (listener.in_flight(), listener.gone.is_set()) == (1, False)
        listener.gate.set()
    await listener.gone.wait()
    await until(lambda: listener.in_flight() == 0)
    assert listener.abandoned() == 0


# -- callers that end their side ----------------------------------------------------------------


@both
async def test_half_closed_caller_gets_its_answer(listener, caller, path):
    await caller.send(request(await listener.waiting(path)))
    caller.writer.write_eof()
    await listener.reached.wait()
    listener.gate.set()
    assert (await caller.answer()).status == 200
    assert await caller.rest() == b""


LENGTH, CHUNKED = "Content-Length: 10", "Transfer-Encoding: chunked"
THREE = request(PLANNED) + request(HANDLED) + request(PLANNED)
# what is sent before a caller ends its side, and the statuses of the answers
ENDED = {
    "nothing": (b"", []),
    "half a head": (request(PLANNED)[:20], [400]),
    "half a head behind requests": (THREE + request(HANDLED)[:10], [200] * 3),
    "empty lines behind a request": (request(PLANNED) + b"\r\n\r\n", [200]),
    "half a body": (head(PLANNED, LENGTH) + b"{}", [400]),
    "half a body for a handler": (head(HANDLED, LENGTH) + b"{}", [400]),
    "half a chunk": (head(PLANNED, CHUNKED) + b"5\r\n{}", [400]),
    "half a chunk for a handler": (head(HANDLED, CHUNKED) + b"5\r\n{}", [400]),
    "half a body behind a request": (request(PLANNED) + head(PLANNED, LENGTH) + b"{}", [200, 400]),
    "the same for a handler": (request(PLANNED) + head(HANDLED, LENGTH) + b"{}", [200, 400]),
}


@pytest.mark.parametrize(("sent", "statuses"), ENDED.values(), ids=ENDED)
async def test_requests_before_the_end_are_answered(listener, caller, sent, statuses):
    await caller.send(sent)
    caller.writer.write_eof()
    assert [(await caller.answer()).status for _ in statuses] == statuses
    assert await caller.rest() == b""
    assert len(listener.whole_requests() + listener.bodies) == statuses.count(200)
    await listener.until_lost()


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize(
    ("frame", "pieces"),
    [
        ("Transfer-Encoding: chunked", (b"4\r\n{   \r\n", b"4\r\n   }\r\n0\r\n\r\n")),
        # a shorter one is written when it is whole
        (f"Content-Length: {MIB + 2}", (b"{" + bytes(MIB), b"}")),
    ],
)
async def test_answer_goes_on_after_its_caller_ended(listener, frame, pieces, version):
    """Bytes of an answer reset the connection of a caller that has disconnected, so this one reads.
    Over HTTP/1.0 it cannot tell an answer of unknown length that breaks off.
    """
    has_ended = asyncio.Event()

    async def script(talk):
        await has_ended.wait()
        await talk.say(f"HTTP/1.1 200 OK\r\n{frame}\r\n\r\n".encode() + pieces[0])
        await listener.gate.wait()
        await talk.say(pieces[1])

    listener.upstream.script = script
    caller = await listener.connect()
    await caller.send(request(PLANNED, version=version))
    caller.writer.write_eof()
    await until(lambda: any(each.has_ended for each in listener.server._connections))
    loop = asyncio.get_running_loop()
    due = loop.time() + LONG.gone
    await until(lambda: loop.time() + LONG.gone > due)
    has_ended.set()
    assert (await caller.reader.readuntil(b"{")).startswith(b"HTTP/1.1 200 ")
    listener.connection.check_time_limits(due)
    listener.gate.set()
    assert b"}" in await caller.rest()


@both
@pytest.mark.parametrize("is_reset", [False, True])
async def test_who_has_gone_is_let_go_soon(listener, caller, path, is_reset):
    """At once where the connection is reset."""
    await listener.hold(caller, path)
    if is_reset:
        caller.reset()
    else:
        listener.server.limits = replace(LONG, gone=0.05)
        caller.writer.close()
    await let_go(listener, path)


@both
async def test_new_caller_gets_the_place_of_one_disconnected(path):
    """Triton still works on the requests of all that there may be, and nobody waits for them."""
    other = HANDLED if path == PLANNED else PLANNED
    async with opened(limits=LONG, connections=Connections(4)) as listener:
        target = await listener.waiting(path)
        for _ in range(4):
            caller = await listener.connect()
            await caller.send(request(target))
            caller.writer.close()
        await until(lambda: sum(each.has_ended for each in listener.server._connections) == 4)
        for _ in range(4):
            found = await (await listener.connect()).ask(request(other))
            assert found.status == 200
        listener.gate.set()


async def test_unused_connection_makes_room_before_a_used_one():
    """Its client has less to lose: the other one keeps its connection for the next request."""
    async with opened(limits=LONG, connections=Connections(2)) as listener:
        used = await listener.connect()
        assert (await used.ask(request(PLANNED))).status == 200
        unused = await listener.connect()
        await until(lambda: len(listener.server._connections) == 2)
        assert (await (await listener.connect()).ask(request(PLANNED))).status == 200
        assert await unused.rest() == b""
        assert (await used.ask(request(PLANNED))).status == 200


async def test_new_caller_keeps_its_place_before_one_disconnected():
    """It has not sent its request yet, which comes a moment later."""
    async with opened(limits=LONG, connections=Connections(2)) as listener:
        caller = await listener.connect()
        await caller.send(request(await listener.waiting(HANDLED)))
        caller.writer.write_eof()
        await listener.reached.wait()
        await until(lambda: any(each.has_ended for each in listener.server._connections))
        new = await listener.connect()
        await until(lambda: len(listener.server._connections) == 2)
        assert (await (await listener.connect()).ask(request(PLANNED))).status == 200
        assert (await new.ask(request(PLANNED))).status == 200
        assert await caller.rest() == b""


@both
async def test_empty_lines_behind_chunks_are_no_request(listener, caller, path):
    chunked = head(path, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
    await caller.send(chunked)
    assert (await caller.answer()).status == 200
    for each in (b"\r", b"\n"):  # read one by one
        await caller.send(each)
        await asyncio.sleep(0.01)
    caller.writer.write_eof()
    assert await caller.rest() == b""
    await listener.until_lost()


# -- requests behind an answer, without room in the budget --------------------------------------


@contextmanager
def full(budget):
    """The budget has no room for anything while the context lasts."""
    budget.buffer(budget.limit)
    try:
        yield
    finally:
        budget.buffer(-budget.limit)


async def test_next_request_is_kept_without_room_after_answer(listener, monkeypatch):
    """A caller that has its answer may be faster than the end of the task that wrote it is seen."""

    async def handle(asked):
        if asked.raw_path == HANDLED:
            behind = request("/app/next")
            asyncio.get_running_loop().call_soon(asked.connection.data_received, behind)
        writer = answers.Writer(asked, {}, 2)
        await writer.write(b"{}")
        writer.end()

    monkeypatch.setattr(listener, "handle", handle)
    caller = await listener.connect()
    with full(listener.budget):
        assert (await caller.ask(request(HANDLED))).status == 200
        assert (await caller.answer()).status == 200
        assert (await caller.ask(request("/app/last"))).status == 200


@pytest.mark.parametrize("path", ["/models/other/invoke", "/app/early"])
async def test_next_request_is_kept_behind_skipped_body(listener, caller, path):
    found = await caller.ask(head(path, "Content-Length: 2000") + bytes(100))
    assert "connection" not in found.headers
    with full(listener.budget):
        assert (await caller.ask(bytes(1900) + request(HANDLED))).status == 200


async def test_connection_ends_when_unread_answer_leaves_no_room(listener):
    """The answer was said to be kept; what came behind it has no room, and is not answered."""
    body = bytes(16 * MIB)
    caller = await listener.connect(limit=2**10)
    await caller.send(request("/app/echo", body))
    await until(lambda: listener.connection.had_request and listener.connection.request is None)
    assert listener.connection.is_full
    with full(listener.budget):
        await caller.send(request(HANDLED))
        await until(lambda: listener.connection._is_crowded)
    assert (await caller.answer()).body == body
    assert await caller.rest() == b""


# -- errors before the body is there ------------------------------------------------------------


@pytest.fixture
def late_reads(listener, monkeypatch):
    """Long reads are put off; the test calls what reads on."""
    late_reads = []
    monkeypatch.setattr(listener.server.turns, "has_time", lambda: False)
    monkeypatch.setattr(listener.server.turns, "wait", late_reads.append)
    return late_reads


@pytest.mark.parametrize("path", ["/models/other/invoke", "/app/early", *PATHS])
async def test_handler_requests_are_answered_in_their_turn(listener, path, monkeypatch):
    """Each read of a body, also of the next request that comes with it."""
    body = bytes(20_000)
    asked = head(path, f"Content-Length: {3 * len(body)}")
    pieces = [(asked + body, 2), (body, 1), (body + asked + body, 2), (body, 1)]
    monkeypatch.setattr(listener.server.turns, "has_time", lambda: False)
    caller = await listener.connect()
    for piece, more in pieces:
        await caller.send(piece)
        await until(
            lambda more=more: (
                [each.left for each in listener.server._connections] == [more * len(body)]
            )
        )
    await caller.send(body)
    found = [await caller.answer() for _ in range(2)]
    assert {one.status for one in found} <= {200, 404}
    assert (await caller.ask(request(PLANNED))).status == 200
    assert listener.budget.buffered == 0


async def test_waiting_bytes_keep_their_order(listener, monkeypatch):
    """The answer of the first request comes while the end of the second waits for its turn."""
    body = bytes(at % 251 for at in range(60_000))
    chunked = head("/app/echo", "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n"
    chunked %= (len(body), body)
    waiting = []
    monkeypatch.setattr(listener.server.turns, "wait", waiting.append)
    caller = await listener.connect()
    await listener.hold(caller, PLANNED, chunked[:20_000])
    monkeypatch.setattr(listener.server.turns, "has_time", lambda: False)
    await caller.send(chunked[20_000:])
    await until(lambda: bool(waiting))
    listener.gate.set()
    assert (await caller.answer()).status == 200
    while waiting:
        waiting.pop(0)()
    assert (await caller.answer()).body == body
    assert listener.budget.buffered == 0


async def test_resumed_caller_is_held_until_its_turn(listener, caller, late_reads):
    """The end of a pause for another reason lets the transport read again."""
    body = b"x" * 20_000
    whole = request(PLANNED, body)
    await caller.send(whole[:-1])
    await until(lambda: bool(late_reads))
    listener.connection.transport.resume_reading()
    await caller.send(whole[-1:])
    await until(lambda: not listener.connection.transport.is_reading())
    assert listener.upstream.requests == []
    while late_reads:
        late_reads.pop(0)()
    assert (await caller.answer()).status == 200
    assert listener.whole_requests() == [body]
    assert listener.connection.transport.is_reading()


async def test_who_leaves_while_its_bytes_wait_leaves_nothing(listener, caller, late_reads):
    await caller.send(head(PLANNED, "Content-Length: 40000") + bytes(20_000))
    await until(lambda: bool(late_reads))
    caller.reset()
    late_reads.pop()()
    await listener.until_lost()
    assert listener.budget.buffered == 0


@pytest.mark.parametrize("path", ["/models/other/invoke", "/app/early"])
@pytest.mark.parametrize("field", ["Content-Length: 33554432", "Transfer-Encoding: chunked"])
async def test_unwanted_large_body_closes_behind_the_answer(listener, caller, path, field):
    found = await caller.ask(head(path, field) + b"1000000\r\n")
    assert found.status in {200, 404}
    assert found.headers["connection"] == "close"
    await caller.send(bytes(8 * MIB))  # nobody is cut off while it still sends
    caller.writer.write_eof()
    assert await caller.rest() == b""


async def sends_on(caller):
    for _ in range(1_000_000):
        await caller.send(bytes(1000))
        await asyncio.sleep(0)


async def test_endless_unwanted_body_is_cut(listener, caller):
    listener.server.limits = replace(LONG, linger=0.05)
    await caller.ask(head("/models/other/invoke", "Content-Length: 33554432"))
    with pytest.raises(ConnectionError):
        await sends_on(caller)


# -- callers that dawdle ------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, *PATHS])
async def test_an_idle_connection_is_closed_after_a_while(listener, caller, before):
    if before:
        await caller.send(request(before))
        await caller.answer()
    listener.server.limits = replace(LONG, idle=0.05)
    assert await caller.rest() == b""
    await listener.until_lost()


async def test_a_head_that_takes_too_long_is_refused(listener, caller):
    listener.server.limits = replace(LONG, head=0.1)
    raw = request(PLANNED)
    for at in range(20):
        await caller.send(raw[at : at + 1])
        await asyncio.sleep(0)
    assert (await caller.answer()).refusal == (400, "InvalidRequest")
    caller.writer.close()


@both
async def test_silent_body_is_refused(listener, caller, path):
    listener.server.limits = replace(LONG, body=0.1)
    found = await caller.ask(head(path, "Content-Length: 10") + b"{}")
    assert found.refusal == (400, "InvalidRequest")
    caller.writer.close()
    await listener.until_lost()


async def test_a_rest_that_is_skipped_must_come_too(listener, caller):
    listener.server.limits = replace(LONG, body=0.1)
    await caller.ask(head("/models/other/invoke", "Content-Length: 10") + b"{}")
    assert await caller.rest() == b""
    await listener.until_lost()


@pytest.mark.parametrize("path", [PLANNED, "/app/echo"])
async def test_unread_answer_is_cut(listener, path):
    size = 32 * MIB
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    listener.server.limits = replace(LONG, answer=0.2)
    listener.upstream.script = says(answer)
    caller = await listener.connect(limit=2**16)
    await caller.send(request(path, b"{}" if path == PLANNED else bytes(size)))
    await listener.until_lost()
    await until(lambda: listener.in_flight() == 0)


async def test_slow_half_closed_client_is_kept():
    """It has not disconnected: it takes what was written late, and then waits for more."""
    length = 2**30
    piece = bytes(2**16)
    sent = 0
    gate = asyncio.Event()

    async def script(talk):
        nonlocal sent
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length)
        [connection] = listener.server._connections
        await until(lambda: connection.exchange.is_answered)
        while not connection.is_full:
            await talk.say(piece)
            sent += len(piece)
            left = length - sent
            await until(lambda left=left: connection.exchange.upstream._left == left)
        await gate.wait()
        await talk.say(b"!")

    limits = replace(LONG, gone=0.5)
    async with opened(script, limits=limits) as listener, asyncio.timeout(30):
        now = asyncio.get_running_loop().time
        caller = await listener.connect(limit=2**16)
        await caller.send(request(PLANNED))
        caller.writer.write_eof()
        await until(lambda: bool(listener.server._connections))
        [connection] = listener.server._connections
        await until(lambda: connection.has_ended and connection.is_full)
        due = connection._gone_due + 0.1
        await until(lambda: now() > due)
        assert (await caller.head()).status == 200
        await caller.reader.readexactly(sent)
        taken_at = now()
        await until(lambda: now() > taken_at + 0.1)
        gate.set()
        assert await caller.reader.readexactly(1) == b"!"


async def test_bytes_behind_last_answer_are_read(monkeypatch):
    """Many had come before it, and the others wait for their turn."""
    async with opened(limits=LONG) as listener, asyncio.timeout(30):
        caller = await listener.connect()
        await caller.send(head("/app/gate", "Connection: close", "Content-Length: 0"))
        await listener.reached.wait()
        [connection] = listener.server._connections
        await caller.send(bytes(70_000))
        await until(lambda: not connection.transport.is_reading())
        monkeypatch.setattr(listener.server.turns, "has_time", lambda: False)
        listener.gate.set()
        assert (await caller.answer()).status == 200
        await caller.send(bytes(200_000))
        caller.writer.write_eof()
        await listener.until_lost()


# -- Triton's side ------------------------------------------------------------------------------


async def test_connection_closed_by_idle_triton_goes_unnoticed(listener, caller):
    for expected in (1, 2):
        assert (await caller.ask(request(PLANNED))).status == 200
        assert len(listener.upstream.talks) == expected
        with listener.upstream.talks[-1].socket() as triton:
            triton.shutdown(socket.SHUT_WR)
    assert len(listener.upstream.requests) == 2


@pytest.mark.parametrize("path", [PLANNED, "/v2/models/m/infer"])
async def test_unsent_call_may_go_to_another_machine(listener, path):
    listener.server.parts.dataplane.connect("127.0.0.1:1")
    found = await (await listener.connect()).ask(request(path))
    assert found.refusal == (503, "BackendUnavailable")
    assert found.headers[NOT_STARTED.lower()] == "1"
    assert not listener.upstream.requests


async def test_possibly_delivered_call_is_not_sent_again(listener):
    async def script(talk):
        await (talk.say(OK) if len(listener.upstream.requests) == 1 else talk.say(b""))
        if len(listener.upstream.requests) > 1:
            talk.writer.close()

    listener.upstream.script = script
    caller = await listener.connect()
    assert (await caller.ask(request(PLANNED))).status == 200
    found = await caller.ask(request(PLANNED))
    assert found.refusal == (503, "BackendUnavailable")
    assert NOT_STARTED.lower() not in found.headers
    assert len(listener.upstream.requests) == 2
    assert (await caller.ask(request(HANDLED))).status == 200


async def test_short_answer_that_breaks_off_is_refused(listener, caller):
    """It is written once it is whole, and what there was of it keeps no room."""
    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nab"
    listener.upstream.script = says(broken, closes=True)
    found = await caller.ask(request(PLANNED))
    assert found.refusal == (503, "BackendUnavailable")
    assert listener.budget.buffered == 0


async def test_an_answer_that_breaks_off_closes_the_connection(listener, caller, caplog):
    """Its status is out: a line that says 503 would be about an answer that nobody got."""
    caplog.set_level("INFO")
    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\nab"
    listener.upstream.script = says(broken, closes=True)
    await caller.send(request(PLANNED))
    assert (await caller.head()).status == 200
    assert len(await caller.rest()) < 3_000_000
    assert "request.failed" not in caplog.messages


# -- the drain ----------------------------------------------------------------------------------


@both
async def test_drain_answers_what_is_in_hand(listener, path):
    idle, half, busy = [await listener.connect() for _ in range(3)]
    await idle.ask(request(path))
    await half.send(request(path)[:10])
    await listener.hold(busy, path, request(HANDLED, b"later"))
    closing = asyncio.create_task(listener.server.close(30))
    assert await idle.rest() == b""
    assert await half.rest() == b""
    with pytest.raises(OSError, match=r"refused|Connect"):
        await listener.connect()
    assert not closing.done()
    listener.gate.set()
    found = await busy.answer()
    assert (found.status, found.headers["connection"]) == (200, "close")
    assert await busy.rest() == b""
    busy.writer.close()
    await closing
    assert b"later" not in listener.bodies


@both
async def test_patience_has_an_end(listener, caller, path):
    await listener.hold(caller, path)
    await listener.server.close(0.05)
    assert await caller.rest() == b""
    await let_go(listener, path)


@both
async def test_connection_ending_while_looked_at_is_released(listener, caller, path):
    await listener.hold(caller, path)
    listener.connection.abort()
    listener.connection.check_time_limits(asyncio.get_running_loop().time())
    await let_go(listener, path)


async def test_drain_lets_answer_under_way_end(listener):
    size = 24 * MIB
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    listener.upstream.script = says(answer)
    caller = await listener.connect(limit=2**16)
    await caller.send(request(PLANNED))
    found = await caller.head()
    closing = asyncio.create_task(listener.server.close(30))
    assert len(await caller.rest()) == int(found.headers["content-length"])
    await closing


@both
async def test_answers_close_their_connection_once_a_drain_begins(listener, caller, path):
    assert "connection" not in (await caller.ask(request(path))).headers
    listener.drain.begin()
    assert (await caller.ask(request(path))).headers["connection"] == "close"


async def test_answer_begun_before_a_drain_closes_behind_it(listener, caller):
    async def script(talk):
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + bytes(2_000_000))
        await listener.gate.wait()
        await talk.say(bytes(1_000_000))

    listener.upstream.script = script
    await caller.send(request(PLANNED))
    assert "connection" not in (await caller.head()).headers
    listener.drain.begin()
    listener.gate.set()
    assert len(await caller.rest()) == 3_000_000


@both
async def test_drain_waits_for_requests(listener, caller, path):
    await listener.hold(caller, path)
    listener.drain.begin()
    assert await listener.drain.wait_until_finished(0.05) == 1
    listener.gate.set()
    assert await listener.drain.wait_until_finished(30) == 0
    assert (await caller.answer()).status == 200


async def test_drain_waits_for_loads_under_way(listener):
    """Of nobody's request, as of a model that is loaded again."""
    gate = listener.fakes.calls.hold("load n")
    loading = asyncio.create_task(listener.fakes.load("n"))
    await gate.reached.wait()
    listener.drain.begin()
    assert await listener.drain.wait_until_finished(0.05) == 1
    gate.open()
    assert await listener.drain.wait_until_finished(30) == 0
    await loading


async def test_callers_have_their_least_time_to_notice(listener):
    fakes = listener.fakes
    drain = Drain(fakes.control, fakes.control_state, fakes.metrics.traffic, 0.2)
    drain.begin()
    begun = asyncio.get_running_loop().time()
    drain.begin()  # asking again does not begin again
    await drain.wait_until_noticed()
    assert asyncio.get_running_loop().time() - begun > 0.19  # a clock of milliseconds
    assert await drain.wait_until_finished(30) == 0
