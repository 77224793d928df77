"""InvokeEndpointWithResponseStream, as an unchanged boto3 reads it from a real Triton."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from botocore.exceptions import ClientError, EventStreamError

from tests.asking import binary_request
from tests.grpc_calls import write_decoupled_model
from tests.journeys.memory.models import metric
from tests.running import wait_until
from tests.trees import infer_body

pytestmark = pytest.mark.triton

COUNTING = "[send(values[:1] + i) for i in range(int(values[0]))]"
NAME = "team-a/counting.tar.gz"


@pytest.fixture
def counting(add_model) -> str:
    return add_model(NAME, write_decoupled_model, answer=COUNTING)


def stream(runtime: Any, name: str, body: object, **members: Any) -> dict[str, Any]:
    given = {
        "EndpointName": "any",
        "InferenceComponentName": name,
        "Body": body if isinstance(body, bytes) else json.dumps(body),
    }
    answer: dict[str, Any] = runtime.invoke_endpoint_with_response_stream(**given | members)
    return answer


def lines(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for event in answer["Body"]:
        text = event["PayloadPart"]["Bytes"]
        assert text.endswith(b"\n")
        yield json.loads(text)


def values(answer: dict[str, Any]) -> list[float]:
    return [line["outputs"][0]["data"][0] for line in lines(answer)]


def test_each_decoupled_answer_is_a_line(runtime, counting):
    answer = stream(runtime, counting, infer_body(3.0) | {"id": "seven"})
    assert (answer["ContentType"], answer["InvokedProductionVariant"]) == (
        *("application/jsonlines", "AllTraffic"),
    )
    assert [*lines(answer)] == [
        {
            "model_name": NAME,
            "model_version": "1",
            "id": "seven",
            "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1], "data": [3.0 + i]}],
        }
        for i in range(3)
    ]


def test_model_without_answer_gives_empty_stream(runtime, counting):
    assert values(stream(runtime, counting, infer_body(0.0))) == []


def test_raw_tensors_are_taken_by_a_stream(runtime):
    body, size = binary_request(2)
    kind = f"application/vnd.sagemaker-triton.binary+json;json-header-size={size}"
    [line] = lines(stream(runtime, "plain", body, ContentType=kind))
    assert line["outputs"][0]["data"] == [0.5, 0.5]


def test_a_body_without_tensors_goes_to_generate_stream(runtime, counting):
    answer = stream(runtime, counting, {"IN": 2.0})
    text = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])
    assert answer["ContentType"] == "text/event-stream"
    events = [json.loads(each.removeprefix(b"data: ")) for each in text.strip().split(b"\n\n")]
    assert [(each["model_name"], each["OUT"]) for each in events] == [(NAME, 2.0), (NAME, 3.0)]


def test_target_header_names_the_model_too(own_runtime):
    own_runtime.meta.events.register(
        "before-call.sagemaker-runtime.InvokeEndpointWithResponseStream",
        lambda params, **_: params["headers"].update({"X-Amzn-SageMaker-Target-Model": "plain"}),
    )
    body = json.dumps(infer_body(1.0))
    answer = own_runtime.invoke_endpoint_with_response_stream(EndpointName="any", Body=body)
    assert values(answer) == [1.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "must be a JSON object"),
        ({"inputs": [{"name": "IN"}]}, "member 'datatype' is missing"),
        pytest.param(
            {"inputs": []},
            "expected 1 inputs but got 0",
            marks=pytest.mark.of_triton("2.51", "2.73", "its words for a bad request"),
        ),
        (infer_body(1.0) | {"id": None}, "id is not a string"),
        (
            {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": ["a"]}]},
            "the values are not FP32",
        ),
        (
            {"inputs": [{"name": "IN", "datatype": "FP99", "shape": [1], "data": [1]}]},
            "'FP99' is not known",
        ),
    ],
)
def test_failure_before_first_answer_is_model_error(runtime, body, said):
    with pytest.raises(ClientError) as raised:
        stream(runtime, "plain", body)
    found = raised.value.response
    assert (found["Error"]["Code"], found["OriginalStatusCode"]) == ("ModelError", 400)
    assert said in found["OriginalMessage"]


@pytest.mark.parametrize("body", [infer_body(1.0), {"IN": 1.0}], ids=["V2", "generate"])
def test_failure_amid_answers_is_model_stream_error(runtime, add_model, body, served):
    error = "pb_utils.InferenceResponse(error=pb_utils.TritonError('so it is'))"
    failing = f"send(values); sender.send({error})"
    answer = stream(runtime, add_model("failing", write_decoupled_model, answer=failing), body)
    events = iter(answer["Body"])
    assert b"1.0" in next(events)["PayloadPart"]["Bytes"]
    with closing(answer["Body"]), pytest.raises(EventStreamError, match="so it is") as raised:
        next(events)
    assert raised.value.response["Error"]["Code"] == "ModelStreamError"
    request_id = answer["ResponseMetadata"]["HTTPHeaders"]["x-amzn-requestid"]
    assert served.wait_for("request.failed", aws_request_id=request_id)["model_id"] == "failing"


@pytest.fixture
def add_waiting(add_model, gate) -> Callable[[str], str]:
    """Adds a model that answers, stands at the gate, and answers again."""
    answer = f"send(values); exec({gate.statements!r}); send(values + 1)"
    return lambda name: add_model(name, write_decoupled_model, answer=answer)


@pytest.mark.parametrize("body", [infer_body(1.0), {"IN": 1.0}], ids=["V2", "generate"])
def test_answers_arrive_and_count_while_the_model_works(
    served, own_runtime, add_waiting, gate, body
):
    """An open stream counts in the budget of bytes, with its body."""

    def held() -> float:
        return metric(served, "triton_adapter_body_bytes")

    name = add_waiting(f"counted-{len(str(body))}")
    wait_until(lambda: held() == 0, 20, "streams of other tests have ended")
    events = iter(stream(own_runtime, name, body)["Body"])
    next(events)
    gate.wait_reached()
    assert 2**16 <= held() < 2**17
    gate.open()
    assert len([*events]) == 1
    wait_until(lambda: held() == 0, 20, "it counts no more")


def test_departed_caller_releases_the_model(served, own_runtime, add_waiting, gate):
    name = add_waiting("left")
    body = stream(own_runtime, name, infer_body(1.0))["Body"]
    next(iter(body))
    gate.wait_reached()
    body.close()
    gate.open()
    with served.client() as client:
        wait_until(lambda: served.models()[name]["in_flight"] == 0, 20, "no request in flight")
        client.unload_model(name)


def test_a_stream_without_a_length_is_refused(caller):
    reply = caller.post(
        "/endpoints/any/invocations-response-stream",
        iter([b"{}"]),
        {"X-Amzn-SageMaker-Target-Model": "plain"},
    )
    assert (reply.status, "needs a Content-Length" in reply.json()["Message"]) == (400, True)
