"""What another machine may be asked for, as a proxy in front of several sees it."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from adapter.core.calls import NOT_STARTED, RPC_NOT_STARTED
from tests.grpc_calls import calls_to
from tests.journeys.endpoint.folder_store import Caller
from tests.processes import suspend, tritonserver
from tests.running import Reply, wait_until
from tests.trees import infer_body

pytestmark = pytest.mark.triton

Start = Callable[..., Caller]
ROOM_FOR_TWO = ("--memory-source=off", "--memory-limit=250MiB")
PINNED = ("--pin=a.tar.gz", "--pin=b.tar.gz")


def invoke(caller: Caller, name: str) -> Reply:
    with caller.adapter.client() as http:
        return http.call_endpoint(name)


def v2_infer(caller: Caller, name: str) -> Reply:
    with caller.adapter.client() as http:
        return http.post(f"/v2/models/{name}/infer", infer_body(0.0))


def told(reply: Reply) -> tuple[int, str, str | None]:
    code = reply.headers.get("x-amzn-ErrorType") or reply.code
    return reply.status, code, reply.headers.get(NOT_STARTED)


def check_not_started(caller: Caller, name: str, v2_code: str, rpc_code: str) -> None:
    """Each contract says that another machine may be asked."""
    assert told(invoke(caller, name)) == (503, "ServiceUnavailable", "1")
    assert told(v2_infer(caller, name)) == (503, v2_code, "1")
    with calls_to(caller.adapter.grpc) as calls, pytest.raises(grpc.RpcError) as raised:
        calls.infer(name, 0.0)
    assert raised.value.code().name == rpc_code
    assert dict(raised.value.trailing_metadata())[RPC_NOT_STARTED] == "1"


def test_another_machine_may_serve_what_cannot_evict(start, store):
    store.put_all("a.tar.gz", "b.tar.gz", "c.tar.gz")
    caller = start(*ROOM_FOR_TWO, *PINNED, "--on-demand")
    for name in ("a.tar.gz", "b.tar.gz"):
        caller.invoke(name)

    check_not_started(caller, "c.tar.gz", "NoRoom", "RESOURCE_EXHAUSTED")


def test_drain_answers_loaded_models_alone(start, store):
    """The rest is for another machine."""
    store.put_all("a.tar.gz", "b.tar.gz")
    caller = start("--on-demand")
    caller.invoke("a.tar.gz")
    caller.admin.post("/drain?timeout=0")

    assert caller.admin.get("/readyz").status == 503
    assert invoke(caller, "a.tar.gz").status == 200
    check_not_started(caller, "b.tar.gz", "BackendUnavailable", "UNAVAILABLE")
    on_disk = caller.admin.get("/debug/state").json()["on_demand"]["on_disk"]
    assert on_disk["models"] == 0  # nothing was fetched for nothing


def test_request_broken_by_triton_is_not_retried(start, store):
    store.put_all("a.tar.gz")
    caller = start("--on-demand")
    caller.invoke("a.tar.gz")
    models = caller.adapter.models
    with ThreadPoolExecutor(1) as pool:
        suspend(pid := tritonserver(caller.adapter))
        reply = pool.submit(invoke, caller, "a.tar.gz")
        wait_until(lambda: models()["a.tar.gz"]["in_flight"] == 1, 30, "Triton has the request")
        os.kill(pid, signal.SIGKILL)
        assert told(reply.result(30)) == (424, "ModelError", None)
