"""One model's load and unload are nobody else's business."""

import pytest

from tests.asking import Gate, background
from tests.running import EXAMPLES, Client, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_CONNECTIONS = 24


def invoke_often(client: Client) -> set[int]:
    """The statuses of as many invocations as a connection is kept for in practice."""
    return {client.invoke("echo").status for _ in range(20)}


def test_requests_wait_for_no_other_models_load(adapter, client, package, tmp_path):
    """Each stands still until all the others have been answered."""
    load, answer = Gate(tmp_path / "load"), Gate(tmp_path / "answer")
    write_python_model(package, initialize=load.statements, answer=answer.statements)
    assert client.load("echo", EXAMPLES / "identity").status == 200

    with background(adapter, _CONNECTIONS + 2) as others:
        try:
            loading = others.ask(lambda c: c.load("slow", package))
            load.wait_reached()
            crowd = [others.ask(invoke_often) for _ in range(_CONNECTIONS)]
            assert [each.result(60) for each in crowd] == [{200}] * _CONNECTIONS
            assert not loading.done()
            load.open()
            assert loading.result().status == 200

            invocation = others.ask(lambda c: c.invoke("slow"))
            answer.wait_reached()
            unloading = others.ask(lambda c: c.unload("slow"))
            wait_until(lambda: client.get("/models/slow").status != 200, 60, "it is unloading")
            crowd = [others.ask(invoke_often) for _ in range(_CONNECTIONS)]
            assert [each.result(60) for each in crowd] == [{200}] * _CONNECTIONS
            assert not unloading.done()
        finally:
            load.open()
            answer.open()
        assert invocation.result().status == 200
        assert unloading.result().status == 200


def test_racing_loads_of_a_name_agree_finally(adapter, client):
    with background(adapter) as others:
        loads = [others.ask(lambda c: c.load("echo", EXAMPLES / "identity")) for _ in range(6)]
        statuses = sorted(each.result().status for each in loads)
        deletes = [others.ask(lambda c: c.unload("echo")) for _ in range(4)]
        gone = sorted(each.result().status for each in deletes)

    assert statuses == [200, 409, 409, 409, 409, 409]
    assert gone == [200, 404, 404, 404]
    with adapter.client() as other:
        assert other.get("/models").json() == {"models": []}
    assert list(adapter.repository.iterdir()) == []
