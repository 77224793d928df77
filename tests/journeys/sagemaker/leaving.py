"""Callers of a model who leave once it has their request."""

from collections.abc import Callable

from tests.asking import RawConnection, quoted
from tests.grpc_calls import calls_to, infer_request
from tests.running import RunningAdapter
from tests.trees import infer_body

# the adapter, the name of the model, and what waits until that has the request
Leave = Callable[[RunningAdapter, str, Callable[[], None]], None]


def hang_up(adapter: RunningAdapter, name: str, wait_asked: Callable[[], None]) -> None:
    with RawConnection(adapter.http) as connection:
        connection.post(f"/models/{quoted(name)}/invoke", infer_body(1.0))
        wait_asked()


def cancel_rpc(adapter: RunningAdapter, name: str, wait_asked: Callable[[], None]) -> None:
    with calls_to(adapter.grpc) as calls:
        stub = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        call = stub.future(infer_request(name, 1.0).SerializeToString())
        wait_asked()
        call.cancel()


def leave_stream(adapter: RunningAdapter, name: str, wait_asked: Callable[[], None]) -> None:
    with calls_to(adapter.grpc) as calls:
        messages = calls.stream([infer_request(name, 1.0)])
        wait_asked()
        messages.cancel()
