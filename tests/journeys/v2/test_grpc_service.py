"""Everything of the gRPC listener that is no inference: about models, about the server, probes."""

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2 as pb

from tests.cases import rows
from tests.grpc_calls import NO_LIMITS, SECONDS, SERVICE, calls_to
from tests.journeys.v2.calls import at_one_listener

pytestmark = pytest.mark.triton

NAME = "team/größe"


@pytest.fixture
def adapter(shared_adapter, kept):
    """With what is kept; a test that loads a model of its own unloads it."""
    return shared_adapter


@pytest.fixture
def calls(adapter, listener):
    with calls_to(adapter.listeners[listener]) as found:
        yield found


@pytest.fixture(scope="module")
def loaded(kept) -> str:
    return kept.load(NAME)


@pytest.fixture(scope="module")
def plain(kept) -> str:
    return kept.load("plain")


def test_metadata_and_config_have_the_callers_name(calls, loaded):
    metadata = calls.call("ModelMetadata", pb.ModelMetadataRequest(name=loaded))
    assert (metadata.name, list(metadata.versions)) == (loaded, ["1"])
    assert [tensor.name for tensor in metadata.inputs] == ["IN"]
    config = calls.call("ModelConfig", pb.ModelConfigRequest(name=loaded, version="1")).config
    assert (config.name, config.backend) == (loaded, "python")
    by_mesh = [("mm-model-id-bin", loaded.encode())]
    assert calls.call("ModelMetadata", pb.ModelMetadataRequest(), metadata=by_mesh) == metadata


def test_statistics_use_the_callers_names(calls, loaded, plain):
    def names(name: str = "", **options) -> set[str]:
        request = pb.ModelStatisticsRequest(name=name)
        found = calls.call("ModelStatistics", request, **options).model_stats
        return {model.name for model in found}

    assert names(loaded) == {loaded}
    assert names() == {loaded, plain}
    assert names(metadata=[("mm-model-id", plain)]) == {plain}


def test_mesh_learns_that_model_is_absent(calls, loaded):
    metadata = [("mm-model-id", "nope")]
    request = pb.ModelReadyRequest(name="nope")
    refusal = calls.refused("ModelReady", request, metadata=metadata)
    assert refusal == ("NOT_FOUND", "ModelNotFound: model 'nope' is not loaded")


BEYOND = {
    "SystemSharedMemoryStatus": "shared_memory",
    "SystemSharedMemoryRegister": "shared_memory",
    "SystemSharedMemoryUnregister": "shared_memory",
    "CudaSharedMemoryStatus": "shared_memory",
    "CudaSharedMemoryRegister": "shared_memory",
    "CudaSharedMemoryUnregister": "shared_memory",
    "TraceSetting": "trace",
    "LogSettings": "log",
}


@at_one_listener
@rows(("method", "word"), BEYOND.items())
def test_calls_beyond_a_model_need_a_setting(calls, method, word):
    """The other listener has none of them, whatever the setting: access/test_triton_input.py."""
    code, text = calls.refused(method, getattr(pb, f"{method}Request")())
    assert code == "PERMISSION_DENIED"
    assert text == (
        f"NotPassedThrough: {method} is not forwarded to Triton: the setting passthrough lacks"
        f" {word!r}; see docs/v2.md#calls-about-the-whole-server"
    )


def test_an_unknown_method_is_unimplemented(calls):
    with pytest.raises(grpc.RpcError) as raised:
        calls.channel.unary_unary(f"/{SERVICE}/Nothing")(b"")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


# -- grpc.health.v1 and reflection ----------------------------------------------------------

SERVING = health_pb2.HealthCheckResponse.SERVING


# beside V2, health and reflection
BESIDES = {"grpc": ["mmesh.ModelRuntime"], "grpc_data": []}
OF_GRPC = [
    "grpc.health.v1.Health",
    *(f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")),
]


def test_all_services_are_well(calls, listener):
    health = health_pb2_grpc.HealthStub(calls.channel)
    for service in ("", SERVICE, *OF_GRPC, *BESIDES[listener]):
        request = health_pb2.HealthCheckRequest(service=service)
        assert health.Check(request, timeout=SECONDS).status == SERVING
        watching = health.Watch(request, timeout=SECONDS)
        assert next(watching).status == SERVING
        watching.cancel()
    watching = health.Watch(health_pb2.HealthCheckRequest(service="nope"), timeout=SECONDS)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


@rows("version", ["v1", "v1alpha"])
def test_the_services_describe_themselves(calls, listener, version):
    """The messages of both versions are the same. ghz asks for the file of a method."""
    reflection = f"grpc.reflection.{version}.ServerReflection"
    ask = calls.channel.stream_stream(
        f"/{reflection}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    services = [SERVICE, reflection, *BESIDES[listener]]
    symbols = [*services, f"{SERVICE}.ModelInfer", f"{reflection}.ServerReflectionInfo"]
    requests = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=of) for of in symbols),
    ]
    listed, *files = ask(iter(requests), timeout=SECONDS)
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*services, *OF_GRPC}
    assert ("mmesh.ModelRuntime" in names) == (listener == "grpc")
    described = [
        FileDescriptorProto.FromString(file.file_descriptor_response.file_descriptor_proto[0])
        for file in files
    ]
    packages = ["inference", f"grpc.reflection.{version}", "mmesh"][: len(services)]
    assert [file.package for file in described] == [*packages, *packages[:2]]


def test_hurried_callers_leave_no_logged_errors(adapter, calls):
    """Their deadlines pass while the answer is on its way, and before, and they cancel then."""
    ask = calls.channel.unary_unary(f"/{SERVICE}/ServerMetadata")
    before = len(adapter.lines)  # of other tests
    for number in range(60):
        asked = [ask.future(b"", timeout=(1 + number % 5) / 1000) for _ in range(20)]
        for call in asked[::3]:
            call.cancel()
        for call in asked[1::3]:
            call.exception()
    assert calls.call("ServerLive", pb.ServerLiveRequest()).live
    assert [line for line in adapter.lines[before:] if line["logger"].startswith("grpc")] == []


def test_too_much_metadata_is_callers_fault(adapter, plain):
    with calls_to(adapter.grpc, NO_LIMITS) as calls:
        metadata = [("x-request-id", "x" * 30_000)]
        assert calls.infer(plain, 1.0, metadata=metadata) == [1.0]  # goes straight
        code, text = calls.refused(
            "ModelConfig", pb.ModelConfigRequest(name=plain), metadata=metadata
        )
    assert code == "INVALID_ARGUMENT"
    assert text.startswith("InvalidRequest: the request's metadata are more than Triton takes")
