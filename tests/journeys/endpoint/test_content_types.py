"""Content types of models with one input, as boto3 sends them to the endpoint."""

import json

import pytest
from botocore.exceptions import ClientError

pytestmark = pytest.mark.triton

CONFIG = """\
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1, -1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1, -1] }]
parameters { key: "adapter_content_types" value { string_value: "text/csv" } }
"""


NPY = "application/x-npy"


def test_original_message_matches_the_models_own_path(runtime, caller, add_model):
    name = add_model("refusing", config=CONFIG)
    for body, content_type, accept in (
        *((b"1", "image/png", ""), (b"1", "text/csv", "image/png"), (b"1,x", "text/csv", "")),
        *((b"1", NPY, ""), (b"1,2\n3", "text/csv", ""), (b"{", "application/json", "")),
    ):
        headers = {"Content-Type": content_type} | ({"Accept": accept} if accept else {})
        reply = caller.post(f"/models/{name}/invoke", body, headers)
        assert reply.json()["model_name"] == name
        given = {
            "EndpointName": "any",
            "TargetModel": name,
            "Body": body,
            **({"Accept": accept} if accept else {}),
            "ContentType": content_type,
        }
        with pytest.raises(ClientError) as raised:
            runtime.invoke_endpoint(**given)
        found = raised.value.response
        assert found["OriginalStatusCode"] == reply.status
        assert json.loads(found["OriginalMessage"]) == reply.json()


def test_boto3_has_csv_back(runtime, add_model):
    given = {"EndpointName": "any", "TargetModel": add_model("typed", config=CONFIG)}
    given |= {"Body": b"1,2\n3,4\n", "ContentType": "text/csv"}
    answer = runtime.invoke_endpoint(**given, Accept="text/csv")
    assert (answer["ContentType"], answer["Body"].read()) == ("text/csv", b"1,2\n3,4\n")


def test_converted_call_tells_where_its_model_was(runtime, caller, add_model):
    """The call that loads the model waits for it once: a second wait would find it in memory."""
    given = {"EndpointName": "any", "TargetModel": add_model("cold", config=CONFIG)}
    given |= {"Body": b"1,2\n", "ContentType": "text/csv"}
    caller.unload("cold")
    answers = [runtime.invoke_endpoint(**given) for _ in range(2)]
    headers = [answer["ResponseMetadata"]["HTTPHeaders"] for answer in answers]
    assert [each["x-triton-adapter-cache"] for each in headers] == ["disk", "hit"]
