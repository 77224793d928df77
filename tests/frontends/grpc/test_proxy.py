"""Inferences through the gRPC proxy, with a fake Triton behind."""

import asyncio
import contextlib
import logging

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.control.leases import Lease
from adapter.control.models import Models
from adapter.core.calls import RPC_NOT_STARTED
from adapter.core.model import ModelId
from adapter.core.states import ModelState
from adapter.frontends.grpc.calls import MessageLimits
from adapter.relay import frames
from adapter.relay.frames import Code
from adapter.relay.protobuf import encoded_field
from tests.frontends.grpc.proxy_listener import (
    INFER,
    begin,
    channel_to,
    complete,
    echo,
    limited,
    proxy_before,
    refusal,
    request,
    request_of,
    status,
    until,
    wire_to,
)

MIB = 2**20
NAME_FIELD, ID_FIELD, RAW_FIELD = 1, 3, 7  # of a ModelInferRequest


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ModelReady", pb.ModelReadyRequest(name="m")),
        ("ModelMetadata", pb.ModelMetadataRequest(name="m")),
        ("ModelConfig", pb.ModelConfigRequest(name="m")),
        ("ModelStatistics", pb.ModelStatisticsRequest(name="m")),
    ],
)
async def test_only_an_inference_is_use_of_a_model(proxy, channel, method, message):
    """Eviction goes by the last use, and a probe of a model is none."""

    async def answer(_message, _context):
        return b""

    proxy.answer_with(answer)
    call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    await call(message.SerializeToString())
    usage = proxy.fakes.control.registry.serving(ModelId("m")).usage
    assert usage.served == 0
    await channel.unary_unary(INFER)(request_of("m"))
    assert usage.served == 1


async def test_lost_model_is_not_ready_while_returning(proxy, channel):
    has_lost = True

    async def act(message, context):
        if has_lost:
            text = "Request for unknown model: 'm' is not found"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return await echo(message, context)

    proxy.answer_with(act)
    proxy.fakes.load_lost_again()
    proxy.fakes.triton.models.clear()
    call = channel.unary_unary(INFER)
    code, text = await refusal(call(request_of("m")))
    assert (code, text) == ("UNAVAILABLE", "ModelNotReady: model 'm' is being loaded again")
    has_lost = False
    await until(lambda: "m" in proxy.fakes.triton.models)
    await proxy.fakes.until_state("m", ModelState.READY)
    await call(request_of("m"))


@pytest.mark.parametrize(
    ("named", "metadata", "model", "straight"),
    [
        ("team/a", [], "team/a", 0),  # Triton knows it by another name
        ("m", [("mm-model-id", "m"), ("mm-model-id-bin", b"m")], "m", 1),
        ("", [("mm-model-id", "m")], "m", 0),
        ("m", [("mm-model-id-bin", b"team/a")], "team/a", 0),
    ],
)
async def test_metadata_of_a_mesh_decides(proxy, channel, *, named, metadata, model, straight):
    seen = []

    async def act(message, context):
        seen.append(dict(context.invocation_metadata()))
        return await echo(message, context)

    proxy.answer_with(act)
    answer = await channel.unary_unary(INFER)(request_of(named), metadata=metadata)
    assert pb.ModelInferResponse.FromString(answer).model_name == model
    assert proxy.counted("OK") == straight
    assert proxy.in_flight(model) == 0
    assert not {key for key in seen[0] if key.startswith("mm-")}


MESH = [("mm-model-id", "nope")]
NOT_LOADED = "ModelNotFound: model 'nope' is not loaded"


@pytest.mark.parametrize("size", [1, MIB // 3], ids=["small", "too large for the fallback server"])
async def test_unloaded_model_is_refused_in_callers_words(size):
    """In those of Triton, or of a mesh."""
    message = request_of("nope", *[0.0] * size)
    limits = MessageLimits(unary=MIB, stream=MIB)
    async with proxy_before(echo, limits=limits) as proxy, channel_to(proxy.address) as channel:
        call = channel.unary_unary(INFER)
        text = f"Request for unknown model: 'nope' is not found; {NOT_LOADED}"
        assert await refusal(call(message)) == ("NOT_FOUND", text)
        assert await refusal(call(message, metadata=MESH)) == ("NOT_FOUND", NOT_LOADED)


@pytest.mark.parametrize("size", [1, MIB // 3], ids=["small", "too large for the fallback server"])
async def test_name_that_is_not_utf8_is_callers_fault(size):
    message = encoded_field(NAME_FIELD, b"\xff") + encoded_field(RAW_FIELD, bytes(4 * size))
    limits = MessageLimits(unary=MIB, stream=MIB)
    async with proxy_before(echo, limits=limits) as proxy, channel_to(proxy.address) as channel:
        text = "InvalidRequest: the model's name in the message is not UTF-8"
        assert await refusal(channel.unary_unary(INFER)(message)) == ("INVALID_ARGUMENT", text)


async def test_many_refusals_have_few_lines_in_the_log(proxy, channel, caplog):
    caplog.set_level(logging.INFO)
    infer = channel.unary_unary(INFER)
    await asyncio.gather(*(refusal(infer(request_of("nope"))) for _ in range(100)))

    def count_told() -> tuple[int, int]:
        lines = sum(each.message == "request.failed" for each in caplog.records)
        return lines, sum(getattr(each, "requests", 0) for each in caplog.records)

    await until(lambda: sum(count_told()) >= 100)
    lines, summed_up = count_told()
    assert lines + summed_up == proxy.counted("NOT_FOUND") == 100
    assert summed_up


IDS = [("x-request-id", "7"), ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01")]


@pytest.mark.parametrize("name", ["nope", "a\0"], ids=["unknown", "no name"])
@pytest.mark.parametrize("size", [1, 20_000], ids=["one frame", "several"])
@pytest.mark.parametrize("is_of_mesh", [False, True])
async def test_refusals_match_the_fallback_servers(
    proxy, channel, caplog, *, name, size, is_of_mesh
):
    """A message that does not begin with the model's name goes to the fallback server."""
    direct = request_of(name, *[0.0] * size)
    mesh = [("mm-model-id-bin", name.encode())] if is_of_mesh else []
    caplog.set_level(logging.INFO)
    found, called = [], []
    for message in (direct, encoded_field(ID_FIELD, b"7") + direct):
        caplog.clear()
        call = channel.unary_unary(INFER)(message, metadata=[*IDS, *mesh])
        code, text = await refusal(call)
        (line,) = [one for one in caplog.records if one.message == "request.failed"]
        standard = {*vars(logging.makeLogRecord({})), "listener"}  # two here, one in life
        logged = {key: value for key, value in vars(line).items() if key not in standard}
        trailers = dict(await call.trailing_metadata() or ())
        found.append((code, text, trailers, logged))
        called.append(any(not up.is_triton for s in proxy.server._sessions for up in s.upstreams))
    assert found[0] == found[1]
    assert found[0][3]["trace_id"] == "a" * 32
    assert proxy.counted(found[0][0]) == 1
    assert called == [False, True]


@pytest.mark.parametrize("size", [1, MIB // 3], ids=["small", "too large for the fallback server"])
async def test_mesh_is_told_not_found_without_triton(size, monkeypatch):
    """While the adapter starts, and after Triton's end."""
    monkeypatch.setattr("adapter.control.triton._END_SECONDS", 0.2)
    message = request_of("nope", *[0.0] * size)
    limits = MessageLimits(unary=MIB, stream=MIB)
    async with proxy_before(echo, limits=limits) as proxy, channel_to(proxy.address) as channel:
        call = channel.unary_unary(INFER)
        proxy.fakes.start_again()
        assert (await refusal(call(message)))[0] == "UNAVAILABLE"
        code, text = await refusal(call(message, metadata=MESH))
        assert (code, text.partition(",")[0]) == (
            "NOT_FOUND",
            "ModelNotFound: the adapter is starting",
        )
        proxy.fakes.control.close()
        assert (await refusal(call(message, metadata=MESH)))[0] == "UNAVAILABLE"
        proxy.fakes.reopen()
        proxy.fakes.server.pid = None
        loaded = request_of("m", *[0.0] * size)
        code, text = await refusal(call(loaded, metadata=[("mm-model-id", "m")]))
        assert (code, text) == ("NOT_FOUND", "ModelNotFound: Triton exited, and model 'm' with it")


async def test_unavailable_model_is_told_from_lost_connection(proxy, channel):
    async def act(message, context):
        await context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused by the feature store")

    proxy.answer_with(act)
    call = channel.unary_unary(INFER)(request_of())
    code, text = await refusal(call)
    assert code == "UNAVAILABLE"
    assert text == "BackendUnavailable: connection refused by the feature store"
    assert RPC_NOT_STARTED not in dict(await call.trailing_metadata())


@limited(max_message_bytes=MIB)
async def test_too_large_answer_fails_with_its_size(proxy, channel):
    async def act(message, context):
        return bytes(2 * MIB)

    proxy.answer_with(act)
    code, text = await refusal(channel.unary_unary(INFER)(request_of()))
    assert (code, "answer is too large" in text, str(MIB) in text) == ("INTERNAL", True, True)
    await proxy.until_free("m")


class Slow:
    """A Triton that answers when it is told to; `cancelled` says whether it was told to give up."""

    def __init__(self):
        self.started, self.go_on, self.answered = (asyncio.Event() for _ in range(3))
        self.cancelled = asyncio.Event()
        self.is_cancelled = False

    async def serve(self, message, context):
        self.started.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            self.cancelled.set()
            raise
        self.answered.set()
        return await echo(message, context)

    async def ends_untold(self, proxy):
        """It still works for the caller who has left, and holds the model until it has ended."""
        await proxy.until_abandoned("m")
        assert (proxy.in_flight("m"), self.is_cancelled) == (1, False)
        self.go_on.set()
        async with asyncio.timeout(5):
            await self.answered.wait()
        await proxy.until_free("m")
        assert (proxy.abandoned("m"), self.is_cancelled) == (0, False)


@limited(takes_cancels=True)
async def test_newer_triton_hears_of_cancels(proxy, channel):
    act = Slow()
    proxy.answer_with(act.serve)
    call = channel.unary_unary(INFER)(request_of())
    await asyncio.wait({asyncio.ensure_future(act.started.wait())})
    call.cancel()
    await proxy.until_counted("CANCELLED")
    await asyncio.wait_for(act.cancelled.wait(), 10)
    assert (proxy.in_flight("m"), proxy.abandoned("m")) == (0, 0)
    act.go_on.set()
    await channel.unary_unary(INFER)(request_of())


@pytest.mark.parametrize("end", ["cancels", "disconnects"])
async def test_triton_never_hears_of_a_caller_who(proxy, end):
    act = Slow()
    proxy.answer_with(act.serve)
    async with wire_to(proxy.address) as wire:
        wire.greet()
        wire.send(request(1))
        async with asyncio.timeout(5):
            await act.started.wait()
        assert (proxy.in_flight("m"), proxy.abandoned("m")) == (1, 0)
        if end == "cancels":
            wire.send(frames.reset(1, Code.CANCEL))
        else:
            wire.writer.transport.abort()
        await proxy.until_counted("CANCELLED")
    await act.ends_untold(proxy)
    await proxy.until_at_rest()


async def test_closing_listener_waits_for_triton(proxy, channel):
    act = Slow()
    proxy.answer_with(act.serve)
    await channel.channel_ready()
    code, _ = await refusal(channel.unary_unary(INFER)(request_of(), timeout=1))
    assert code == "DEADLINE_EXCEEDED"
    closing = asyncio.create_task(proxy.server.close(30))
    await channel.close()
    await act.ends_untold(proxy)
    await closing
    assert not act.is_cancelled


async def test_bug_in_judging_failure_frees_model(proxy, channel, monkeypatch):
    async def judge(_lease, _error):
        raise ValueError("a bug")

    monkeypatch.setattr(Lease, "judge", judge)
    proxy.triton = "127.0.0.1:1"
    code, text = await refusal(channel.unary_unary(INFER)(request_of()))
    assert (code, text) == ("INTERNAL", "InternalError: internal error; see the log")
    assert proxy.in_flight("m") == 0
    assert proxy.counted("INTERNAL") == 1


async def test_bug_in_wait_for_model_is_logged_once(monkeypatch, caplog):
    async def wait(_models, _model_id, _seconds):
        raise ValueError("a bug")

    monkeypatch.setattr(Models, "wait_for_lease", wait)
    message = request_of("nope", *[0.0] * (MIB // 3))
    limits = MessageLimits(unary=MIB, stream=MIB)
    async with proxy_before(echo, limits=limits) as proxy, channel_to(proxy.address) as channel:
        code, text = await refusal(channel.unary_unary(INFER)(message))
    assert (code, text) == ("INTERNAL", "InternalError: internal error; see the log")
    assert [one.message for one in caplog.records].count("request.failed") == 1


async def test_unstarted_call_is_answered_by_trailers_alone(proxy):
    """A proxy sees the metadata of such an answer as headers, before any body."""
    async with wire_to(proxy.address) as wire:
        proxy.triton = "127.0.0.1:1"
        wire.greet()
        message = complete(1)
        wire.send(begin(1), message)
        _, trailers = await wire.answer(1)
        assert status(trailers) == "UNAVAILABLE"
        assert b"BackendUnavailable: Triton cannot be reached" in trailers
        assert RPC_NOT_STARTED.encode() in trailers
        assert proxy.in_flight("m") == 0
        assert [kind for kind, _, of, _ in wire.got if of == 1].count(frames.HEADERS) == 1


@pytest.mark.parametrize("sent", [b"", frames.settings({}), b"garbage" * 10])
async def test_next_call_connects_anew_after_a_break(proxy, channel, sent):
    async def cut(reader, writer):
        await reader.read(100_000)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    right, proxy.triton = proxy.triton, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    call = channel.unary_unary(INFER)(request_of())
    code, text = await refusal(call)
    assert (code, text) == (
        "UNAVAILABLE",
        "BackendUnavailable: the connection to Triton broke",
    )
    assert RPC_NOT_STARTED not in dict(await call.trailing_metadata())
    assert proxy.in_flight("m") == 0
    proxy.triton = right
    await channel.unary_unary(INFER)(request_of())
    server.close()
