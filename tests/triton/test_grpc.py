"""What goes to Triton and comes back, against a gRPC server that says what it was asked."""

import asyncio
import gc
import socket
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.core.calls import RpcCall
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.oom import Classifier
from adapter.core.record import LoadedFor, ModelRecord
from adapter.core.triton_errors import Faults
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from adapter.frontends.grpc.messages import forwarded
from adapter.triton.grpc import MOST_UNANSWERED, GrpcDataPlane
from tests.fakes.grpc_triton import Act, dataplane_to
from tests.fakes.lease import FakeLease, LeaseState
from tests.fakes.unread import unread
from tests.frontends.http.listener import until


def lease() -> FakeLease:
    record = ModelRecord(
        ModelId("team/a"), TritonName("ta.u.team_2fa"), ModelSource("/x"), LoadedFor.PLATFORM
    )
    held = FakeLease(record)
    held.begin()
    return held


def call_with(seconds: float | None = None, **metadata: str) -> RpcCall:
    return RpcCall("ModelInfer", tuple(metadata.items()), seconds)


def failing(code: grpc.StatusCode, text: str) -> Act:
    async def act(_: bytes, context: Any) -> None:
        await context.abort(code, text)

    return act


def test_what_concerns_one_hop_is_not_passed_on():
    kept = [("traceparent", "00-ab-cd-01"), ("authorization", "x"), ("x-bin", b"\x00")]
    dropped = [("mm-model-id", "m"), ("mm-vmodel-id", "v"), ("grpc-accept-encoding", "gzip")]
    dropped += [("user-agent", "me"), ("te", "trailers"), ("content-type", "application/grpc")]
    assert forwarded([*dropped, *kept]) == kept


@pytest.mark.parametrize(
    ("caller", "ours", "expected"),
    [
        (0.2, 60, "the caller's deadline has passed"),
        (None, 0.3, r"no answer from Triton within 0\.3 s"),
        (60.0, 0.1, r"no answer from Triton within 0\.1 s"),
    ],
)
async def test_shorter_time_limit_counts(caller, ours, expected):
    left: list[float | None] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def act(_: bytes, context: Any) -> bytes:
        left.append(context.time_remaining())
        begun.set()
        await gate.wait()
        return b""

    async with dataplane_to(act, timeout_seconds=ours) as dataplane:
        with pytest.raises(BackendTimeout, match=f"^{expected}$"):
            await dataplane.call(call_with(caller), b"", lease())
        await asyncio.wait_for(begun.wait(), 5)  # it may be on its way still
        gate.set()
    assert left == [None]


@pytest.mark.parametrize("ending", ["left", "late"])
async def test_call_without_caller_lasts_until_tritons_answer(ending):
    begun, gate, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    outcome = []

    async def act(_: bytes, __: Any) -> bytes:
        begun.set()
        try:
            await gate.wait()
            outcome.append("answered")
        except asyncio.CancelledError:
            outcome.append("cancelled")
            raise
        finally:
            ended.set()
        return b""

    held = lease()
    async with dataplane_to(act, timeout_seconds=60) as dataplane:
        call = call_with(0.2 if ending == "late" else None)
        asked = asyncio.create_task(dataplane.call(call, b"", held))
        await asyncio.wait_for(begun.wait(), 5)
        if ending == "left":
            asked.cancel()
        with pytest.raises((asyncio.CancelledError, BackendTimeout)):
            await asked
        assert (held.state, outcome) == (LeaseState.ABANDONED, [])
        gate.set()
        await asyncio.wait_for(ended.wait(), 5)
        await until(lambda: held.state == LeaseState.ENDED)
    assert outcome == ["answered"]


async def test_caller_leaving_at_failure_leaves_nothing():
    gc.freeze()  # what is there already is not looked at
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    held = lease()
    async with dataplane_to(failing(grpc.StatusCode.INVALID_ARGUMENT, "no inputs")) as dataplane:
        others = asyncio.all_tasks()
        asked = asyncio.create_task(dataplane.call(call_with(), b"", held))
        await asyncio.sleep(0)
        begun = asyncio.all_tasks() - others
        last = max(begun, key=lambda task: int(task.get_name().removeprefix("Task-")))
        last.add_done_callback(lambda _: asked.cancel())
        del begun, last
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: held.state == LeaseState.ENDED)
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        ("NOT_FOUND", "Request for unknown model: 'ta.u.team_2fa' is not found", ModelNotFound),
        ("UNAVAILABLE", "Exceeds maximum queue size", Overloaded),
        ("UNAVAILABLE", "Socket closed", BackendUnavailable),
        ("INTERNAL", "Internal error from Core", BackendUnavailable),  # grpcio's own word
        ("CANCELLED", "the model gave up", InferenceFailed),
        ("INTERNAL", "ta.u.team_2fa: boom " + "x" * 300_000, InferenceFailed),
    ],
)
async def test_failures_name_the_model_as_callers_do(code, text, expected):
    async with dataplane_to(failing(grpc.StatusCode[code], text)) as dataplane:
        with pytest.raises(expected) as raised:
            await dataplane.call(call_with(), b"", lease())
    assert type(raised.value) is expected
    assert raised.value.model_id == "team/a"
    assert text.replace("ta.u.team_2fa", "team/a") in str(raised.value)


async def test_answer_over_limit_is_failure_not_memory():
    async def act(_: bytes, __: Any) -> bytes:
        return bytes(2000)

    async with dataplane_to(act, max_message_bytes=1000) as dataplane:
        with pytest.raises(InferenceFailed, match=r"answer is too large.*2000 vs\. 1000"):
            await dataplane.call(call_with(), bytes(100_000), lease())


async def test_metadata_refused_by_triton_are_callers_fault():
    async def act(_: bytes, __: Any) -> bytes:
        return b""

    async with dataplane_to(act) as dataplane:
        with pytest.raises(InvalidRequest, match=r"^the request's metadata are more than Triton"):
            await dataplane.call(call_with(long="x" * 40_000), b"", lease())
        stream = RpcCall("ModelStreamInfer", (("long", "x" * 40_000),), None)
        async with dataplane.stream(stream, lease()) as upstream:
            with pytest.raises(InvalidRequest, match=r"^the request's metadata are more than"):
                _ = [message async for message in upstream.messages()]


async def test_too_large_answer_metadata_blame_no_caller():
    async def act(_: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("long", "x" * 5 * 2**20),))
        return b""

    async with dataplane_to(act) as dataplane:
        with pytest.raises(InferenceFailed, match="answer is too large"):
            await dataplane.call(call_with(), b"", lease())


async def test_without_a_triton_nothing_was_delivered():
    dataplane = GrpcDataPlane(
        Faults(Classifier(())), timeout_seconds=5, max_message_bytes=2**20, unread=unread()
    )
    with pytest.raises(BackendUnavailable, match="not up yet"):
        await dataplane.call(call_with(), b"", lease())
    dataplane.connect("127.0.0.1:1")
    try:
        with pytest.raises(BackendUnavailable) as raised:
            await dataplane.call(call_with(), b"", lease())
    finally:
        await dataplane.close()
    assert not raised.value.delivered


async def read_to_end(connection: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(connection, 1024):
        pass


async def test_busy_triton_has_time_to_accept_a_connection():
    """The library gives up an attempt as early as its option of reconnects says."""
    loop = asyncio.get_running_loop()
    dataplane = GrpcDataPlane(
        Faults(Classifier(())), timeout_seconds=5, max_message_bytes=2**20, unread=unread()
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        dataplane.connect(f"127.0.0.1:{server.getsockname()[1]}")
        call = asyncio.create_task(dataplane.call(call_with(), b"", lease()))
        connection, _ = await loop.sock_accept(server)
        with connection, pytest.raises(TimeoutError):
            await asyncio.wait_for(read_to_end(connection), 0.5)
    with pytest.raises(BackendUnavailable):
        await call
    await dataplane.close()


# -- streams --------------------------------------------------------------------------------

STREAM = RpcCall("ModelStreamInfer", (("mine", "x"),), None)


async def relay_twice(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in requests:
        yield message
        yield message[::-1]


def once_each() -> FakeLease:
    """Lease a model that answers each request once."""
    held = lease()
    held.record.is_decoupled = False
    return held


def infer(request_id: str, **parameters: str) -> tuple[bytes, bytes]:
    request = pb.ModelInferRequest(model_name="ta.u.team_2fa", id=request_id)
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request.SerializeToString(), request_id.encode()


class Gates:
    """Answers each inference when its gate opens."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def act(self, message: bytes, context: Any) -> bytes:
        request = pb.ModelInferRequest.FromString(message)
        self.begun.append(request.id)
        await self.gates[request.id].wait()
        answer = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
        return answer.SerializeToString()


async def test_stream_of_coupled_model_answers_in_order():
    triton, held = Gates(), once_each()
    async with dataplane_to(triton.act) as dataplane, dataplane.stream(STREAM, held) as stream:
        for name, text in {"a": "", "b": "a message too large to be kept" * 2**12, "c": ""}.items():
            await stream.write(*infer(name, text=text))
        await until(lambda: sorted(triton.begun) == ["a", "b", "c"])
        for name in "cba":
            triton.gates[name].set()
        await stream.done_writing()
        told = [pb.ModelStreamInferResponse.FromString(m) async for m in stream.messages()]
    assert [each.infer_response.id for each in told] == ["a", "b", "c"]
    assert all(each.infer_response.parameters["triton_final_response"].bool_param for each in told)


async def test_requests_of_a_sequence_go_one_by_one():
    triton = Gates()
    async with (
        dataplane_to(triton.act) as dataplane,
        dataplane.stream(STREAM, once_each()) as stream,
    ):
        await stream.write(*infer("a", sequence_id="s"))
        writing = asyncio.create_task(stream.write(*infer("b", sequence_id="s")))
        await until(lambda: triton.begun == ["a"])
        await asyncio.sleep(0)
        assert not writing.done()
        triton.gates["a"].set()
        await writing
        await until(lambda: triton.begun == ["a", "b"])
        triton.gates["b"].set()
        await stream.done_writing()
        assert len([message async for message in stream.messages()]) == 2


async def test_write_waits_for_unanswered_inferences():
    triton = Gates()
    async with (
        dataplane_to(triton.act) as dataplane,
        dataplane.stream(STREAM, once_each()) as stream,
    ):
        for number in range(MOST_UNANSWERED):
            await stream.write(*infer(str(number)))
        writing = asyncio.create_task(stream.write(*infer("last")))
        done, _ = await asyncio.wait({writing}, timeout=0.2)
        assert not done
        triton.gates["0"].set()
        await writing
        for gate in [str(number) for number in range(MOST_UNANSWERED)] + ["last"]:
            triton.gates[gate].set()
        await stream.done_writing()
        assert len([m async for m in stream.messages()]) == MOST_UNANSWERED + 1


@pytest.mark.parametrize(
    ("code", "name"),
    [(grpc.StatusCode.INTERNAL, "ta.u.team_2fa"), (grpc.StatusCode.INVALID_ARGUMENT, "")],
)
async def test_failed_inference_does_not_end_its_stream(code, name):
    async with (
        dataplane_to(failing(code, "boom")) as dataplane,
        dataplane.stream(STREAM, once_each()) as stream,
    ):
        for request_id in "ab":
            await stream.write(*infer(request_id))
        await stream.done_writing()
        told = [pb.ModelStreamInferResponse.FromString(m) async for m in stream.messages()]
    assert [(e.error_message, e.infer_response.id) for e in told] == [("boom", "a"), ("boom", "b")]
    assert {each.infer_response.model_name for each in told} == {name}


async def test_full_stream_losing_triton_leaves_no_task():
    lost = asyncio.Event()

    async def act(_: bytes, context: Any) -> bytes:
        await lost.wait()
        return await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    before = asyncio.all_tasks()
    async with (
        dataplane_to(act) as dataplane,
        dataplane.stream(STREAM, once_each()) as stream,
    ):
        for number in range(MOST_UNANSWERED):
            await stream.write(*infer(str(number)))
        writing = asyncio.create_task(stream.write(*infer("last")))
        lost.set()
        with pytest.raises(BackendUnavailable):
            _ = [message async for message in stream.messages()]
        await writing
        await stream.done_writing()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_left_streams_inferences_go_on_until_answered():
    triton, held = Gates(), once_each()
    async with dataplane_to(triton.act) as dataplane:
        async with dataplane.stream(STREAM, held) as stream:
            await stream.write(*infer("a"))
            await until(lambda: triton.begun == ["a"])
        assert held.state == LeaseState.ABANDONED
        triton.gates["a"].set()
        await until(lambda: held.state == LeaseState.ENDED)


async def test_stream_asks_whether_its_model_is_decoupled():
    held = lease()
    async with dataplane_to(relay_twice) as dataplane, dataplane.stream(STREAM, held) as stream:
        await stream.done_writing()
    assert held.record.is_decoupled


async def test_abandoned_stream_goes_on_until_tritons_end():
    gate, seen = asyncio.Event(), []

    async def act(requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            await context.write(b"hello")
            seen.extend([message async for message in requests])  # no more come, and that is told
            await gate.wait()
            for _ in range(100):
                await context.write(bytes(10_000))
            seen.append("ended")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    held = lease()
    async with dataplane_to(act) as dataplane:
        async with dataplane.stream(STREAM, held) as stream:
            await stream.write(b"ab")
            messages = stream.messages()
            assert await anext(messages) == b"hello"
            reading = asyncio.create_task(anext(messages))
            await asyncio.sleep(0)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
        assert held.state == LeaseState.ABANDONED
        gate.set()
        await until(lambda: held.state == LeaseState.ENDED)
    assert seen == [b"ab", "ended"]


async def test_stream_hides_callers_deadline_from_triton():
    async def act(_: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        left = context.time_remaining()
        yield b"none" if left is None else str(round(left)).encode()

    call = RpcCall("ModelStreamInfer", (), 7.0)
    async with (
        dataplane_to(act, timeout_seconds=3) as dataplane,
        dataplane.stream(call, lease()) as stream,
    ):
        assert [message async for message in stream.messages()] == [b"none"]


def many(count: int, size: int, sent: list[int]) -> Any:
    """Answer so often, and end; `sent` gets each number once the answer is on its way."""

    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(aiter(requests))
        for number in range(count):
            yield bytes(size)
            sent.append(number)

    return act


async def test_streams_answers_are_read_without_a_reader():
    sent: list[int] = []
    async with (
        dataplane_to(many(64, 2**18, sent)) as dataplane,
        dataplane.stream(STREAM, lease()) as stream,
    ):
        await stream.write(b"ab")
        await until(lambda: len(sent) == 64)
        assert len([message async for message in stream.messages()]) == 64
