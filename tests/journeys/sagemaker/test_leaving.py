"""Callers that hang up, or are told that it took too long: what Triton works on holds its model."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.asking import (
    Gate,
    RawConnection,
    background,
    binary_request,
    refusal,
    sized,
    triton_index,
)
from tests.grpc_calls import calls_to, write_decoupled_model
from tests.journeys.memory.models import metric
from tests.journeys.sagemaker.leaving import cancel_rpc, hang_up, leave_stream
from tests.processes import tritonserver
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_SIZE = "Inference-Header-Content-Length"


def counts(adapter: RunningAdapter) -> tuple[int, int, float]:
    """In flight and abandoned of the one model; abandoned of all by the metric."""
    (model,) = adapter.state()["models"]
    return (
        model["in_flight"],
        model["abandoned"],
        metric(adapter, "triton_adapter_abandoned_requests"),
    )


def let_the_deadline_pass(adapter: RunningAdapter, gate: Gate) -> None:
    """On a busy machine the first may pass before the request has come to the adapter."""
    (model,) = adapter.state()["models"]
    with calls_to(adapter.grpc) as calls:
        for seconds in (1, 5, 25):
            assert calls.refused_infer("m", 1.0, timeout=seconds)[0] == "DEADLINE_EXCEEDED"
            if adapter.state()["models"][0]["served"] > model["served"]:
                break
    gate.wait_reached()


@pytest.mark.parametrize("leave", [hang_up, cancel_rpc, leave_stream])
def test_unload_waits_for_triton_despite_leaving_caller(adapter, client, package, gate, leave):
    before = len(adapter.events("model.unload_stalled"))
    write_python_model(package, answer=gate.statements)
    client.load_model("m", package)
    leave(adapter, "m", gate.wait_reached)
    wait_until(lambda: counts(adapter) == (1, 1, 1.0), 60, "it is known to go on")
    with background(adapter) as others:
        unloading = others.ask(lambda own: own.unload("m"))
        wait_until(lambda: adapter.state()["models"][0]["state"] == "UNLOADING", 60, "it begins")
        assert triton_index(adapter)["m"] == "READY"
        assert counts(adapter) == (1, 1, 1.0)
        gate.open()
        reply = unloading.result(30)
    assert reply.status == 200
    assert metric(adapter, "triton_adapter_abandoned_requests") == 0
    assert len(adapter.events("model.unload_stalled")) == before


def test_stream_without_caller_is_read_to_end(adapter, client, package, gate):
    gated = "\n".join(" " * 12 + line for line in gate.statements.splitlines()).lstrip()
    write_decoupled_model(
        package, answer=f"{gated}\n            for _ in range(2000): send(values)"
    )
    client.load_model("m", package)
    leave_stream(adapter, "m", gate.wait_reached)
    wait_until(lambda: counts(adapter) == (1, 1, 1.0), 60, "it is known to go on")
    gate.open()
    wait_until(lambda: counts(adapter) == (0, 0, 0.0), 30, "it has ended")
    client.unload_model("m")


@pytest.fixture
def own(model_root) -> Iterator[RunningAdapter]:
    """An adapter whose Triton may be hurt."""
    flags = (f"--model-roots={model_root}", COMPLETE, "--infer-timeout-seconds=1")
    with embedded_adapter(*flags) as adapter:
        yield adapter


_MANY = 100


def test_abandoned_requests_refuse_no_others(own, package, gate):
    """What bounds them is Triton's own queue, where the model's config sets its size."""
    write_python_model(package, answer=gate.statements)

    def time_out(_: int) -> tuple[object, ...]:
        with own.client() as client:
            return refusal(client.invoke("m"))

    with own.client() as client, calls_to(own.grpc) as calls:
        client.load_model("m", package)
        with ThreadPoolExecutor(_MANY) as pool:
            outcomes = [*pool.map(time_out, range(_MANY))]
        assert outcomes == [(504, "BackendTimeout", "m")] * _MANY
        assert counts(own) == (_MANY, _MANY, _MANY)

        assert time_out(0) == (504, "BackendTimeout", "m")
        code, text = calls.refused_infer("m", 1.0)
        assert (code, text.partition(":")[0]) == ("DEADLINE_EXCEEDED", "BackendTimeout")
        gate.open()
        wait_until(lambda: counts(own) == (0, 0, 0.0), 60, "Triton is done with them")
        wait_until(  # a busy machine may need longer than the limit for the first
            lambda: client.invoke("m").status == 200, 60, "it serves"
        )


def test_dying_triton_ends_abandoned_requests(own, package, gate):
    write_python_model(package, answer=gate.statements)
    with own.client() as client:
        client.load_model("m", package)
        hang_up(own, "m", gate.wait_reached)
        let_the_deadline_pass(own, gate)
        wait_until(lambda: counts(own)[:2] == (2, 2), 60, "both go on")
        os.kill(tritonserver(own), signal.SIGKILL)
        own.wait_for("triton.restarted", 60)
        wait_until(
            lambda: metric(own, "triton_adapter_abandoned_requests") == 0,
            60,
            "they have ended with it",
        )


def test_at_sigterm_nobody_waits_for_them_either(model_root, package, gate):
    """The drain would last longer than this waits."""
    write_python_model(package, answer=gate.statements)
    flags = (f"--model-roots={model_root}", "--drain-timeout-seconds=120")
    with embedded_adapter(*flags) as adapter:
        with adapter.client() as client:
            client.load_model("m", package)
        hang_up(adapter, "m", gate.wait_reached)
        wait_until(lambda: counts(adapter)[:2] == (1, 1), 60, "it goes on")


def test_caller_leaving_amid_an_answer_is_no_error(adapter, client, package):
    before = len(adapter.lines)
    client.load_model("m", write_python_model(package))
    body, size = binary_request(2**22)
    for path in ("/models/m/invoke", "/v2/models/m/infer"):
        fields = f"Host: localhost\r\nTransfer-Encoding: chunked\r\n{_SIZE}: {size}\r\n"
        fields += f"Content-Type: {sized(size)['Content-Type']}\r\n"
        with RawConnection(adapter.http) as connection:
            connection.send(f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode())
            connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert b" 200 " in connection.read_head()
        wait_until(lambda: counts(adapter)[0] == 0, 60, "the model is free")
    assert client.get("/ping").status == 200
    told = [line for line in adapter.lines[before:] if line["level"] in {"error", "warning"}]
    assert told == []
