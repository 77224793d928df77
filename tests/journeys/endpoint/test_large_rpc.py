"""Calls over gRPC that are too large for the adapter's own server, for models that are not loaded:
they wait for their model, and then go straight to Triton.
"""

from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.running import wait_until

pytestmark = pytest.mark.triton

MIB = 2**20


def tensor(size: int) -> InferInput:
    value = InferInput("IN", [size // 4], "FP32")
    value.set_data_from_numpy(np.ones(size // 4, np.float32))
    return value


def infer(caller, name: str, size: int, **metadata: str) -> np.ndarray:
    headers = {key.replace("_", "-"): value for key, value in metadata.items()}
    with InferenceServerClient(caller.adapter.grpc) as client:
        return client.infer(name, [tensor(size)], headers=headers).as_numpy("OUT")


def refused(caller, name: str, size: int, **metadata: str) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as error:
        infer(caller, name, size, **metadata)
    return error.value.status().removeprefix("StatusCode."), error.value.message()


def states(caller) -> list[str]:
    return [each["state"] for each in caller.admin.get("/debug/state").json()["models"]]


@pytest.mark.parametrize(
    ("size", "metadata"), [(5 * MIB, {}), (20 * MIB, {"mm_model_id": "a.tar.gz"})]
)
def test_a_large_call_loads_its_model(start, store, size, metadata):
    store.put("a.tar.gz", 2)
    caller = start("--on-demand")
    for _ in range(2):  # loaded, then there
        answer = infer(caller, "a.tar.gz", size, **metadata)
        assert (answer.size, set(answer)) == (size // 4, {3.0})


def test_large_call_waits_only_for_own_model(start, store, gate):
    store.put("slow.tar.gz", 2, initialize=gate.statements)
    store.put("a.tar.gz", 1)
    caller = start("--on-demand")
    with InferenceServerClient(caller.adapter.grpc) as client:
        answers: SimpleQueue[Any] = SimpleQueue()
        client.async_infer(
            "slow.tar.gz", [tensor(20 * MIB)], lambda result, error: answers.put((result, error))
        )
        wait_until(lambda: states(caller) == ["LOADING"], 30, "it is being loaded")
        assert set(client.infer("a.tar.gz", [tensor(20 * MIB)]).as_numpy("OUT")) == {2.0}
        gate.open()
        result, error = answers.get(timeout=60)
    assert error is None
    assert set(result.as_numpy("OUT")) == {3.0}


def test_caller_leaving_a_waiting_large_call_leaves_nothing(start, store, gate):
    store.put("slow.tar.gz", 2, initialize=gate.statements)
    caller = start("--on-demand")
    with InferenceServerClient(caller.adapter.grpc) as client:
        ended: SimpleQueue[Any] = SimpleQueue()
        call = client.async_infer(
            "slow.tar.gz", [tensor(20 * MIB)], lambda result, error: ended.put((result, error))
        )
        wait_until(lambda: states(caller) == ["LOADING"], 30, "it is being loaded")
        call.cancel()
        assert ended.get(timeout=30)[0] is None
        gate.open()
        wait_until(lambda: states(caller) == ["READY"], 60, "it is loaded")
        assert set(client.infer("slow.tar.gz", [tensor(20 * MIB)]).as_numpy("OUT")) == {3.0}
    [model] = caller.admin.get("/debug/state").json()["models"]
    assert model["served"] == 1
    assert [line for line in list(caller.adapter.lines) if line["level"] == "error"] == []


def test_large_call_learns_why_its_model_failed(start, store):
    store.put("a.tar.gz", 1)
    caller = start("--on-demand")
    code, text = refused(caller, "missing.tar.gz", 5 * MIB)
    assert (code, "; ArtifactNotFound: " in text) == ("NOT_FOUND", True)
    code, text = refused(caller, "a.tar.gz", 5 * MIB, mm_model_id="of-a-mesh")
    assert (code, "larger than max" in text) == ("RESOURCE_EXHAUSTED", True)
    assert caller.loaded() == []
