"""ModelInfer at the gRPC listener, in front of a real Triton."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter.relay import frames
from tests.asking import background
from tests.cases import rows
from tests.frontends.grpc.proxy_listener import frame, head_of, prefixed, wire_to
from tests.grpc_calls import NO_LIMITS, SERVICE, calls_to, infer_request, values_of
from tests.journeys.v2.calls import at_one_listener
from tests.running import wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

DOUBLING = "values = 2 * values"


@pytest.fixture
def adapter(shared_adapter, kept):
    """With what is kept; a test that loads a model of its own unloads it."""
    return shared_adapter


@pytest.fixture
def calls(adapter, listener):
    with calls_to(adapter.listeners[listener]) as found:
        yield found


@pytest.fixture
def triton_calls(adapter):
    """The Triton behind it, asked directly."""
    with calls_to(adapter.grpc_address, NO_LIMITS) as found:
        yield found


@pytest.fixture
def loaded(client, package):
    """Loads a model of the test's own, under a name that Triton takes as it is."""

    def load(**bodies: str) -> str:
        write_python_model(package, **bodies)
        client.load_model(package.name, package)
        return package.name

    yield load
    assert client.unload(package.name).status in {200, 404}


@pytest.fixture(scope="module")
def doubling(kept) -> str:
    """A name that Triton takes as it is."""
    return kept.load("doubling", answer=DOUBLING)


def test_a_model_answers_to_its_name(calls, doubling):
    request = infer_request(doubling, 1.5, id="7")
    request.parameters["mine"].string_param = "x"
    answer = calls.call("ModelInfer", request)
    assert values_of(answer) == [3.0]
    assert (answer.model_name, answer.model_version, answer.id) == (doubling, "1", "7")


@rows("name", ["team/a b", "größe", "..", "n" * 900])
def test_any_name_works_and_comes_back(calls, kept, name):
    kept.load(name, answer=DOUBLING)
    answer = calls.call("ModelInfer", infer_request(name, 2.0))
    assert (answer.model_name, values_of(answer)) == (name, [4.0])


@pytest.mark.parametrize("name", ["misspelt", "a misspelt one"])  # to Triton directly, and not
def test_misnamed_output_is_warned_of_once(calls, kept, adapter, listener, name):
    answer = 'return pb_utils.InferenceResponse([pb_utils.Tensor("OUTT", values)])'
    name = kept.load(
        f"{name} at {listener}" if " " in name else f"{name}_{listener}", answer=answer
    )
    for _ in range(2):
        found = calls.call("ModelInfer", infer_request(name, 1.0, id="7"))
        assert (len(found.outputs), found.id) == (0, "7")

    adapter.wait_for("model.outputs_missing", model_id=name)
    [line] = [e for e in adapter.events("model.outputs_missing") if e["model_id"] == name]
    assert "without its output 'OUT'" in line["reason"]


BINARY = ("mm-model-id-bin", "größe".encode())


@pytest.mark.parametrize("named", ["", "a vmodel"])
@rows("metadata", [[BINARY], [("mm-model-id", "ignored"), BINARY]])
def test_a_mesh_names_the_model_in_metadata(calls, kept, doubling, named, metadata):
    kept.load("größe", answer=DOUBLING)
    answer = calls.call("ModelInfer", infer_request(named, 2.0), metadata=metadata)
    assert (answer.model_name, values_of(answer)) == ("größe", [4.0])
    assert calls.infer(named, 1.0, metadata=[("mm-model-id", doubling)]) == [2.0]


def test_invalid_name_is_the_callers_fault(calls):
    metadata = [("mm-model-id-bin", b"\xff")]
    code, text = calls.refused_infer("m", 1.0, metadata=metadata)
    assert (code, text) == (
        "INVALID_ARGUMENT",
        "InvalidRequest: the model's name in the metadata is not UTF-8",
    )
    assert calls.refused_infer("", 1.0) == (
        "INVALID_ARGUMENT",
        "InvalidRequest: model_name is empty",
    )


def test_invalid_message_is_the_callers_fault(calls):
    send = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.RpcError) as raised:
        send(b"\x0a\x05ab")
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


QUEUE = """\
backend: "python"
max_batch_size: 1
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
dynamic_batching { default_queue_policy { max_queue_size: 1 } }
"""


@at_one_listener
def test_full_queue_is_for_another_copy(calls, triton_calls, loaded, gate):
    """UNAVAILABLE is repeated by a mesh eight times, and is INTERNAL to its caller then."""
    name = loaded(config=QUEUE, answer=gate.statements)
    request = infer_request(name, 1.0)
    request.inputs[0].shape[:] = [1, 1]

    def ask(asked) -> str:
        try:
            asked.call("ModelInfer", request)
        except grpc.RpcError as error:
            return error.code().name
        return "OK"

    with ThreadPoolExecutor(12) as pool:
        try:
            ours = [pool.submit(ask, calls) for _ in range(6)]
            direct = [pool.submit(ask, triton_calls) for _ in range(6)]
            wait_until(lambda: sum(f.done() for f in ours + direct) >= 9, 30, "the queue is full")
        finally:
            gate.open()
        assert {f.result() for f in direct} - {"OK"} == {"UNAVAILABLE"}
        assert {f.result() for f in ours} - {"OK"} == {"RESOURCE_EXHAUSTED"}


@at_one_listener
def test_model_without_process_becomes_not_found(calls, loaded):
    name = loaded(imports="import os", answer="os._exit(1)")
    assert calls.refused_infer(name, 1.0)[0] == "INTERNAL"
    code, text = calls.refused_infer(name, 1.0)
    assert (code, "lost its process" in text) == ("NOT_FOUND", True)


@at_one_listener
def test_model_lost_by_triton_is_forgotten(calls, triton_calls, loaded, adapter):
    name = loaded()
    triton_calls.call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name))
    code, text = calls.refused_infer(name, 1.0)
    assert (code, name in text) == ("NOT_FOUND", True)
    wait_until(lambda: name not in models_of(adapter), 20, "it is forgotten")


def models_of(adapter) -> list[str]:
    return [model["model_id"] for model in adapter.state()["models"]]


@at_one_listener
def test_request_waits_for_the_load_in_progress(calls, package, adapter, gate):
    """ModelReady is False meanwhile."""
    write_python_model(package, initialize=gate.statements, answer=DOUBLING)
    with background(adapter) as others, calls_to(adapter.grpc) as control:
        loading = others.ask(lambda own: own.load(package.name, package))
        gate.wait_reached()
        asking = others.ask(lambda _: calls.infer(package.name, 4.0))
        assert not control.call("ModelReady", pb.ModelReadyRequest(name=package.name)).ready
        gate.open()
        assert asking.result() == [8.0]
        assert loading.result().status == 200
        deleted = others.ask(lambda own: own.unload(package.name))
        assert deleted.result().status == 200


@rows("character", ["x", "é", "%", "\N{GRINNING FACE}"])
def test_error_text_of_any_length_keeps_its_code(calls, adapter, kept, character):
    """More than 8 KiB of metadata would arrive as RESOURCE_EXHAUSTED, the text lost."""
    name = kept.load("verbose", answer="raise ValueError(chr(int(values[0])) * 300_000)")
    with calls_to(adapter.grpc_address) as plain:
        assert plain.refused_infer(name, ord(character))[0] != "INTERNAL"
    code, text = calls.refused_infer(name, ord(character))
    assert (code, text[:17]) == ("INTERNAL", "InferenceFailed: ")
    assert "ValueError: " + character * 100 in text
    assert text.endswith(" characters cut)")


SILENT = ("", " ", "\0why")


@rows("number", range(len(SILENT)))
def test_failure_without_reason_is_said_to_give_none(calls, client, kept, number):
    error = f"pb_utils.TritonError({SILENT!r}[int(values[0])])"
    name = kept.load("silent", answer=f"return pb_utils.InferenceResponse([], {error})")
    reason = "the model gave no reason"
    assert calls.refused_infer(name, number) == ("INTERNAL", f"InferenceFailed: {reason}")
    with_id = infer_request(name, number, id="7")
    assert calls.refused("ModelInfer", with_id) == ("INTERNAL", f"InferenceFailed: {reason}")
    for path in (f"/models/{name}/invoke", f"/v2/models/{name}/infer"):
        reply = client.post(path, infer_body(number))
        assert (reply.status, reply.error) == (500, reason)


@pytest.mark.parametrize("size", [0, 3, 5, 20])
@rows("method", ["ModelInfer", "ModelReady"])
async def test_request_without_message_is_internal_as_triton(
    adapter, listener, doubling, method, size
):
    message = prefixed(infer_request(doubling, 1.0).SerializeToString())[:size]
    head = frames.header_block(1, head_of(f"/{SERVICE}/{method}"), end=False)
    for address in (adapter.grpc_address, adapter.listeners[listener]):
        async with wire_to(address) as wire:
            wire.greet()
            wire.send(head, frame(frames.DATA, frames.END_STREAM, 1, message))
            _, trailers = await wire.answer(1)
            assert b"grpc-status" in trailers
            assert b"13" in trailers
    assert b"the request ended after %d bytes, before its message was complete" % size in trailers
