"""Machines of a fleet without an adapter: they answer a real Envoy as a test says."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc

from tests.fleet.envoy import RunningEnvoy

INFER = "/inference.GRPCInferenceService/ModelInfer"
NOT_STARTED = "x-triton-adapter-not-started"
NO_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_PIECE_BYTES = 2**16


class HttpCall(BaseHTTPRequestHandler):
    """A call that came to a machine. What of its body was not read is read after the answer."""

    protocol_version = "HTTP/1.1"
    server: "StubMachine"

    def handle_one_request(self) -> None:
        self._left = 0
        super().handle_one_request()
        self.read()

    def parse_request(self) -> bool:
        is_one = super().parse_request()
        self._left = int(self.headers.get("Content-Length", 0)) if is_one else 0
        return is_one

    def do_GET(self) -> None:
        if self.path == "/readyz":
            self.answer(200 if self.server.is_up else 503)
        else:
            self._called()

    def _called(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        self.server.act(self)

    do_POST = do_PUT = do_DELETE = do_HEAD = _called  # noqa: N815 - names of the base

    def read(self) -> int:
        """Read the rest of the body, and return its length."""
        size = self._left
        while self._left and (piece := self.rfile.read1(min(self._left, _PIECE_BYTES))):
            self._left -= len(piece)
        return size - self._left

    def answer(self, status: int, **headers: str) -> None:
        body = self.server.name.encode()
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, **headers: str) -> None:
        """As a machine that has no room for the model."""
        self.answer(503, **{NOT_STARTED: "1"}, **headers)

    def log_message(self, *args: object) -> None:
        pass


class RpcCall:
    """A call over gRPC that came to a machine, with the messages that its caller sends."""

    def __init__(
        self, machine: "StubMachine", requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> None:
        self.server, self._requests, self._context = machine, requests, context

    def read(self) -> int:
        return sum(len(each) for each in self._requests)

    def answer(self, status: int) -> None:
        if status != 200:
            self._context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")

    def refuse(self, **headers: str) -> None:
        """In trailers alone, as the adapter does."""
        metadata = [(NOT_STARTED, "1"), *((k.replace("_", "-"), v) for k, v in headers.items())]
        self._context.set_trailing_metadata(tuple(metadata))
        self.answer(503)


Act = Callable[[Any], None]


class StubMachine(ThreadingHTTPServer):
    """`act` answers each call, an HttpCall or RpcCall. `asked`: what came, in order."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, name: str, act: Act) -> None:
        super().__init__(("127.0.0.1", 0), HttpCall)
        self.name, self.act = name, act
        self.is_up = True
        self.asked: list[str] = []
        self.http = f"127.0.0.1:{self.server_port}"
        self._rpc = grpc.server(ThreadPoolExecutor(8), options=NO_LIMITS)
        self._rpc.add_generic_rpc_handlers((_Rpc(self),))
        rpc_port = self._rpc.add_insecure_port("127.0.0.1:0")
        self._rpc.start()
        self.argument = f"{name}=127.0.0.1:{self.server_port}:{self.server_port}:{rpc_port}"
        self._serving = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._serving.start()

    def close(self) -> None:
        self._rpc.stop(None).wait()
        self.shutdown()
        self._serving.join()
        self.server_close()


class _Rpc(grpc.GenericRpcHandler):
    def __init__(self, machine: StubMachine) -> None:
        self._machine = machine

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            self._machine.asked.append(details.method)
            self._machine.act(RpcCall(self._machine, requests, context))
            return self._machine.name.encode()

        return grpc.stream_unary_rpc_method_handler(serve)


class PatientEnvoy(RunningEnvoy):
    """It waits for as many seconds as `retry-in` of a refusal says before it sends a call again, so
    that a test knows what comes meanwhile.
    """

    def configuration(self, *arguments: Any) -> str:
        text = super().configuration(*arguments)
        policy = "rate_limited_retry_back_off: {max_interval: 60s, reset_headers: "
        policy += "[{name: retry-in, format: SECONDS}]}"
        wanted = "                num_retries: 2\n"
        assert text.count(wanted) == 1
        return text.replace(wanted, f"{wanted}                {policy}\n")


@contextmanager
def stub_fleet(
    folder: Path, count: int, act: Act, start: type[RunningEnvoy] = RunningEnvoy
) -> Iterator[tuple[list[StubMachine], RunningEnvoy]]:
    """So many machines, and an Envoy that sends to all of them."""
    with ExitStack() as opened:
        machines = []
        for number in range(count):
            machines.append(machine := StubMachine(f"machine-{number}", act))
            opened.callback(machine.close)
        envoy = start(machines, folder)  # type: ignore[arg-type]
        opened.callback(envoy.stop)
        envoy.wait_for(*machines)  # type: ignore[arg-type]
        yield machines, envoy
