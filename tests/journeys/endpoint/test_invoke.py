"""InvokeEndpoint, as an unchanged boto3 speaks it to the real command and a real Triton."""

import json
import re
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.asking import RawConnection, background, binary_request, sized
from tests.cases import rows
from tests.journeys.endpoint.conftest import NAMES
from tests.running import wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

BODY = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [2], "data": [1.5, -2.0]}]}
UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


def invoke(runtime: Any, target: str = "plain", **members: Any) -> dict[str, Any]:
    given = {"EndpointName": "any", "Body": json.dumps(BODY)}
    if target:
        given["TargetModel"] = target
    answer: dict[str, Any] = runtime.invoke_endpoint(**given | members)
    return answer


def refusal(runtime: Any, target: str = "plain", **members: Any) -> ClientError:
    with pytest.raises(ClientError) as raised:
        invoke(runtime, target, **members)
    return raised.value


@pytest.mark.parametrize("name", NAMES)
def test_boto3_has_answer_under_asked_name(runtime, name):
    answer = invoke(runtime, name, ContentType="application/json")
    body = json.loads(answer["Body"].read())
    assert body["model_name"] == name
    assert body["outputs"][0]["data"] == [1.5, -2.0]
    assert (answer["ContentType"], answer["InvokedProductionVariant"]) == (
        *("application/json", "AllTraffic"),
    )
    assert answer["ResponseMetadata"]["HTTPStatusCode"] == 200


def test_answers_have_request_id_and_cache_use(runtime, caller):
    headers = invoke(runtime)["ResponseMetadata"]["HTTPHeaders"]
    assert headers["x-triton-adapter-cache"] == "hit"
    ids = {headers["x-amzn-requestid"]}
    for path in ("invocations", "async-invocations", "nothing"):
        reply = caller.post(f"/endpoints/any/{path}", BODY)
        assert reply.headers["X-Triton-Adapter-Cache"] == "miss"
        ids.add(reply.headers["x-amzn-RequestId"])
    assert len(ids) == 4
    assert all(UUID.fullmatch(one) for one in ids)


def test_inference_component_names_the_model_without_target(runtime):
    answer = invoke(runtime, "", InferenceComponentName=NAMES[1], TargetVariant="blue")
    assert json.loads(answer["Body"].read())["model_name"] == NAMES[1]
    assert answer["InvokedProductionVariant"] == "blue"


def test_custom_attributes_do_not_return_by_themselves(runtime):
    answer = invoke(runtime, CustomAttributes="trace=7", InferenceId="one", PrefixAwareId="p")
    assert "CustomAttributes" not in answer


def test_custom_attributes_reach_a_forwarding_model(runtime, add_model):
    name = add_model("curious", answer="raise RuntimeError(request.parameters())")
    error = refusal(runtime, name, CustomAttributes="trace=7")
    assert "trace=7" in error.response["OriginalMessage"]


def test_bodies_above_awss_limit_are_served(runtime):
    body, size = binary_request(3_000_000)
    answer = invoke(runtime, NAMES[1], Body=body, ContentType=sized(size)["Content-Type"])
    found, length = answer["Body"].read(), int(answer["ContentType"].partition("=")[2])
    assert json.loads(found[:length])["model_name"] == NAMES[1]
    assert found[length:] == body[size:]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"EndpointName": "no_name"}, "at 'endpointName' failed to satisfy constraint"),
        ({"EndpointName": "a" * 64}, "have length less than or equal to 63"),
        ({"EndpointName": "a-"}, "regular expression"),
        ({"TargetModel": "m" * 1025}, "have length less than or equal to 1024"),
        ({"TargetModel": "../etc/passwd"}, "has a part that is empty, '.' or '..'"),
        ({"TargetModel": "/etc/passwd"}, "begins with a slash"),
        ({"TargetModel": "a//b"}, "has a part that is empty"),
        ({"TargetVariant": "no such"}, "at 'targetVariant' failed"),
        ({"InferenceId": "i" * 65}, "at 'inferenceId' failed"),
        ({"ContentType": "x" * 1025}, "at 'contentType' failed"),
        ({"Accept": "x" * 1025}, "at 'accept' failed"),
        ({"CustomAttributes": "x" * 1025}, "at 'customAttributes' failed"),
        ({"PrefixAwareId": "x" * 65}, "at 'prefixAwareId' failed"),
        ({"SessionId": "NEW_SESSION"}, "does not keep sessions"),
        ({"EnableExplanations": "`true`"}, "does not explain its predictions"),
        ({"TargetContainerHostname": "two"}, "does not invoke one container directly"),
        ({"TargetModel": "none/such.tar.gz"}, "key: models/none/such.tar.gz)"),
    ],
)
def test_unacceptable_call_is_validation_error_with_reason(runtime, members, said):
    error = refusal(runtime, **members)
    assert error.response["Error"]["Code"] == "ValidationError"
    assert error.response["ResponseMetadata"]["HTTPStatusCode"] == 400
    assert isinstance(error, runtime.exceptions.ValidationError)
    assert said in error.response["Error"]["Message"]


def test_all_that_is_wrong_is_said_at_once(runtime):
    error = refusal(runtime, EndpointName="a_b", TargetVariant="c_d")
    assert error.response["Error"]["Message"].startswith("2 validation errors detected: ")


def test_call_without_target_names_the_missing_header(runtime):
    error = refusal(runtime, "")
    request_id = error.response["ResponseMetadata"]["RequestId"]
    said = f"Request {request_id} is missing a target model header"
    assert error.response["Error"]["Message"].startswith(said)


def test_a_target_that_is_there_twice_is_refused(served):
    body = json.dumps(BODY).encode()
    head = (
        b"POST /endpoints/any/invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
        b"X-Amzn-SageMaker-Target-Model: plain\r\nX-Amzn-SageMaker-Target-Model: b\r\n\r\n"
    )
    with RawConnection(served.http) as connection:
        connection.send(head % len(body) + body)
        status, said = connection.read_answer()
    assert (status, b"'targetModel' is there 2 times" in said) == (400, True)


def test_asynchronous_calls_are_refused(runtime):
    with pytest.raises(ClientError, match="does not support asynchronous") as raised:
        runtime.invoke_endpoint_async(EndpointName="any", InputLocation="s3://a/b")
    assert raised.value.response["Error"]["Code"] == "ValidationError"


@pytest.mark.of_triton("2.51", "2.73", "its words for a bad request")
@rows(("body", "said"), [(b'{"inputs": []}', "expected 1 inputs"), (b"{", "parse")])
def test_models_refusal_is_parsed_as_model_error(runtime, caller, body, said):
    error = refusal(runtime, Body=body)
    assert isinstance(error, runtime.exceptions.ModelError)
    found = error.response
    assert found["ResponseMetadata"]["HTTPStatusCode"] == 424
    assert found["OriginalStatusCode"] == 400
    assert said in json.loads(found["OriginalMessage"])["error"]
    parsed = re.match(
        r'Received client error \((\d+)\) from \w+ with message "(.*)"\. See .* for more',
        found["Error"]["Message"],
    )
    assert parsed is not None
    assert parsed.groups() == ("400", found["OriginalMessage"])
    group = "log-group:/aws/sagemaker/Endpoints/any"
    assert found["LogStreamArn"] == f"arn:aws:logs:eu-west-1:000000000000:{group}"
    # boto3 drops this one
    reply = caller.call_endpoint("plain", body)
    assert reply.headers["x-amzn-ErrorType"] == "ModelError"
    assert reply.json()["ErrorCode"] == "CLIENT_ERROR_FROM_MODEL"


def test_raising_model_is_a_server_error(runtime, add_model):
    name = add_model("raises", answer="raise RuntimeError('so it is ' + 'x' * 3000)")
    found = refusal(runtime, name).response
    assert found["OriginalStatusCode"] == 500
    assert found["Error"]["Message"].startswith("Received server error (500) from primary with")
    assert found["Error"]["Message"].endswith("for more information.")
    assert len(found["Error"]["Message"]) == len(found["OriginalMessage"]) == 2048


def test_callers_too_many_are_told_when_to_return(served, caller, bucket, gate, tmp_path):
    crowded = write_python_model(tmp_path / "crowded", initialize=gate.statements)
    bucket.put_model("crowded", crowded)

    with background(served, threads=40) as others:
        asked = [others.ask(lambda http: http.call_endpoint("crowded")) for _ in range(40)]
        try:
            wait_until(lambda: sum(each.done() for each in asked) >= 8, 50, "some are answered")
        finally:
            gate.open()
        replies = [each.result() for each in asked]
    refused = [reply for reply in replies if reply.status == 503]
    assert len(refused) == 8
    assert {reply.headers["x-amzn-ErrorType"] for reply in refused} == {"ServiceUnavailable"}
    assert all(int(reply.headers["x-amz-retry-after"]) >= 1000 for reply in refused)
    assert [reply.status for reply in replies if reply.status != 503] == [200] * 32
    caller.unload_model("crowded")


def test_refusals_request_id_is_in_the_log(runtime, served):
    request_id = refusal(runtime, "none").response["ResponseMetadata"]["RequestId"]
    line = served.wait_for("request.failed", aws_request_id=request_id)
    assert (line["status"], line["model_id"], line["target_model"]) == (400, "none", "none")
