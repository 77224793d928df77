"""The real command with few descriptors, and callers with more connections than there may be."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import InferenceServerClient

from tests.attack.test_descriptors import is_well, lacking
from tests.constants import MOST_CONNECTIONS
from tests.journeys.memory.models import counted
from tests.processes import tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_SOON = 60
_FEW = 300  # descriptors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_python_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def adapter(model: Path) -> Iterator[RunningAdapter]:
    flags = (f"--model-roots={model.parent}", "--grpc-data=127.0.0.1:0")
    with embedded_adapter(*flags, COMPLETE, descriptors=_FEW) as adapter:
        yield adapter


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


@contextmanager
def connected(address: str, count: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that have sent `first` and nothing more."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(connect(address)))
            with suppress(OSError):
                made[-1].sendall(first)
        yield made


@pytest.mark.parametrize(
    "first", [b"", b"POST /models/m/in", b"GET /ping HTTP/1.1\r\nHost: localhost\r\n"]
)
def test_idle_connections_make_room_for_requests(
    adapter: RunningAdapter, model: Path, first: bytes
) -> None:
    with closing(adapter.client()) as kept, closing(Client(adapter.admin)) as admin:
        kept.load("m", model)
        assert kept.post("/models/m/invoke", infer_body(1.0)).status == 200
        with connected(adapter.http, 2 * _FEW, first):
            assert kept.post("/models/m/invoke", infer_body(1.0)).status == 200
            with closing(adapter.client()) as new:
                assert new.get("/ping").status == 200
                assert new.post("/models/m/invoke", infer_body(1.0)).status == 200
            assert admin.get("/livez").status == 200
            assert 0 < counted(adapter, 'triton_adapter_connections{listener="http"}') < _FEW / 4
        assert counted(adapter, "triton_adapter_connections_shed_total") > _FEW


def test_triton_that_dies_beside_idle_connections_is_replaced(model: Path) -> None:
    with embedded_adapter(f"--model-roots={model.parent}", COMPLETE, descriptors=_FEW) as adapter:
        client, admin = adapter.client(), Client(adapter.admin)
        with closing(client), closing(admin), connected(adapter.http, 400):
            os.kill(tritonserver(adapter), signal.SIGKILL)
            adapter.wait_for("triton.restarted")
            wait_until(lambda: is_well(client), _SOON, "the adapter is ready")
            wait_until(lambda: client.load("m", model).status == 200, _SOON, "it loads")
            assert client.post("/models/m/invoke", infer_body(1.0)).status == 200
            assert lacking(admin) == []


def test_busy_connections_make_new_ones_come_again(
    adapter: RunningAdapter,
) -> None:
    head = (
        b"POST /models HTTP/1.1\r\nHost: localhost\r\n"
        b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    )
    with ExitStack() as stack, closing(adapter.client()) as late:
        said = b"100"
        while b"100" in said:  # it waits for its body now
            holding = stack.enter_context(connect(adapter.http))
            holding.sendall(head)
            said = holding.recv(4096)
        answer = late.get("/ping")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert answer.headers["Connection"] == "close"
        assert answer.json()["code"] == "TooManyConnections"
        with closing(Client(adapter.admin)) as admin:
            assert admin.get("/livez").status == 200
        assert (
            counted(adapter, 'triton_adapter_connections_shed_total{how="refused",listener="http"}')
            > 0
        )
    with closing(adapter.client()) as client:
        wait_until(lambda: is_well(client), _SOON, "there is room again")


def cancel(adapter: RunningAdapter, name: str) -> None:
    """Send one inference over REST, and leave at once."""
    body = json.dumps(infer_body(1.0)).encode()
    head = f"POST /models/{name}/invoke HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with connect(adapter.http) as caller:
        caller.sendall(head.encode() + body)


def test_callers_who_cancel_leave_room_for_others(tmp_path: Path) -> None:
    """Triton works on each request of the slow model for longer than the test lasts."""
    slow = write_python_model(tmp_path / "slow", answer="import time; time.sleep(2)")
    quick = write_python_model(tmp_path / "quick")
    flags = (f"--model-roots={tmp_path}", COMPLETE)
    few = {MOST_CONNECTIONS: 8}
    with embedded_adapter(*flags, descriptors=_FEW, constants=few) as adapter:
        with closing(adapter.client()) as client:
            for name, package in (("slow", slow), ("quick", quick)):
                assert client.load(name, package).status == 200
        for _ in range(40):
            cancel(adapter, "slow")
            with closing(adapter.client()) as patient:
                assert patient.post("/models/quick/invoke", infer_body(1.0)).status == 200
        with closing(Client(adapter.admin)) as admin:
            state = admin.get("/debug/state").json()
        assert state["abandoned_requests"] <= 8
        assert not adapter.events("triton.exited")


@pytest.mark.parametrize("listener", ["grpc", "grpc_data"])
def test_grpc_connections_are_bounded(adapter: RunningAdapter, listener: str) -> None:
    """Raw connections that never speak; those that are one too many are closed."""
    with InferenceServerClient(adapter.listeners[listener]) as early:
        assert early.is_server_live()
        with connected(adapter.listeners[listener], 2 * _FEW) as made:
            assert early.is_server_live()
            with closing(adapter.client()) as client, closing(Client(adapter.admin)) as admin:
                assert client.get("/ping").status == 200
                assert admin.get("/livez").status == 200
            wait_until(lambda: sum(map(is_closed, made)) > _FEW, _SOON, "most are closed")

    def is_served() -> bool:
        with InferenceServerClient(adapter.listeners[listener]) as late, suppress(Exception):
            return late.is_server_live(client_timeout=5)
        return False

    wait_until(is_served, _SOON, "there is room again")


def is_closed(connection: socket.socket) -> bool:
    """What came before the end is read and dropped."""
    connection.settimeout(0)
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@pytest.mark.parametrize("listener", ["grpc", "grpc_data"])
def test_grpc_connection_too_many_is_unavailable_at_once(
    adapter: RunningAdapter, listener: str
) -> None:
    with connected(adapter.listeners[listener], 2 * _FEW):
        # of its own: another's connection would do as well
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(adapter.listeners[listener], options)
        ask = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        with channel, pytest.raises(grpc.RpcError) as failed:
            ask(b"", timeout=30)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
