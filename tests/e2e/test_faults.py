"""Containers that are killed or stopped while callers go on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from tests.e2e.stack import Caller, Stack
from tests.running import Client, Reply, wait_until
from tests.trees import infer_body

OK, UNAVAILABLE = "OK", "StatusCode.UNAVAILABLE"


@pytest.fixture
def identity(stack: Stack) -> Iterator[str]:
    with closing(stack.client()) as client:
        assert client.load("identity", "/models/local/identity").status == 200
    yield "identity"
    with closing(stack.client()) as client:
        assert client.delete("/models/identity").status == 200


def over_http(client: Client, model: str) -> Callable[[], object]:
    return lambda: client.post(f"/models/{model}/invoke", infer_body(1.0)).status


def over_grpc(client: InferenceServerClient, model: str) -> Callable[[], object]:
    tensor = InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([1.0], np.float32))

    def call() -> object:
        try:
            client.infer(model, [tensor], client_timeout=30)
        except InferenceServerException as error:
            return error.status()
        return OK

    return call


@contextmanager
def callers(stack: Stack, model: str) -> Iterator[tuple[Caller, Caller]]:
    """One at each listener; both are served when this begins."""
    with ExitStack() as opened:
        client = opened.enter_context(closing(stack.client()))
        triton = opened.enter_context(InferenceServerClient(stack.grpc))
        http = opened.enter_context(Caller(over_http(client, model)))
        grpc = opened.enter_context(Caller(over_grpc(triton, model)))
        http.wait_more(200)
        grpc.wait_more(OK)
        yield http, grpc


def test_dead_triton_is_503_until_models_are_back(stack, identity):
    with callers(stack, identity) as (http, grpc):
        stack.kill("triton-cpu")
        http.wait_other(200)
        grpc.wait_other(OK)
        stack.wait_healthy()
        http.wait_more(200)
        grpc.wait_more(OK)

    assert set(http.counts) == {200, 503}
    assert set(grpc.counts) == {OK, UNAVAILABLE}
    assert stack.restarts("triton-cpu") == 1
    assert stack.restarts("adapter") == 0


def test_restarted_adapter_has_the_models_triton_kept(stack, identity):
    with callers(stack, identity) as (http, grpc):
        stack.kill("adapter")
        http.wait_other(200)
        grpc.wait_other(OK)
        stack.wait_healthy()
        http.wait_more(200)
        grpc.wait_more(OK)

    assert set(http.counts) <= {200, 503, "no answer"}
    assert set(grpc.counts) == {OK, UNAVAILABLE}
    assert [line["model_id"] for line in stack.events("model.adopted")] == [identity]
    assert stack.restarts("adapter") == 1


def test_a_restart_of_everything_needs_no_hand(stack):
    stack.compose("restart", "--timeout=30")
    stack.wait_healthy()

    with closing(stack.client()) as client:
        assert client.load("identity", "/models/local/identity").status == 200
        assert client.post("/models/identity/invoke", infer_body(1.0)).status == 200
        assert client.delete("/models/identity").status == 200


def in_flight(stack: Stack) -> int:
    with closing(Client(stack.admin)) as client:
        models = client.get("/debug/state").json()["models"]
    return sum(model["in_flight"] for model in models)


def test_stop_ends_adapter_before_triton_without_loss(stack):
    replies: list[Reply] = []

    def ask() -> None:
        with closing(stack.client()) as client:
            replies.append(client.post("/models/slow/invoke", infer_body(2.0)))

    with closing(stack.client()) as client:
        assert client.load("slow", "/models/local/slow").status == 200
    asking = [threading.Thread(target=ask) for _ in range(3)]
    for thread in asking:
        thread.start()
    wait_until(lambda: in_flight(stack) == 3, 10, "three requests are in flight")

    stack.compose("stop")

    for thread in asking:
        thread.join(10)
    assert [reply.status for reply in replies] == [200, 200, 200]
    ended = {}
    for service in ("adapter", "triton-cpu"):
        state = stack.container(service).attrs["State"]
        assert state["ExitCode"] == 0
        ended[service] = datetime.fromisoformat(state["FinishedAt"])
    assert ended["adapter"] < ended["triton-cpu"]
