"""Callers who cancel all their requests of a slow model, and what that takes of memory.

    python -m tests.nightly.cancelling [SECONDS]

prints the table of docs/measurements.md, "Callers who cancel".
"""

import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from adapter.triton.server.processes import resident_bytes
from tests.constants import MOST_CONNECTIONS
from tests.grpc_calls import infer_request
from tests.processes import descendants, tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

SECONDS = 60.0
_CALLERS = 8
_PATIENCE_SECONDS = 0.02
_MODEL_SECONDS = 0.05
_VALUES = [1.0] * 4_000  # 16 kB as binary, 20 kB as JSON
_MODEL = "slow"
_FEW_CONNECTIONS = {MOST_CONNECTIONS: 60}
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_KINDS = ("REST", "gRPC")


@dataclass(frozen=True)
class Outcome:
    """What one minute of cancelled calls left behind. `others` are the answers of patient callers,
    by protocol and code.
    """

    kind: str
    way: str
    cancelled: int
    adapter_bytes: tuple[int, int]  # before and after
    triton_bytes: tuple[int, int]
    others: dict[str, int]
    has_triton_ended: bool


def cancel_rest(address: str) -> None:
    host, _, port = address.rpartition(":")
    body = json.dumps(infer_body(*_VALUES)).encode()
    head = f"POST /v2/models/{_MODEL}/infer HTTP/1.1\r\nHost: {address}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(head.encode() + body)
        connection.settimeout(_PATIENCE_SECONDS)
        connection.recv(1)


def cancel_grpc(channel: grpc.Channel) -> None:
    message = infer_request(_MODEL, *_VALUES).SerializeToString()
    call = channel.unary_unary(_INFER).future(message)
    with suppress(grpc.RpcError, grpc.FutureTimeoutError):
        call.result(timeout=_PATIENCE_SECONDS)
    call.cancel()


def ask_patiently(kind: str, address: str) -> str:
    """Call another model, which is not slow, and return the code."""
    if kind == "REST":
        with closing(Client(address)) as client:
            return str(client.post("/v2/models/quick/infer", infer_body(1.0)).status)
    with closing(grpc.insecure_channel(address)) as channel:
        message = infer_request("quick", 1.0).SerializeToString()
        try:
            channel.unary_unary(_INFER)(message, timeout=10)
        except grpc.RpcError as error:
            return error.code().name
    return "OK"


@contextmanager
def canceller(kind: str, http: str, rpc: str) -> Iterator[Callable[[], None]]:
    """Return what sends one call and cancels it; each caller has a channel of its own."""
    if kind == "REST":
        yield lambda: cancel_rest(http)
        return
    options = [("grpc.use_local_subchannel_pool", 1)]
    with closing(grpc.insecure_channel(rpc, options=options)) as channel:
        yield lambda: cancel_grpc(channel)


def cancel_for(seconds: float, kind: str, http: str, rpc: str) -> tuple[int, dict[str, int]]:
    """Return how many calls were cancelled, and the codes of those that were not."""
    end = time.monotonic() + seconds
    others: dict[str, int] = {}

    def run(_: int) -> int:
        count = 0
        with canceller(kind, http, rpc) as cancel:
            while time.monotonic() < end:
                cancel()
                count += 1
        return count

    def ask() -> None:
        pausing = threading.Event()
        while time.monotonic() < end:
            for protocol, address in (("REST", http), ("gRPC", rpc)):
                answer = f"{protocol} {ask_patiently(protocol, address)}"
                others[answer] = others.get(answer, 0) + 1
            pausing.wait(0.2)

    with ThreadPoolExecutor(_CALLERS + 1) as pool:
        patient = pool.submit(ask)
        cancelled = sum(pool.map(run, range(_CALLERS)))
        patient.result()
    return cancelled, others


def sizes(adapter: RunningAdapter, triton: int) -> tuple[int, int]:
    """Resident bytes of the adapter, and of its Triton with all processes of the models."""
    own = resident_bytes(Path("/proc", str(adapter.process.pid)))
    below = [triton, *descendants(triton)]
    return own, sum(resident_bytes(Path("/proc", str(pid))) for pid in below)


def measure(kind: str, *, is_straight: bool, seconds: float = SECONDS) -> Outcome:
    """Have callers cancel through the adapter, or at its Triton's own port."""
    with tempfile.TemporaryDirectory() as folder:
        slow = f"import time; time.sleep({_MODEL_SECONDS})"
        slow_model = write_python_model(Path(folder, _MODEL), answer=slow)
        quick_model = write_python_model(Path(folder, "quick"))
        flags = (COMPLETE, f"--model-roots={folder}")
        with embedded_adapter(*flags, constants=_FEW_CONNECTIONS) as adapter:
            with closing(adapter.client()) as client:
                for name, package in ((_MODEL, slow_model), ("quick", quick_model)):
                    assert client.load(name, package).status == 200
            http, rpc = adapter.http, adapter.grpc
            if is_straight:
                http, rpc = adapter.http_address, adapter.grpc_address
            cancel_for(1, kind, http, rpc)
            triton = tritonserver(adapter)
            before = sizes(adapter, triton)
            cancelled, others = cancel_for(seconds, kind, http, rpc)
            has_ended = bool(adapter.events("triton.exited"))
            after = sizes(adapter, triton) if not has_ended else (before[0], 0)
    return Outcome(
        kind=kind,
        way="straight to Triton" if is_straight else "through the adapter",
        cancelled=cancelled,
        adapter_bytes=(before[0], after[0]),
        triton_bytes=(before[1], after[1]),
        others=others,
        has_triton_ended=has_ended,
    )


if __name__ == "__main__":
    for kind in _KINDS:
        for is_straight in (False, True):
            seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
            outcome = measure(kind, is_straight=is_straight, seconds=seconds)
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()
