"""What goes to Triton and comes back, against a gRPC server that says what it was asked."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from adapter.core.faults import Faults
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.oom import Classifier
from adapter.core.registry import ModelRecord
from adapter.core.rpc import RpcCall
from adapter.dataplane.grpc import GrpcDataPlane
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    ModelNotFound,
    Overloaded,
)
from adapter.frontends.grpc_naming import passed_on
from tests.v2.grpc_upstream import Act, dataplane_to

RECORD = ModelRecord(ModelId("team/a"), TritonName("ta.u.team_2fa"), ModelSource("/x"))


def call_with(seconds: float | None = None, **metadata: str) -> RpcCall:
    return RpcCall("ModelInfer", tuple(metadata.items()), seconds)


def failing(code: grpc.StatusCode, text: str) -> Act:
    async def act(_: bytes, context: Any) -> None:
        await context.abort(code, text)

    return act


async def test_bytes_and_metadata_pass_both_ways():
    seen: dict[str, Any] = {}

    async def act(message: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last-bin", b"\x00\xff"),))
        return message[::-1]

    async with dataplane_to(act) as dataplane:
        metadata = (
            ("traceparent", "00-ab-cd-01"),
            ("authorization", "x"),
            ("raw-bin", b"\xff\x00"),
        )
        answer = await dataplane.call(RpcCall("ModelInfer", metadata, None), b"\x00abc", RECORD)
    assert answer.message == b"cba\x00"
    assert ("first", "1") in answer.initial_metadata
    assert ("last-bin", b"\x00\xff") in answer.trailing_metadata
    assert dict(metadata).items() <= seen.items()


def test_what_concerns_one_hop_is_not_passed_on():
    kept = [("traceparent", "00-ab-cd-01"), ("authorization", "x"), ("x-bin", b"\x00")]
    dropped = [("mm-model-id", "m"), ("mm-vmodel-id", "v"), ("grpc-accept-encoding", "gzip")]
    dropped += [("user-agent", "me"), ("te", "trailers"), ("content-type", "application/grpc")]
    assert passed_on([*dropped, *kept]) == kept


@pytest.mark.parametrize(
    ("caller", "ours", "expected"), [(3.0, 60, 3.0), (None, 4, 4.0), (60.0, 5, 5.0)]
)
async def test_the_shorter_time_limit_counts(caller, ours, expected):
    left: list[float] = []

    async def act(_: bytes, context: Any) -> bytes:
        left.append(context.time_remaining())
        return b""

    async with dataplane_to(act, timeout_seconds=ours) as dataplane:
        await dataplane.call(call_with(caller), b"", RECORD)
    assert expected - 1 < left[0] < expected + 0.5


async def test_a_triton_that_does_not_answer_in_time():
    async def act(_: bytes, __: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with dataplane_to(act, timeout_seconds=0.2) as dataplane:
        with pytest.raises(BackendTimeout):
            await dataplane.call(call_with(), b"", RECORD)


async def test_a_caller_who_goes_away_cancels_the_call():
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def act(_: bytes, __: Any) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return b""

    async with dataplane_to(act) as dataplane:
        asked = asyncio.create_task(dataplane.call(call_with(), b"", RECORD))
        await asyncio.wait_for(begun.wait(), 5)
        asked.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await asked


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
async def test_failures_are_ours_and_name_the_model_as_the_caller_does(code, text, expected):
    async with dataplane_to(failing(grpc.StatusCode[code], text)) as dataplane:
        with pytest.raises(expected) as raised:
            await dataplane.call(call_with(), b"", RECORD)
    assert type(raised.value) is expected
    assert raised.value.model_id == "team/a"
    assert text.replace("ta.u.team_2fa", "team/a") in str(raised.value)


async def test_an_answer_over_the_limit_is_a_failure_and_no_lack_of_memory():
    async def act(_: bytes, __: Any) -> bytes:
        return bytes(2000)

    async with dataplane_to(act, max_message_bytes=1000) as dataplane:
        with pytest.raises(InferenceFailed, match=r"answer is too large.*2000 vs\. 1000"):
            await dataplane.call(call_with(), bytes(100_000), RECORD)


async def test_without_a_triton_nothing_was_delivered():
    dataplane = GrpcDataPlane(Faults(Classifier(())), timeout_seconds=5, max_message_bytes=2**20)
    with pytest.raises(BackendUnavailable, match="not up yet"):
        await dataplane.call(call_with(), b"", RECORD)
    dataplane.connect("127.0.0.1:1")
    try:
        with pytest.raises(BackendUnavailable) as raised:
            await dataplane.call(call_with(), b"", RECORD)
    finally:
        await dataplane.close()
    assert not raised.value.delivered


# -- streams --------------------------------------------------------------------------------

STREAM = RpcCall("ModelStreamInfer", (("mine", "x"),), None)


async def relay_twice(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in requests:
        yield message
        yield message[::-1]


async def test_a_stream_passes_messages_both_ways_until_both_ends_are_done():
    async with (
        dataplane_to(relay_twice) as dataplane,
        dataplane.stream(STREAM, lambda: None) as stream,
    ):
        messages = stream.messages()
        await stream.write(b"ab")
        assert [await anext(messages), await anext(messages)] == [b"ab", b"ba"]
        await stream.done_writing()
        assert [message async for message in messages] == []


async def test_a_stream_that_breaks_says_why_to_its_reader():
    async def act(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode.INTERNAL, "ta.u.team_2fa: boom")

    async with (
        dataplane_to(act) as dataplane,
        dataplane.stream(STREAM, lambda: RECORD) as stream,
    ):
        await stream.write(b"ab")
        with pytest.raises(InferenceFailed, match="team/a: boom"):
            _ = [message async for message in stream.messages()]
        await stream.write(b"more")  # no second error
        await stream.done_writing()


async def test_a_stream_that_breaks_while_it_is_written_to_has_lost_its_triton():
    """In some of so many grpcio forgets why, and says INTERNAL."""

    async def act(requests: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async def once(dataplane: GrpcDataPlane) -> None:
        async with dataplane.stream(STREAM, lambda: RECORD) as stream:
            for _ in range(5):
                await stream.write(b"ab")
            with pytest.raises(BackendUnavailable):
                _ = [message async for message in stream.messages()]

    async with dataplane_to(act) as dataplane:
        for _ in range(10):
            await asyncio.gather(*(once(dataplane) for _ in range(20)))


async def test_leaving_a_stream_cancels_it():
    cancelled = asyncio.Event()

    async def act(requests: AsyncIterator[bytes], context: Any) -> None:
        try:
            await context.write(b"hello")
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with dataplane_to(act) as dataplane:
        async with dataplane.stream(STREAM, lambda: None) as stream:
            assert await anext(stream.messages()) == b"hello"
        await asyncio.wait_for(cancelled.wait(), 5)


@pytest.mark.parametrize("seconds", [None, 7.0])
async def test_a_stream_has_the_callers_deadline_and_no_other(seconds):
    async def act(_: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        left = context.time_remaining()
        yield b"none" if left is None else str(round(left)).encode()

    call = RpcCall("ModelStreamInfer", (), seconds)
    async with (
        dataplane_to(act, timeout_seconds=3) as dataplane,
        dataplane.stream(call, lambda: None) as stream,
    ):
        expected = b"none" if seconds is None else b"7"
        assert [message async for message in stream.messages()] == [expected]
