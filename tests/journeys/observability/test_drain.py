"""SIGTERM and `drain` under load, on a real Triton: who was promised an answer gets it."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http.client import RemoteDisconnected

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.asking import background
from tests.grpc_calls import calls_to, infer_request
from tests.running import COMPLETE, EXAMPLES, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

CALLERS = 4


def drain(adapter: RunningAdapter, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "adapter", "drain", *flags]
    if not any(flag.startswith("--url") for flag in flags):
        command.append(f"--url=http://{adapter.admin}/drain")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=110)
    return process.returncode, said


def not_ready(adapter: RunningAdapter) -> str:
    with Client(adapter.admin) as admin:
        reply = admin.get("/readyz")
        return reply.json()["reason"] if reply.status == 503 else ""


def invoke_until_told_to_close(adapter: RunningAdapter, begun: threading.Event) -> int:
    """On one connection; every request that was sent must be answered. How many were."""
    with adapter.client() as client:
        count = 0
        while True:
            reply = client.invoke("echo")
            assert reply.status == 200, reply.body
            count += 1
            begun.set()
            if reply.headers["Connection"] == "close":
                return count


def infer_while_serving(listener: str, adapter: RunningAdapter, begun: threading.Event) -> int:
    """As a client that watches the listener's health does."""
    with calls_to(adapter.listeners[listener]) as calls:
        check = calls.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        count = 0
        while (
            check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        ):
            assert calls.infer("echo", 1.0) == [1.0]
            count += 1
            begun.set()
        return count


class OpenStream:
    """ModelStreamInfer with one request under way, until it is told to go on."""

    def __init__(self, address: str, pool: ThreadPoolExecutor) -> None:
        self._more = threading.Event()
        self.answers: Future[int] = pool.submit(self._talk, address)

    def _requests(self):
        yield infer_request("slow", 1.0)
        self._more.wait(60)
        yield infer_request("slow", 2.0)

    def _talk(self, address: str) -> int:
        with calls_to(address) as calls:
            messages = list(calls.stream(self._requests()))
        assert [message.error_message for message in messages] == [""] * len(messages)
        return len(messages)

    def go_on(self) -> None:
        self._more.set()


def test_sigterm_under_load_loses_no_answer(tmp_path, gate):
    slow = write_python_model(tmp_path / "slow", answer=gate.statements)
    flags = (f"--model-roots={tmp_path}", f"--model-roots={EXAMPLES}", "--drain-min-seconds=3")
    flags += ("--grpc-data=127.0.0.1:0",)
    with embedded_adapter(COMPLETE, *flags) as adapter, ThreadPoolExecutor(5 * CALLERS) as pool:
        with adapter.client() as client:
            client.load_model("echo", EXAMPLES / "identity")
            client.load_model("slow", slow)
        begun = [threading.Event() for _ in range(3 * CALLERS)]
        listeners = [adapter.listeners[listener] for listener in ("grpc", "grpc_data")]
        kinds = [
            invoke_until_told_to_close,
            partial(infer_while_serving, "grpc"),
            partial(infer_while_serving, "grpc_data"),
        ]
        callers = [pool.submit(kinds[i % 3], adapter, seen) for i, seen in enumerate(begun)]
        streams = [OpenStream(address, pool) for address in listeners]
        with background(adapter) as others:
            waiting = others.ask(lambda c: c.invoke("slow"))
            wait_until(
                lambda: adapter.models()["slow"]["in_flight"] == 3, 60, "Triton has all three"
            )
            gate.wait_reached()
            assert all(seen.wait(60) for seen in begun)
            adapter.process.send_signal(signal.SIGTERM)
            counts = [caller.result(30) for caller in callers]  # all were told to go elsewhere
            assert not_ready(adapter) == "stopping"
            for stream in streams:
                stream.go_on()
            gate.open()
            reply = waiting.result()
        assert (reply.status, reply.headers["Connection"]) == (200, "close")
        assert [stream.answers.result(30) for stream in streams] == [2, 2]
        assert min(counts) > 0
        assert adapter.process.wait(40) == 0


def test_requests_are_answered_after_listeners_close(tmp_path, gate):
    slow = write_python_model(tmp_path / "slow", answer=gate.statements)
    with (
        embedded_adapter(f"--model-roots={tmp_path}", COMPLETE) as adapter,
        ThreadPoolExecutor() as pool,
        background(adapter) as others,
    ):
        with adapter.client() as client:
            client.load_model("slow", slow)
        stream = OpenStream(adapter.grpc, pool)
        stream.go_on()
        waiting = others.ask(lambda c: c.invoke("slow"))
        wait_until(lambda: adapter.models()["slow"]["in_flight"] == 2, 60, "Triton has both")
        gate.wait_reached()
        adapter.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(adapter.http), 60, "the listener is closed")
        assert not_ready(adapter) == "stopping"  # who probes is still told why
        gate.open()
        assert waiting.result().status == 200
        assert stream.answers.result(30) == 2
        assert adapter.process.wait(40) == 0


def is_refused(address: str) -> bool:
    with Client(address) as client:
        try:
            client.get("/ping")
        except ConnectionRefusedError:
            return True
        except (ConnectionResetError, RemoteDisconnected):
            return False  # it was accepted, in the moment in which the listener closed
        return False


def test_drain_waits_for_requests_and_refuses_loads(tmp_path, gate):
    slow = write_python_model(tmp_path / "slow", answer=gate.statements)
    listener = tmp_path / "admin.sock"
    flags = (f"--model-roots={tmp_path}", f"--model-roots={EXAMPLES}", f"--admin=unix:{listener}")
    with (
        embedded_adapter(COMPLETE, *flags) as adapter,
        background(adapter) as others,
        adapter.client() as client,
    ):
        client.load_model("slow", slow)
        waiting = others.ask(lambda c: c.invoke("slow"))
        gate.wait_reached()
        process = drain(adapter, f"--url=unix:{listener}", "--timeout=100")
        wait_until(lambda: client.get("/ping").status == 503, 60, "the drain has begun")
        refusals = [
            client.load("echo", EXAMPLES / "identity"),
            client.unload("slow"),
            client.post("/v2/repository/models/slow/unload", {}),
            client.get("/v2/health/ready"),
        ]
        assert [reply.status for reply in refusals] == [503] * 4
        assert all(b"the adapter is draining" in reply.body for reply in refusals)
        assert process.poll() is None
        gate.open()
        assert outcome(process) == (0, "")
        assert waiting.result().status == 200
        assert client.invoke("slow").status == 200


def test_drain_past_its_time_says_what_is_left(tmp_path, gate):
    slow = write_python_model(tmp_path / "slow", initialize=gate.statements)
    with (
        embedded_adapter(f"--model-roots={tmp_path}", COMPLETE) as adapter,
        background(adapter) as others,
    ):
        loading = others.ask(lambda c: c.load("slow", slow))
        gate.wait_reached()
        code, said = outcome(drain(adapter, "--timeout=0.2"))
        assert code == 1
        assert "1 in flight after 0.2" in said
        assert not_ready(adapter) == "draining"
        gate.open()
        assert loading.result().status == 200
        assert outcome(drain(adapter)) == (0, "")


def test_health_stream_ends_when_the_drain_begins():
    with embedded_adapter() as adapter, grpc.insecure_channel(adapter.grpc) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest(), timeout=60)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        assert outcome(drain(adapter)) == (0, "")
        assert [found.status for found in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]
