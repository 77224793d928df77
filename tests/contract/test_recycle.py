"""A real Triton is restarted for an operator, and callers only wait."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from tests.grpc_calls import calls_to
from tests.processes import is_alive, tritonserver
from tests.running import COMPLETE, EXAMPLES, Client, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("path", ["/models/echo/invoke", "/v2/models/echo/infer", "ModelInfer"])
def test_calls_wait_for_the_next_triton(path):
    with (
        embedded_adapter(COMPLETE) as adapter,
        closing(adapter.client()) as client,
        closing(Client(adapter.admin)) as admin,
        calls_to(adapter.grpc) as calls,
        ThreadPoolExecutor(1) as pool,
    ):
        assert client.load("echo", EXAMPLES / "identity").status == 200
        before = tritonserver(adapter)
        done = pool.submit(admin.post, "/recycle")
        statuses = []
        while not done.done():
            if path == "ModelInfer":
                assert calls.infer("echo", 1.0) == [1.0]
                statuses.append(200)
            else:
                statuses.append(client.post(path, infer_body(1.0)).status)
        assert (done.result().status, done.result().json()["status"]) == (200, "recycled")
        assert set(statuses) == {200}
        assert not is_alive(before)
        assert [m["state"] for m in adapter.state()["models"]] == ["READY"]
