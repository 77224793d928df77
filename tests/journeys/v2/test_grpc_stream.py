"""ModelStreamInfer at the gRPC listener, in front of a real Triton."""

import queue
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.asking import background
from tests.grpc_calls import calls_to, infer_request, values_of, write_decoupled_model
from tests.journeys.memory.models import counted
from tests.journeys.v2.calls import at_one_listener
from tests.running import Client, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

DOUBLING = "values = 2 * values"
COUNTING = "for i in range(int(values[0])): send(values + i)"


class Asking:
    """The requests of one stream, sent as a test says it."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue = queue.SimpleQueue()

    def send(self, *requests) -> None:
        for request in requests:
            self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)

    def __iter__(self):
        return iter(self._requests.get, None)


@pytest.fixture(params=["grpc", pytest.param("grpc_data", marks=pytest.mark.nightly)])
def listener(request):
    """Streams are the same at both; of single inferences test_grpc_infer.py asks both."""
    return request.param


@pytest.fixture
def adapter(shared_adapter, kept):
    """With what is kept; a test that loads a model of its own unloads it."""
    return shared_adapter


@pytest.fixture
def calls(adapter, listener):
    with calls_to(adapter.listeners[listener]) as found:
        yield found


@pytest.fixture
def asking():
    asking = Asking()
    yield asking
    asking.end()  # grpc's thread waits for it


@pytest.fixture
def load(client, package):
    """Loads a model of the test's own, `m`."""

    def load(write=write_python_model, **bodies: str) -> str:
        client.load_model("m", write(package, **bodies))
        return "m"

    yield load
    assert client.unload("m").status in {200, 404}


@pytest.fixture(scope="module")
def counting(kept) -> str:
    """Answers a request of N with N responses."""
    return kept.load("counting one", write_decoupled_model, answer=COUNTING)


@pytest.fixture(scope="module")
def doubling(kept) -> str:
    return kept.load("größe", answer=DOUBLING)


@pytest.fixture(scope="module")
def echo(kept) -> str:
    return kept.load("echo")


def in_flight(adapter, name: str) -> int:
    return adapter.models()[name]["in_flight"]


def stands_still(adapter, name: str) -> bool:
    """Whether Triton has done all that it was asked, though answers are still owed."""
    with Client(adapter.http_address) as triton:
        (found,) = triton.get(f"/v2/models/{name}/stats").json()["model_stats"]
    return found["inference_count"] == 40 and in_flight(adapter, name) == 1


def test_decoupled_model_gives_any_number_of_answers(calls, counting):
    requests = [infer_request(counting, float(n), id=str(n)) for n in (3, 0, 2)]
    answers = [message.infer_response for message in calls.stream(requests)]
    assert sorted((a.id, *values_of(a)) for a in answers) == [
        ("2", 2.0),
        ("2", 3.0),
        ("3", 3.0),
        ("3", 4.0),
        ("3", 5.0),
    ]
    assert {a.model_name for a in answers} == {counting}


def test_decoupled_and_other_models_answer_in_one_stream(calls, counting, echo, adapter):
    """Open at once, streams of both kinds to Triton 2.51 lose answers, and soon end it."""

    def ask(_: int) -> Counter[tuple[object, ...]]:
        names = (echo, counting)
        requests = [infer_request(names[i % 2], 2.0, id=str(i)) for i in range(40)]
        for request in requests[1::2]:
            request.parameters["triton_enable_empty_final_response"].bool_param = True
        answers = [message.infer_response for message in calls.stream(requests)]
        return Counter((a.model_name, a.id, len(a.outputs)) for a in answers)

    with ThreadPoolExecutor(8) as pool:
        for told in pool.map(ask, range(24)):
            assert told == (
                {(echo, str(i), 1): 1 for i in range(0, 40, 2)}
                | {(counting, str(i), 1): 2 for i in range(1, 40, 2)}
                | {(counting, str(i), 0): 1 for i in range(1, 40, 2)}
            )
    assert adapter.events("triton.exited") == []


def test_mesh_may_name_the_streams_model(calls, doubling):
    metadata = [("mm-model-id-bin", doubling.encode())]
    (message,) = calls.stream([infer_request("a vmodel", 1.0)], metadata=metadata)
    assert values_of(message.infer_response) == [2.0]


def test_failure_ends_no_stream_whatever_metadata_ask(calls, kept):
    """Triton 2.51 would end it, and at times itself."""
    name = kept.load("a raising", answer="raise ValueError('boom')")
    metadata = [("triton_grpc_error", "true")]
    first, second = calls.stream([infer_request(name, 1.0)] * 2, metadata=metadata)
    assert "boom" in first.error_message
    assert "boom" in second.error_message


def test_bad_request_does_not_end_the_stream(calls, kept, echo):
    wrong = infer_request(echo, 1.0, id="wrong")
    wrong.inputs[0].name = "CUDA out of memory"
    raising = kept.load("a raising", answer="raise ValueError('boom')")
    requests = [
        infer_request("nope", 1.0, id="unknown"),
        wrong,
        infer_request(raising, 1.0, id="raising"),
        infer_request(echo, 1.0, id="good"),
    ]
    told = {m.infer_response.id: m.error_message for m in calls.stream(requests)}
    assert told["unknown"].startswith("Request for unknown model: 'nope' is not found; ")
    assert told["wrong"].startswith("InvalidRequest: ")
    assert told["raising"].startswith("InferenceFailed: ")
    assert "boom" in told["raising"]
    assert told["good"] == ""


def test_a_failure_text_of_any_length_arrives_whole(calls, kept):
    name = kept.load("verbose", answer="raise ValueError('x' * 300_000)")
    (message,) = calls.stream([infer_request(name, 1.0)])
    assert "x" * 300_000 in message.error_message


@at_one_listener
def test_out_of_memory_is_said_and_counted(calls, kept, adapter, listener):
    """Said of a model for the first time; a second time it might be doubted."""
    series = 'triton_adapter_oom_patterns_total{pattern="cuda_out_of_memory",phase="infer"}'
    before = counted(adapter, series)
    text = "CUDA out of memory. Tried to allocate 2 GiB"
    name = kept.load(
        f"oom in a stream at {listener}", answer=f"raise RuntimeError({text!r})  # {listener}"
    )
    (message,) = calls.stream([infer_request(name, 1.0)])
    assert message.error_message.startswith("OutOfMemory: ")
    assert counted(adapter, series) == before + 1


@at_one_listener
def test_process_dying_in_a_stream_is_noticed(calls, load, asking):
    name = load(imports="import os", answer="os._exit(1)")
    messages = calls.stream(asking)
    asking.send(infer_request(name, 1.0))
    assert next(messages).error_message.startswith("InferenceFailed: ")
    asking.send(infer_request(name, 1.0))
    assert "lost its process" in next(messages).error_message


@at_one_listener
def test_unload_ignores_silent_streams(calls, load, asking, client, adapter):
    """Triton does: it keeps the last request of an open stream, so its unload stalls and has to be
    helped along.
    """
    name = load(write_decoupled_model, answer="send(values)")
    messages = calls.stream(asking)
    request = infer_request(name, 1.0)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    asking.send(request)
    assert values_of(next(messages).infer_response) == [1.0]
    next(messages)  # the mark of the last one
    wait_until(lambda: in_flight(adapter, name) == 0, 30, "the answer is written")
    client.unload_model("m")
    asking.send(infer_request(name, 1.0))
    assert next(messages).error_message.endswith("ModelNotFound: model 'm' is not loaded")


@at_one_listener
def test_unload_waits_for_a_streams_answers(calls, load, asking, adapter, gate):
    name = load(answer=gate.statements)
    messages = calls.stream(asking)
    asking.send(infer_request(name, 1.0))
    gate.wait_reached()
    with background(adapter) as others:
        unloading = others.ask(lambda own: own.unload("m"))
        wait_until(lambda: adapter.models()[name]["state"] == "UNLOADING", 30, "it is unloading")
        gate.open()
        assert values_of(next(messages).infer_response) == [1.0]
        assert unloading.result().status == 200
    asking.end()
    assert list(messages) == []


def test_decoupled_model_is_held_until_final_answer(calls, counting, asking, adapter):
    messages = calls.stream(asking)
    asking.send(infer_request(counting, 1.0))
    next(messages)
    assert in_flight(adapter, counting) == 1
    request = infer_request(counting, 1.0)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    asking.send(request)
    next(messages)
    assert next(messages).infer_response.parameters["triton_final_response"].bool_param
    assert in_flight(adapter, counting) == 1  # the first one may still go on
    asking.end()
    assert list(messages) == []
    wait_until(lambda: in_flight(adapter, counting) == 0, 30, "the stream has ended")


@at_one_listener
def test_departed_caller_is_not_told_to_triton(calls, asking, load, gate, adapter):
    seen = gate.path.with_name("seen")
    note = f"pathlib.Path({str(seen)!r}).write_text(str(request.is_cancelled()))"
    name = load(write_decoupled_model, answer=f"exec({gate.statements!r}); {note}")
    messages = calls.stream(asking)
    asking.send(infer_request(name, 1.0))
    gate.wait_reached()
    messages.cancel()
    wait_until(lambda: adapter.models()[name]["abandoned"] == 1, 30, "the caller has gone")
    gate.open()
    wait_until(lambda: in_flight(adapter, name) == 0, 30, "the model has ended")
    assert seen.read_text() == "False"


@at_one_listener
def test_caller_that_reads_nothing_delays_no_unload(calls, asking, load, client, adapter):
    name = load(imports="import numpy as np", answer="values = np.zeros(250_000, np.float32)")
    messages = calls.stream(asking)
    asking.send(*(infer_request(name, 1.0) for _ in range(40)))
    wait_until(lambda: in_flight(adapter, name) == 1, 30, "Triton was asked")
    wait_until(lambda: stands_still(adapter, name), 30, "the caller's window is full")
    client.unload_model(name)
    with pytest.raises(grpc.RpcError) as raised:
        list(messages)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    why = f"none was taken within 1 s, and model '{name}' is being unloaded"
    assert why in raised.value.details()


def until_the_end(messages) -> tuple[list[list[float]], grpc.StatusCode]:
    """What was answered, and how the stream ended."""
    answered = []
    try:
        for message in messages:
            answered.append(values_of(message.infer_response))  # noqa: PERF401 - it may raise
    except grpc.RpcError as error:
        return answered, error.code()
    return answered, grpc.StatusCode.OK


def test_a_deadline_ends_a_stream(calls, echo):
    for seconds in (1.5, 15):  # the second where the first was too short for an answer
        asking = Asking()
        messages = calls.stream(asking, timeout=seconds)
        asking.send(infer_request(echo, 1.0))
        answered, code = until_the_end(messages)
        asking.end()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        if answered:
            break
    assert answered == [[1.0]]


def test_a_message_that_is_none_ends_the_stream(calls):
    send = calls.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    with pytest.raises(grpc.RpcError) as raised:
        list(send(iter([b"\x0a\x05ab"])))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
