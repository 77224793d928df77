"""The model repository extension over gRPC, through the same control as every other listener."""

import json

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.grpc_calls import calls_to, load_request
from tests.journeys.v2.calls import CONFIG
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


@pytest.fixture
def calls(adapter):
    with calls_to(adapter.grpc) as found:
        yield found


def unload_request(name: str, **parameters: bool) -> pb.RepositoryModelUnloadRequest:
    request = pb.RepositoryModelUnloadRequest(model_name=name)
    for key, value in parameters.items():
        request.parameters[key].bool_param = value
    return request


def test_a_load_takes_the_folder_of_that_name(calls, identity):
    calls.call("RepositoryModelLoad", load_request(identity.name))
    assert calls.index() == [(identity.name, "1", "READY")]
    assert calls.infer(identity.name, 1.5) == [1.5]
    calls.call("RepositoryModelUnload", unload_request(identity.name))
    assert calls.index() == []


def test_load_may_bring_files_and_config(calls, tmp_path):
    code = (write_python_model(tmp_path, answer="values = 2 * values") / "1/model.py").read_bytes()
    files = {"config": json.dumps(CONFIG), "file:1/model.py": code}
    calls.call("RepositoryModelLoad", load_request("team/ä", **files))
    assert calls.infer("team/ä", 2.0) == [4.0]
    files["file:1/model.py"] = code.replace(b"2 * values", b"3 * values")
    calls.call("RepositoryModelLoad", load_request("team/ä", **files))
    assert calls.infer("team/ä", 2.0) == [6.0]


def test_the_listeners_share_their_models(calls, client, identity):
    client.load_model("by sagemaker", identity)
    assert calls.index(ready=True) == [("by sagemaker", "1", "READY")]
    calls.call("RepositoryModelLoad", load_request("by sagemaker"))  # it is there already
    calls.call("RepositoryModelUnload", unload_request("by sagemaker", unload_dependents=True))
    assert client.get("/models").json() == {"models": []}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"color": "red"}, "no such parameter: 'color'; the known ones are: config, force"),
        ({"config": 7}, "parameter config must be"),
        ({"config": "{}", "file:../x": b"x"}, "is not file:<version>/<file-name>"),
    ],
)
def test_senseless_load_is_refused_by_name(calls, parameters, words):
    code, text = calls.refused("RepositoryModelLoad", load_request("m", **parameters))
    assert (code, words in text) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("RepositoryIndex", pb.RepositoryIndexRequest),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest),
    ],
)
def test_there_is_one_repository(calls, method, request_type):
    code, text = calls.refused(method, request_type(repository_name="other"))
    assert (code, "repository_name" in text) == ("INVALID_ARGUMENT", True)
