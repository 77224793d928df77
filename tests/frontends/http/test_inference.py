"""Inferences that are answered by hand, whatever their body comes in, and how they fail."""

import asyncio
import gc
import gzip
import weakref
import zlib
from dataclasses import replace

import pytest

from adapter.control.door import Lease
from adapter.control.triton import RequestFailures
from adapter.core.model import ModelId
from adapter.core.record import LoadedFor
from adapter.core.tensors import ContentTypes, Tensor
from adapter.errors import CapacityError, OutOfMemory
from adapter.frontends.http.connection import Request
from tests.fakes.http_triton import Talk, says
from tests.frontends.http.listener import MIB, PLANNED, head, opened, request, until

V2 = "/v2/models/m/infer"
CHUNKED = "Transfer-Encoding: chunked"
BODY = b'{"inputs":[]}'
ANSWER = b'{"model_name":"m","outputs":[]}'
# A field that comes twice: an inference whose head has it is answered by a handler.
HANDLED_FIELDS = ("X-A: 1", "X-A: 2")
CSV = ContentTypes(
    ("text/csv",),
    options=frozenset(),
    is_batched=False,
    input=Tensor("IN", "FP32", (-1, -1)),
    outputs=(),
)


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def answer(talk: Talk) -> None:
    await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER))


@pytest.mark.parametrize("path", [PLANNED, V2])
@pytest.mark.parametrize(
    "asked",
    [
        (gzip.compress(BODY), "Content-Encoding: gzip"),
        (zlib.compress(BODY), "Content-Encoding: deflate"),
        (BODY, "Content-Encoding: identity"),
        (BODY, "TE: trailers"),
        (BODY, "Keep-Alive: timeout=5"),
        (BODY, "Connection: close"),
        (BODY, "Connection: Upgrade", "Upgrade: h2c"),
        (BODY, "Expect: 100-continue"),
    ],
    ids=lambda asked: asked[-1],
)
async def test_inference_is_answered_by_hand_whatever_its_head(listener, caller, path, asked):
    body, *fields = asked
    assert (await caller.ask(request(path, body, *fields))).status == 200
    assert listener.handled == []
    assert listener.whole_requests() == [body]


@pytest.mark.parametrize("target", ["/models/%6d/invoke", PLANNED + "/", PLANNED + "?a=b"])
async def test_inference_is_answered_by_hand_whatever_its_target(listener, caller, target):
    for path in (target, f"http://localhost{target}"):
        assert (await caller.ask(request(path))).status == 200
    assert listener.handled == []


@pytest.mark.parametrize("path", [PLANNED, V2])
@pytest.mark.parametrize("authority", ["x?a=b", "x:80?", "x?://"])
async def test_query_is_no_path_in_absolute_form(listener, caller, path, authority):
    """A proxy that allows or refuses paths reads `http://x?a/models/m/invoke` as the path `/`."""
    assert (await caller.ask(request(f"http://{authority}{path}"))).status == 200
    assert len(listener.handled) == 1
    assert listener.upstream.requests == []


async def test_chunks_above_the_limit_are_refused(listener):
    listener.server.parts.max_body_bytes = 1000
    caller = await listener.connect()
    await caller.send(head(PLANNED, CHUNKED) + b"3e9\r\n")
    found = await caller.ask(b"x" * 1001)
    assert found.refusal == (413, "PayloadTooLarge")
    assert await caller.rest() == b""
    assert not listener.whole_requests()


@pytest.mark.parametrize("levels", [5000, 300_000], ids=["at once", "in a task"])
async def test_compressed_json_that_would_end_triton_is_refused(listener, caller, levels):
    body = gzip.compress(b"[" * levels)
    found = await caller.ask(request(PLANNED, body, "Content-Encoding: gzip"))
    assert found.refusal == (400, "InvalidRequest")
    assert not listener.upstream.requests
    assert (await caller.ask(request(PLANNED))).status == 200


async def test_large_compressed_body_is_passed_on(listener, caller):
    body = gzip.compress(b"[" + b"1.5," * MIB + b"1]")
    assert (await caller.ask(request(PLANNED, body, "Content-Encoding: gzip"))).status == 200
    assert listener.whole_requests() == [body]


async def test_lease_begins_when_its_wait_ends(listener, monkeypatch):
    """An unload in the next turn would find no request, as the coroutine is stepped after it."""
    in_flight: list[int] = []

    async def wait_for_lease(model_id: ModelId, _: Request) -> Lease:
        lease: Lease = listener.fakes.control.lease(model_id)
        asyncio.get_running_loop().call_soon(lambda: in_flight.append(listener.in_flight()))
        return lease

    monkeypatch.setattr(listener.contracts.sagemaker, "find_lease", lambda _: None)
    monkeypatch.setattr(listener.contracts.sagemaker, "wait_for_lease", wait_for_lease)
    caller = await listener.connect()
    assert (await caller.ask(request(PLANNED))).status == 200
    assert in_flight == [1]


async def test_body_is_converted_after_a_wait(listener, monkeypatch):
    """Whether the model converts it is known once it is loaded: Triton takes CSV for no JSON. One
    wait has loaded it; a second one would be told that it was loaded before.
    """
    listener.upstream.script = answer
    fakes = listener.fakes
    waited: list[ModelId] = []

    async def wait_for_lease(model_id: ModelId, _: Request) -> Lease:
        waited.append(model_id)
        return fakes.control.lease(model_id)

    record = fakes.control.registry.serving(ModelId("m"))
    record.package = replace(record.inspected, content_types=CSV)
    monkeypatch.setattr(listener.contracts.sagemaker, "find_lease", lambda _: None)
    monkeypatch.setattr(listener.contracts.sagemaker, "wait_for_lease", wait_for_lease)
    caller = await listener.connect()
    assert (await caller.ask(request(PLANNED, b"1,2\n", "Content-Type: text/csv"))).status == 200
    [body] = listener.whole_requests()
    assert b'"datatype":"FP32","shape":[1,2]' in body
    assert waited == ["m"]


async def test_converted_answer_that_breaks_is_503(listener, caller):
    """Nothing of the answer was sent when it broke off."""
    fields = b"Content-Length: %d\r\nInference-Header-Content-Length: 9" % (2 * MIB)
    listener.upstream.script = says(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n{" % fields, closes=True)
    record = listener.fakes.control.registry.serving(ModelId("m"))
    record.package = replace(record.inspected, content_types=CSV)
    kinds = ("Content-Type: text/csv", "Accept: application/x-npy")
    found = await caller.ask(request(PLANNED, b"1,2\n", *kinds))
    assert found.refusal == (503, "BackendUnavailable")


async def test_answer_to_convert_is_asked_for_unpacked(listener, caller):
    """Triton would pack it as the caller likes it, and nobody here could read it."""
    listener.upstream.script = answer
    record = listener.fakes.control.registry.get(ModelId("m"))
    record.package = replace(record.inspected, content_types=CSV)
    kinds = ("Content-Type: text/csv", "Accept-Encoding: gzip")
    assert (await caller.ask(request(PLANNED, b"1,2\n", *kinds))).status == 200
    (asked,) = listener.upstream.requests
    assert b"accept-encoding: gzip" not in asked.head.lower()


async def test_renamed_model_is_answered_under_its_name(listener):
    listener.upstream.script = answer
    record = listener.fakes.control.registry.get(ModelId("m"))
    record.name = "other"
    caller = await listener.connect()
    found = await caller.ask(request(PLANNED, BODY, "Accept-Encoding: gzip"))
    assert found.json()["model_name"] == "m"
    (asked,) = listener.upstream.requests
    assert asked.head.startswith(b"POST /v2/models/other/infer HTTP/1.1\r\n")
    assert b"accept-encoding" not in asked.head.lower()
    record.name = "m"


@pytest.mark.parametrize("fields", [(), HANDLED_FIELDS], ids=["planned", "handled"])
async def test_renamed_answer_waits_for_its_caller(listener, fields):
    """Otherwise a few callers who read slowly fill the memory of the adapter."""
    text = b'{"model_name":"%b","outputs":[]}'
    sent = []

    async def answer_at_length(talk: Talk) -> None:
        begin = text % b"other"
        lengths = (len(begin), len(begin) + 64 * MIB)
        fields = b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % lengths
        await talk.say(b"HTTP/1.1 200 OK\r\n" + fields + begin)
        for _ in range(64):
            await talk.say(bytes(MIB))
            sent.append(MIB)

    listener.upstream.script = answer_at_length
    record = listener.fakes.control.registry.get(ModelId("m"))
    record.name = "other"
    caller = await listener.connect()
    await caller.send(request(V2, BODY, *fields))
    await asyncio.sleep(0.5)
    assert len(sent) < 32
    found = await caller.answer()
    named = text % b"m"
    assert found.headers["inference-header-content-length"] == str(len(named))
    assert found.body == named + bytes(64 * MIB)
    record.name = "m"


async def test_wait_for_a_model_counts_as_no_overhead(monkeypatch):
    """The figures would say that the adapter itself took so long."""

    async def wait_for_lease(model_id: ModelId, _: Request) -> Lease:
        lease: Lease = listener.fakes.control.lease(model_id)
        return lease

    async with opened() as listener:
        caller = await listener.connect()
        with monkeypatch.context() as loading:
            loading.setattr(listener.contracts.sagemaker, "find_lease", lambda _: None)
            loading.setattr(listener.contracts.sagemaker, "wait_for_lease", wait_for_lease)
            assert (await caller.ask(request(PLANNED))).status == 200
        assert listener.served("sagemaker", "invoke").answers == 0
        assert (await caller.ask(request(PLANNED))).status == 200
        assert listener.served("sagemaker", "invoke").answers == 1


async def test_slow_converted_body_is_the_callers_time():
    """It is gathered before the model is known to convert it."""
    async with opened(answer) as listener:
        record = listener.fakes.control.registry.serving(ModelId("m"))
        record.package = replace(record.inspected, content_types=CSV)
        caller = await listener.connect()
        now = asyncio.get_running_loop().time
        await caller.send(head(PLANNED, "Content-Type: text/csv", "Content-Length: 4") + b"1")
        await until(lambda: bool(listener.server._connections))
        [connection] = listener.server._connections
        await until(lambda: connection.request is not None)
        sent_at = now()
        await until(lambda: now() > sent_at + 0.1)
        assert (await caller.ask(b",2\n")).status == 200
        # the loop's clock is that of its last turn
        assert listener.served("sagemaker", "invoke").callers._sum > 0.05


async def test_client_leaving_while_waiting_ends_the_wait(listener, monkeypatch):
    ended = asyncio.Event()

    async def wait_for_lease(*_: object) -> Lease:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(listener.contracts.sagemaker, "find_lease", lambda _: None)
    monkeypatch.setattr(listener.contracts.sagemaker, "wait_for_lease", wait_for_lease)
    caller = await listener.connect()
    await caller.send(request(PLANNED))
    await until(lambda: listener.fakes.metrics.traffic.in_flight == 1)
    caller.reset()
    await ended.wait()
    await listener.until_lost()
    assert listener.fakes.metrics.traffic.in_flight == 0


async def test_lost_connection_is_freed_without_the_collector():
    """There may be thousands, and Python's garbage collector seldom looks at what is old."""
    gc.disable()
    try:
        async with opened() as listener:
            caller = await listener.connect()
            assert (await caller.ask(request(PLANNED))).status == 200
            connection = weakref.ref(*listener.server._connections)
            caller.reset()
            await listener.until_lost()
            await until(lambda: connection() is None)
    finally:
        gc.enable()


async def test_lost_model_of_a_call_is_waited_for(listener, monkeypatch):
    """Triton has exited with it, and the call is what loads it again from its store."""
    waited: list[ModelId] = []
    listener.upstream.script = answer
    fakes = listener.fakes

    async def wait_for_lease(model_id: ModelId, _: Request) -> Lease:
        waited.append(model_id)
        return fakes.control.lease(model_id)

    fakes.control.registry.serving(ModelId("m")).loaded_for = LoadedFor.CALLS
    monkeypatch.setattr(listener.contracts.v2, "wait_for_lease", wait_for_lease)
    caller = await listener.connect()
    assert (await caller.ask(request(V2, BODY))).status == 200
    with monkeypatch.context() as exited:
        exited.setattr(type(fakes.parts.status), "has_exited", property(lambda _: True))
        assert (await caller.ask(request(V2, BODY))).status == 200
    assert waited == ["m"]


async def test_begun_answer_is_never_sent_again(listener, monkeypatch):
    """Its client has some of it, behind which another answer would look like the rest."""

    async def judge(*_: object) -> OutOfMemory:
        return OutOfMemory("full")

    async def free_memory(_: CapacityError) -> bool:
        return True

    async def break_off(talk: Talk) -> None:
        await talk.say(b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + bytes(2_000_000))
        await listener.gate.wait()
        talk.writer.transport.abort()

    listener.upstream.script = break_off
    monkeypatch.setattr(RequestFailures, "judge", judge)
    monkeypatch.setattr(listener.contracts.sagemaker, "sends_again", True)
    monkeypatch.setattr(listener.contracts.sagemaker, "free_memory", free_memory)
    caller = await listener.connect(limit=2**23)
    await caller.send(request(PLANNED, BODY))
    assert (await caller.head()).status == 200
    listener.gate.set()
    assert len(await caller.rest()) < 5_000_000
    assert len(listener.upstream.requests) == 1
