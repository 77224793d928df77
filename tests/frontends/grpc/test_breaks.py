"""The gRPC listener when what is behind it fails in ways that a real Triton does not on demand."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.core.calls import RpcDataPlane
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.frontends.access import Access
from adapter.frontends.grpc.calls import GrpcCalls, MessageLimits
from adapter.frontends.grpc.health import Health
from adapter.frontends.grpc.v2 import V2Service
from adapter.runtime.byte_budget import ByteBudget
from tests.fakes.control import ControlOnFakes
from tests.fakes.grpc_triton import Act, dataplane_to
from tests.grpc_calls import SERVICE, infer_request

INFER, STREAM = f"/{SERVICE}/ModelInfer", f"/{SERVICE}/ModelStreamInfer"


class Listener:
    def __init__(self, fakes: ControlOnFakes, channel: grpc.aio.Channel) -> None:
        self.fakes = fakes
        self.channel = channel
        self.is_ready = True

    def in_flight(self, name: str) -> int:
        return self.fakes.control.registry.serving(name).usage.in_flight

    def counted(self, method: str, code: str) -> float | None:
        labels = {"frontend": "grpc", "method": method, "code": code}
        return self.fakes.metrics.registry.get_sample_value("triton_adapter_requests_total", labels)


@asynccontextmanager
async def listener_to(dataplane: RpcDataPlane) -> AsyncIterator[Listener]:
    """With the models `m` and `team/a` loaded."""
    fakes = await ControlOnFakes().open()
    for name in ("m", "team/a"):
        await fakes.load(name)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        listener = Listener(fakes, channel)
        service = V2Service(
            fakes.control,
            fakes.control_state.triton,
            dataplane,
            Faults(Classifier(())),
            repository=None,
            is_live=lambda: True,
            is_ready=lambda: listener.is_ready,
            load_wait_seconds=1,
            passthrough=(),
            budget=ByteBudget(2**30),
        )
        calls = GrpcCalls(fakes.metrics, Access("grpc"), MessageLimits())
        health = Health([SERVICE], lambda: listener.is_ready)
        server.add_generic_rpc_handlers([service.service(calls), health.service()])
        await server.start()
        yield listener
        await server.stop(None)
    await fakes.close()


@asynccontextmanager
async def listener_before(act: Act) -> AsyncIterator[Listener]:
    async with dataplane_to(act) as dataplane, listener_to(dataplane) as listener:
        yield listener


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code().name, raised.value.details()


async def test_broken_stream_ends_and_frees_its_models():
    async def act(requests: AsyncIterator[bytes], context: Any) -> None:
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with listener_before(act) as listener:
        call = listener.channel.stream_stream(STREAM)()
        await call.write(infer_request("m", 1.0).SerializeToString())
        assert await refusal(call.read()) == (
            "UNAVAILABLE",
            "BackendUnavailable: the connection to Triton broke: Socket closed",
        )
        assert listener.in_flight("m") == 0
        assert listener.counted("ModelStreamInfer", "UNAVAILABLE") == 1


async def test_nameless_failure_is_of_its_streams_model():

    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            if pb.ModelInferRequest.FromString(message).id == "fail":
                yield pb.ModelStreamInferResponse(error_message="bad").SerializeToString()

    async with listener_before(act) as listener:
        call = listener.channel.stream_stream(STREAM)()
        for name, text in (("m", "go"), ("team/a", "fail")):
            await call.write(infer_request(name, 1.0, id=text).SerializeToString())
        answer = pb.ModelStreamInferResponse.FromString(await call.read())
        assert answer.error_message == "InvalidRequest: bad"
        assert (listener.in_flight("m"), listener.in_flight("team/a")) == (1, 0)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert (listener.in_flight("m"), listener.in_flight("team/a")) == (0, 0)


async def test_each_model_has_its_stream_to_triton():
    """Until it is idle and another model comes."""
    seen: list[list[str]] = []
    ends: asyncio.Queue[str] = asyncio.Queue()

    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        names: list[str] = []
        seen.append(names)
        async for message in requests:
            names.append(pb.ModelInferRequest.FromString(message).model_name)
            answer = pb.ModelInferResponse(model_name=names[0])
            answer.parameters["triton_final_response"].bool_param = True
            yield pb.ModelStreamInferResponse(infer_response=answer).SerializeToString()
        ends.put_nowait(names[0])

    async with listener_before(act) as listener:
        call = listener.channel.stream_stream(STREAM)()

        async def ask(name: str) -> None:
            await call.write(infer_request(name, 1.0).SerializeToString())
            answer = pb.ModelStreamInferResponse.FromString(await call.read()).infer_response
            assert answer.model_name == name

        for name in ("m", "m", "team/a"):
            await ask(name)
        first, second = seen
        assert await asyncio.wait_for(ends.get(), 10) == first[0]
        await ask("m")
        assert await asyncio.wait_for(ends.get(), 10) == second[0]
        assert seen == [["m", "m"], second, ["m"]]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_stream_that_triton_ends_by_itself_is_no_success():
    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await anext(aiter(requests))
        return
        yield b""

    async with listener_before(act) as listener:
        call = listener.channel.stream_stream(STREAM)()
        await call.write(infer_request("m", 1.0).SerializeToString())
        assert (await refusal(call.read()))[0] == "UNAVAILABLE"
        assert listener.in_flight("m") == 0


async def test_a_failed_request_of_a_stream_counts_as_one_inference():
    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield pb.ModelStreamInferResponse(error_message="bad").SerializeToString()

    async with listener_before(act) as listener:
        call = listener.channel.stream_stream(STREAM)()
        await call.write(infer_request("m", 1.0).SerializeToString())
        await call.read()
        assert listener.fakes.control.registry.serving("m").usage.served == 1
        call.cancel()


async def test_metadata_passes_both_ways():
    seen: dict[str, Any] = {}

    async def act(message: bytes, context: Any) -> bytes:
        seen.update(context.invocation_metadata())
        await context.send_initial_metadata((("first", "1"),))
        context.set_trailing_metadata((("last-bin", b"\xff"),))
        return pb.ModelInferResponse(model_name="m").SerializeToString()

    async with listener_before(act) as listener:
        metadata = (("traceparent", "00-ab-cd-01"), ("mm-model-id", "m"), ("x-bin", b"\x00"))
        call = listener.channel.unary_unary(INFER)(b"", metadata=metadata)
        await call
        assert ("first", "1") in [*await call.initial_metadata()]
        assert ("last-bin", b"\xff") in [*await call.trailing_metadata()]
    assert seen.items() >= {"traceparent": "00-ab-cd-01", "x-bin": b"\x00"}.items()
    assert "mm-model-id" not in seen


class Broken:
    async def call(self, *_: Any) -> Any:
        raise KeyError("secret")

    def stream(self, *_: Any) -> Any:
        raise KeyError("secret")


@pytest.mark.parametrize(
    "ask",
    [
        lambda channel, request: channel.unary_unary(INFER)(request),
        lambda channel, request: channel.stream_stream(STREAM)(iter([request])).read(),
    ],
)
async def test_a_bug_is_internal_and_keeps_its_details(ask: Callable[..., Any]):
    async with listener_to(Broken()) as listener:
        call = ask(listener.channel, infer_request("m", 1.0).SerializeToString())
        assert await refusal(call) == ("INTERNAL", "InternalError: internal error; see the log")
        assert listener.in_flight("m") == 0


async def test_a_listener_for_inference_alone_has_no_repository():
    async with listener_to(Broken()) as listener:
        call = listener.channel.unary_unary(f"/{SERVICE}/RepositoryModelUnload")(b"")
        assert (await refusal(call))[0] == "UNIMPLEMENTED"


async def test_readiness_is_told_while_it_is_watched():
    async with listener_to(Broken()) as listener:
        ready = listener.channel.unary_unary(f"/{SERVICE}/ServerReady")
        assert pb.ServerReadyResponse.FromString(await ready(b"")).ready
        watch = listener.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
        assert await watch.read() == b"\x08\x01"
        listener.is_ready = False
        assert await watch.read() == b"\x08\x02"
        assert await watch.read() is grpc.aio.EOF  # a server that stops would wait for it
        assert not pb.ServerReadyResponse.FromString(await ready(b"")).ready


async def test_a_model_that_triton_lost_is_told_in_the_stream_and_forgotten():
    async def act(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            name = pb.ModelInferRequest.FromString(message).model_name
            text = f"Request for unknown model: '{name}' is not found"
            yield pb.ModelStreamInferResponse(error_message=text).SerializeToString()

    async with listener_before(act) as listener:
        listener.fakes.triton.models.clear()
        call = listener.channel.stream_stream(STREAM)()
        await call.write(infer_request("team/a", 1.0).SerializeToString())
        answer = pb.ModelStreamInferResponse.FromString(await call.read())
        assert answer.error_message == (
            "Request for unknown model: 'team/a' is not found; "
            "ModelNotFound: Triton does not have the model: "
            "Request for unknown model: 'team/a' is not found"
        )
        await listener.fakes.until_state("team/a", None)
        await call.write(infer_request("team/a", 1.0).SerializeToString())
        answer = pb.ModelStreamInferResponse.FromString(await call.read())
        assert answer.error_message.endswith("ModelNotFound: model 'team/a' is not loaded")
        call.cancel()
