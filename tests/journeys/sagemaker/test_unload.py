"""DELETE /models/{model_name}: the memory is free when it answers."""

import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait

import pytest

from tests.asking import RawConnection, background, refusal, triton_index
from tests.processes import is_alive, stubs
from tests.running import EXAMPLES, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_ECHO = EXAMPLES / "identity"


@pytest.fixture
def stopping(package, gate, client) -> Iterator[str]:
    """A loaded model that stands at the gate in every inference."""
    write_python_model(package, answer=gate.statements)
    client.load_model("stopping", package)
    yield "/models/stopping"
    gate.open()  # before the model is unloaded


def test_answered_delete_leaves_nothing(client, adapter):
    client.load_model("echo", _ECHO)
    (stub,) = stubs(adapter, "echo")

    reply = client.unload("echo")

    assert not is_alive(stub)
    assert triton_index(adapter).get("echo", "UNAVAILABLE") == "UNAVAILABLE"
    assert not (adapter.repository / "echo").exists()
    assert adapter.state()["models"] == []
    assert adapter.state()["memory"]["devices"]["host"]["used_by_models_bytes"] == 0
    assert (reply.status, reply.json()) == (200, {"modelName": "echo"})
    assert refusal(client.unload("echo")) == (404, "ModelNotFound", "echo")


def test_unload_refuses_new_requests_and_awaits_old(client, adapter, stopping, gate):
    with RawConnection(adapter.http) as invoking, background(adapter) as others:
        invoking.post(f"{stopping}/invoke", infer_body(1.0))
        gate.wait_reached()
        deletes = [others.ask(lambda c: c.delete(stopping)) for _ in range(2)]
        wait_until(lambda: client.get(stopping).status == 404, 60, "the unload has begun")

        turned_away = client.post(f"{stopping}/invoke", infer_body(1.0))
        assert refusal(turned_away) == (404, "ModelNotFound", "stopping")
        assert client.get("/models").json() == {"models": []}
        assert not invoking.is_answered()
        assert not any(each.done() for each in deletes)

        gate.open()
        wait(deletes, return_when=FIRST_COMPLETED)
        assert invoking.is_answered()  # before any of them
        status, answer = invoking.read_answer()
        assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [1.0])
        statuses = sorted(each.result().status for each in deletes)
    assert statuses == [200, 404]  # two at once: one of them does it
