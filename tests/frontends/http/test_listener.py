"""What callers of the http listener meet, at an inference and at a call that a handler answers."""

import asyncio
import re
import sys

import pytest

from adapter.core.states import ModelState
from adapter.frontends.http.server import Connections
from tests.fakes.http_triton import OK, reads_itself, says
from tests.frontends.http.listener import (
    HANDLED,
    MIB,
    PATHS,
    PLANNED,
    both,
    head,
    opened,
    request,
    turns,
    until,
)

CHUNKED = "Transfer-Encoding: chunked"
CLOSE = "Connection: close"
STATUS = re.compile(rb"HTTP/1.1 [0-9]+")
KEEP = "Connection: keep-alive"


@pytest.mark.parametrize("path", [HANDLED, "/models/other/invoke", "no-path"])
async def test_json_of_the_adapter_ends_its_line(listener, caller, path):
    assert (await caller.ask(request(path))).body.endswith(b"}\n")


JAVA = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
# version, fields, what the answer says of the connection, and whether it is kept
WISHES = [
    ("1.1", (), None, True),
    ("1.1", (CLOSE,), "close", False),
    ("1.1", ("Connection: keep-alive, close",), "close", False),
    ("1.1", ("Connection: x", "connection: CLOSE"), "close", False),
    ("1.1", JAVA, None, True),  # no upgrade is made
    ("1.1", ("Connection: close, Upgrade", "Upgrade: h2c"), "close", False),
    ("1.0", (), "close", False),
    ("1.0", (KEEP,), "keep-alive", True),
    ("1.0", ("Connection: keep-alive, close",), "close", False),
]


@both
@pytest.mark.parametrize(("version", "fields", "told", "is_kept"), WISHES)
async def test_connection_is_kept_as_its_caller_wants(
    listener, caller, *, path, version, fields, told, is_kept
):
    found = await caller.ask(request(path, b"{}", *fields, version=version))
    assert (found.status, found.headers.get("connection")) == (200, told)
    assert "server" not in found.headers
    assert listener.whole_requests() + listener.bodies == [b"{}"]
    if is_kept:
        assert (await caller.ask(request(path))).status == 200
    else:
        assert await caller.rest() == b""


async def test_http_1_0_answer_ends_with_the_connection(listener, caller):
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    listener.upstream.script = says(answer)
    found = await caller.ask(request(PLANNED, b"{}", KEEP, version="1.0"))
    assert (found.body, found.headers.get("connection")) == (b"ab", "close")
    assert "transfer-encoding" not in found.headers


@both
async def test_pipelined_request_waits_for_the_answer(listener, caller, path):
    await listener.hold(caller, path, request(HANDLED, b"next"))
    await turns(20)
    assert b"next" not in listener.bodies
    listener.gate.set()
    assert [(await caller.answer()).status for _ in range(2)] == [200, 200]
    assert listener.bodies[-1] == b"next"


@both
async def test_what_waits_is_bounded(listener, caller, path):
    await listener.hold(caller, path)
    sent = 0
    more = request(HANDLED) * 1000

    async def send_on() -> None:
        nonlocal sent
        for _ in range(2000):
            await caller.send(more)
            sent += len(more)

    sending = asyncio.create_task(send_on())
    await until(lambda: not listener.connection.transport.is_reading())
    await turns(100)
    assert len(listener.connection.ahead) < MIB
    assert not sending.done()
    sending.cancel()
    caller.reset()
    listener.gate.set()


async def test_stop_removes_the_unix_socket(tmp_path):
    path = tmp_path / "socket"
    async with opened(where=f"unix:{path}"):
        assert path.is_socket()
    assert not path.exists()


async def test_what_waits_does_not_grow_with_each_answer(tmp_path):
    async with opened(where=f"unix:{tmp_path / 'socket'}") as listener:
        caller = await listener.connect()
        one = request(HANDLED, b"{}", *(f"a{i}: {'x' * 100}" for i in range(120)))
        sent = one * 40 + request("/app/gate") + one * 400
        caller.writer.write(sent)
        for _ in range(40):
            assert (await caller.answer()).status == 200
        await listener.reached.wait()
        await turns(100)
        taken = len(sent) - caller.writer.transport.get_write_buffer_size()
        assert taken - 40 * len(one) < MIB
        caller.reset()
        listener.gate.set()


@both
async def test_paused_caller_is_read_again(listener, caller, path):
    held_back = request(path, bytes(100_000))
    await caller.send(request(await listener.waiting(path)) + held_back)
    await until(lambda: not listener.connection.transport.is_reading())
    listener.gate.set()
    assert [(await caller.answer()).status for _ in range(2)] == [200, 200]
    assert (await caller.ask(request(path))).status == 200


async def test_renamed_answer_keeps_nothing_of_the_former(listener):
    listener.contracts.sagemaker.renames = True
    caller = await listener.connect()
    for byte in (b"a", b"b"):

        async def script(talk, body=byte * MIB):
            await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
            await talk.say(body)

        listener.upstream.script = script
        assert (await caller.ask(request(PLANNED))).body == byte * MIB


@pytest.mark.parametrize("sends_again", [False, True])
async def test_a_connection_keeps_no_body_that_is_answered(listener, monkeypatch, sends_again):
    """As long as it is idle, and there may be thousands."""
    listener.contracts.sagemaker.sends_again = sends_again
    bodies = []
    monkeypatch.setattr(
        listener.server.parts.dataplane, "check", lambda body, *_, **__: bodies.append(body)
    )
    caller = await listener.connect()
    assert (await caller.ask(request(PLANNED, b"x" * 1000))).status == 200
    (body,), bare = bodies, bytes(1000)
    bodies.clear()
    await until(lambda: sys.getrefcount(body) == sys.getrefcount(bare))


@pytest.mark.parametrize(
    ("path", "is_chunked", "is_one_read"),
    [(path, False, one) for path in PATHS for one in (True, False)]
    + [(HANDLED, True, one) for one in (True, False)],
)
async def test_what_waits_on_all_connections_is_bounded(path, is_chunked, is_one_read):
    """Without room a connection ends with the answer."""
    shed: list[str] = []
    connections = Connections(on_shed=shed.append)
    async with opened(inflight_bytes=MIB // 2, connections=connections) as listener:
        budget, target = listener.budget, await listener.waiting(path)
        first, more = request(target), request(HANDLED, bytes(60_000))
        if is_chunked:
            first = head(target, CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n"
        callers = []
        for _ in range(12):
            callers.append(caller := await listener.connect())
            if is_one_read:
                await caller.send(first + more)
            else:
                await caller.send(first)
                await until(lambda: listener.in_hand(path) == len(callers))
                await caller.send(more)
            await until(lambda: budget.held // len(more) + len(shed) == len(callers))
        assert shed == ["pipelined"] * 4
        listener.gate.set()
        served, cut = callers[:8], callers[8:]
        for caller in served:
            assert [(await caller.answer()).status for _ in range(2)] == [200, 200]
        for caller in cut:
            statuses = [int(line.split()[1]) for line in STATUS.findall(await caller.rest())]
            assert statuses == [200]


@both
@pytest.mark.parametrize("ending", [b"0\r\n\r\n", b"0;a=b\r\nx: y\r\n\r\n"])
async def test_a_chunked_body_is_a_body(listener, caller, path, ending):
    raw = head(path, CHUNKED) + b"1\r\n{\r\n2;ext=1\r\n }\r\n" + ending
    for pieces in ([raw], [raw[at : at + 1] for at in range(len(raw))]):
        for piece in pieces:
            await caller.send(piece)
            await asyncio.sleep(0)
        assert (await caller.answer()).status == 200
    assert (await caller.ask(raw + request(HANDLED, b"x"))).status == 200
    assert (await caller.answer()).status == 200
    seen = listener.whole_requests() + listener.bodies
    assert seen == ([b"{ }"] * 3 + [b"x"])


@both
async def test_an_empty_body_is_one_too(listener, caller, path):
    """Where an inference needs one it is refused as a whole request, and the next one is read."""
    status = 400 if path.endswith("/invoke") else 200
    for raw in (request(path, b""), head(path), head(path, CHUNKED) + b"0\r\n\r\n"):
        assert (await caller.ask(raw)).status == status


@both
async def test_unknown_expectation_is_ignored(listener, caller, path):
    """Serve the request, as nginx does; RFC 9110 allows 417."""
    assert (await caller.ask(request(path, b"{}", "Expect: another"))).status == 200
    for request_of_triton in listener.upstream.requests:
        assert b"another" not in request_of_triton.head


@both
async def test_no_100_for_old_http_or_sent_body(listener, caller, path):
    assert (await caller.ask(request(path, b"{}", "Expect: 100-continue"))).status == 200
    raw = request(path, b"{}", "Expect: 100-continue", version="1.0")
    await caller.send(raw[:-2])
    await asyncio.sleep(0)
    assert (await caller.ask(raw[-2:])).status == 200


async def test_refused_request_has_no_100_and_ends(listener, caller):
    expecting = head("/models/other/invoke", "Content-Length: 2", "Expect: 100-continue")
    found = await caller.ask(expecting)
    assert found.refusal == (404, "ModelNotFound")
    assert found.headers["connection"] == "close"
    assert await caller.rest() == b""


@both
async def test_head_answer_has_no_body(listener, caller, path):
    await caller.send(head(path, method="HEAD") + request(path))
    found = await caller.head()
    assert found.status == 200
    assert (await caller.answer()).status == 200


@both
async def test_empty_body_is_not_asked_for(path):
    """The bytes behind it belong to the next request."""
    async with opened() as listener, asyncio.timeout(10):
        caller = await listener.connect()
        empty = head(path, "Content-Length: 0", "Expect: 100-continue")
        await caller.send(empty + request(HANDLED))
        assert (await caller.answer()).status != 100
        assert (await caller.answer()).status == 200


async def test_differing_headers_are_each_requests_own():
    """The rest of the head is kept for both."""
    async with opened() as listener:
        caller = await listener.connect()
        for name in ("one", "two"):
            fields = (f"Authorization: {name}", f"traceparent: 00-{name}")
            assert (await caller.ask(request(HANDLED, b"{}", *fields))).status == 200
            headers = listener.seen[-1].headers
            assert (headers["Authorization"], headers["traceparent"]) == (name, f"00-{name}")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_answer_is_passed_on_piece_by_piece(listener, caller, is_chunked):
    frame = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: 3145728"
    piece = b"100000\r\n" + bytes(MIB) + b"\r\n" if is_chunked else bytes(MIB)
    go_on = asyncio.Event()

    async def script(talk):
        await talk.say(b"HTTP/1.1 200 OK\r\n" + frame + b"\r\n\r\n" + piece)
        await go_on.wait()
        await talk.say(piece * 2 + (b"0\r\n\r\n" if is_chunked else b""))

    listener.upstream.script = script
    await caller.send(request(PLANNED))
    found = await caller.head()
    assert ("transfer-encoding" in found.headers) == is_chunked
    if is_chunked:
        size = len(await caller.chunk())
        go_on.set()
        while some := await caller.chunk():
            size += len(some)
        assert size == 3 * MIB
    else:
        await caller.reader.readexactly(MIB // 2)
        go_on.set()
        await caller.reader.readexactly(3 * MIB - MIB // 2)
    assert (await caller.ask(request(HANDLED))).status == 200


@pytest.mark.parametrize("path", [PLANNED, "/app/echo"])
async def test_slow_reader_holds_triton_back(listener, path):
    size = 48 * MIB
    sent = 0

    async def script(talk):
        nonlocal sent
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(size // MIB):
            await talk.say(bytes(MIB))
            sent += MIB

    listener.upstream.script = script
    caller = await listener.connect(limit=2**16)
    await caller.send(request(path, b"{}" if path == PLANNED else bytes(size)))
    await until(lambda: listener.connection.is_full)
    await turns(200)
    if path == PLANNED:
        assert sent < 32 * MIB
    found = await caller.answer()
    assert len(found.body) == size


@pytest.mark.parametrize("path", [PLANNED, "/app/late"])
async def test_unread_body_holds_the_caller_back(listener, caller, path):
    async def script(talk):
        await listener.gate.wait()
        await talk.reader.readexactly(48 * MIB)
        await talk.say(OK)

    listener.upstream.script = reads_itself(script)
    sending = asyncio.create_task(caller.send(request(path, bytes(48 * MIB))))
    await until(lambda: listener.server._connections)
    await until(lambda: not listener.connection.transport.is_reading())
    await turns(200)
    assert not sending.done()
    listener.gate.set()
    assert (await caller.answer()).status == 200
    await sending


@pytest.mark.parametrize("field", ["a: b", "Authorization: b"])
@both
async def test_more_than_128_headers_are_refused(listener, path, field):
    """Headers that differ from request to request, by which no head is kept, count as well."""
    for more, status in ((126, 200), (127, 400)):
        caller = await listener.connect()
        found = await caller.ask(request(path, b"{}", *[field] * more))
        assert found.status == status


async def test_lost_model_is_unavailable_while_returning(listener):
    listener.fakes.load_lost_again()
    lost = b'{"error":"Request for unknown model: \'m\' is not found"}'
    asked = listener.upstream.script
    listener.upstream.script = says(
        b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(lost) + lost
    )
    listener.fakes.triton.models.clear()
    caller = await listener.connect()
    found = await caller.ask(request(PLANNED))
    assert (found.status, found.json()["code"]) == (503, "ModelNotReady")
    await until(lambda: "m" in listener.fakes.triton.models)
    await listener.fakes.until_state("m", ModelState.READY)
    listener.upstream.script = asked
    assert (await caller.ask(request(PLANNED))).status == 200
