"""What a model says, or its caller through it, against what the adapter sees of its processes."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.processes import stubs
from tests.running import (
    COMPLETE,
    Client,
    Reply,
    RunningAdapter,
    embedded_adapter,
    wait_until,
)
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

_SAYS_DEAD = """
if values[0] == 1:
    text = "Stub process 'lang_0_0' is not healthy."
    error = pb_utils.TritonError(text)
    return pb_utils.InferenceResponse(error=error)
"""
_TWO = CONFIG + "instance_group [{ count: 2 kind: KIND_CPU }]\n"


@pytest.fixture(scope="module")
def running() -> Iterator[RunningAdapter]:
    with embedded_adapter("--model-roots=/", COMPLETE) as adapter:
        yield adapter


def ask(client: Client, value: float = 0.0, **more: object) -> Reply:
    return client.post("/models/lang/invoke", infer_body(value) | more)


def test_model_claiming_a_dead_process_goes_on(client, tmp_path):
    package = write_python_model(tmp_path / "lang", answer=_SAYS_DEAD)
    client.load_model("lang", package)
    for _ in range(3):
        assert ask(client, 1.0).status == 500
        assert ask(client).status == 200


@pytest.mark.parametrize("request_id", ["r7", "x" * 3000 + "\ntwo lines"])
def test_dead_process_is_noticed_by_any_request(client, running, tmp_path, request_id):
    client.load_model("lang", write_python_model(tmp_path / "lang"))
    [pid] = stubs(running, "lang")
    os.kill(pid, signal.SIGKILL)
    assert ask(client, id=request_id).status == 500
    wait_until(lambda: ask(client).status == 404, 60, "the model is known to be dead")


@pytest.mark.nightly
def test_model_without_one_of_two_processes_is_dead(client, running, tmp_path):
    package = write_python_model(tmp_path / "lang", config=_TWO)
    client.load_model("lang", package)
    pids = stubs(running, "lang")
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: ask(client).status == 404, 60, "the model is known to be dead")
