"""With inline_files off loads take what lies in a model root, and nothing that a caller brings."""

import json
from collections.abc import Iterator

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.grpc_calls import calls_to
from tests.journeys.v2.calls import CONFIG, Repository
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, unload_all

pytestmark = pytest.mark.triton

# the second names a folder that is there
NAMES = ("brought", "echo")


@pytest.fixture(scope="module")
def running(root) -> Iterator[RunningAdapter]:
    with embedded_adapter(f"--model-roots={root}", "--inline-files=off", COMPLETE) as adapter:
        yield adapter


@pytest.fixture
def adapter(running) -> Iterator[RunningAdapter]:
    yield running
    unload_all(running)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", [{"config": json.dumps(CONFIG)}, {}])
def test_files_over_rest_are_403_with_a_reason(adapter, client, name, config):
    reply = Repository(client).load(name, **config, **{"file:1/model.py": "cHJpbnQoKQ=="})

    assert (reply.status, reply.code) == (403, "InlineFilesOff")
    assert "inline_files is off" in reply.error
    assert adapter.state()["models"] == []


@pytest.mark.parametrize("name", NAMES)
def test_files_over_grpc_are_permission_denied(adapter, name):
    request = pb.RepositoryModelLoadRequest(model_name=name)
    request.parameters["config"].string_param = json.dumps(CONFIG)
    request.parameters["file:1/model.py"].bytes_param = b"print()"
    with calls_to(adapter.grpc) as calls:
        code, words = calls.refused("RepositoryModelLoad", request)

    assert (code, words.partition(":")[0]) == ("PERMISSION_DENIED", "InlineFilesOff")
    assert "inline_files is off" in words
    assert adapter.state()["models"] == []


def test_callers_files_do_not_replace_loaded_models(client):
    repository = Repository(client)
    assert repository.load("echo").status == 200
    assert repository.load_files("echo", {"1/model.py": b"print()"}).status == 403
    assert repository.infer("echo", 2.5) == [2.5]


def test_folders_load_as_ever_and_with_another_configuration(client):
    repository = Repository(client)
    assert repository.load("echo", config=json.dumps(CONFIG)).status == 200
    assert repository.infer("echo", 1.0) == [1.0]
