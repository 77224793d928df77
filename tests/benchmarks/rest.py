"""Measures a small REST request: the adapter, nginx, Envoy and the copying proxy, in turn."""

import os
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.benchmarks.copying import run_copying
from tests.benchmarks.figures import Json, compare, summarize, take_turns
from tests.benchmarks.generators import run_wrk
from tests.benchmarks.place import (
    IDENTITY,
    Scale,
    Side,
    load_identity,
    read_cpu_seconds,
    run_triton,
)
from tests.benchmarks.proxies import run_envoy, run_nginx, run_stand_in
from tests.benchmarks.rows import PROXIES
from tests.running import RunningAdapter

# the headers of Python's `requests`
_REQUESTS = """
wrk.method = "POST"
wrk.body = '{"inputs":[{"name":"IN","datatype":"FP32","shape":[1],"data":[0.5]}]}'
wrk.headers["User-Agent"], wrk.headers["Accept"] = "python-requests/2.34.2", "*/*"
wrk.headers["Accept-Encoding"], wrk.headers["Connection"] = "gzip, deflate, br", "keep-alive"
wrk.headers["Content-Type"] = "application/json"
"""
_DIFFERING = """
request = function()
  local trace = ""
  while #trace < 48 do trace = trace .. string.format("%08x", math.random(1, 2^31 - 1)) end
  wrk.headers["traceparent"] = "00-" .. trace:sub(1, 32) .. "-" .. trace:sub(33) .. "-01"
  return wrk.format()
end
"""
_SCRIPTS = {"same": _REQUESTS, "differ": _REQUESTS + _DIFFERING}
_INVOKE = "/models/identity/invoke"
_INFER = "/v2/models/identity/infer"


def measure_rest(scale: Scale) -> Json:
    """Measure the CPU time of a request, and how many one core answers.

    Each proxy has one core and is never idle. nginx stands in for Triton's HTTP port and shares the
    other core with wrk. A real Triton behind the adapter loads the model, and has nothing to infer.
    """
    own_core, other_core = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        stand_in = stack.enter_context(run_stand_in())
        sides = {
            "copying": _add_path(stack.enter_context(run_copying(stand_in.address)), _INFER),
            "nginx": _add_path(stack.enter_context(run_nginx(stand_in.address)), _INVOKE),
            "envoy": _add_path(stack.enter_context(run_envoy(stand_in.address)), _INFER),
        }
        adapter = _start_adapter(stack, stand_in.address)
        sides["adapter"] = Side(adapter.http + _INVOKE, adapter.process.pid)
        _pin(stand_in, other_core)
        for side in sides.values():
            _pin(side, own_core)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        results = {}
        for heads, text in _SCRIPTS.items():
            script = folder / f"{heads}.lua"
            script.write_text(text)
            measure = partial(_measure_side, script, scale.seconds, other_core)
            results[heads] = take_turns(sides, scale.rounds, measure)
    figures: Json = {}
    for heads, rounds in results.items():
        for other in PROXIES:
            figures[f"adapter_{other}_{heads}"] = compare(rounds, "cpu", "adapter", other)
    figures["adapter_us_same"] = summarize(results["same"], "adapter", "cpu", 1e6)
    figures["adapter_rate_same"] = summarize(results["same"], "adapter", "rate")
    return figures


def _start_adapter(stack: ExitStack, triton_http: str) -> RunningAdapter:
    triton = stack.enter_context(run_triton())
    adapter = RunningAdapter(
        "--triton=external",
        "--http=127.0.0.1:0",
        "--admin=127.0.0.1:0",
        "--grpc=off",
        f"--triton-http={triton_http}",
        f"--triton-grpc={triton.address}",
        f"--repository={triton.repository}",
        f"--model-roots={IDENTITY.parent}",
    )
    stack.callback(adapter.stop)
    adapter.wait_for("adapter.started")
    load_identity(adapter)
    return adapter


def _add_path(side: Side, path: str) -> Side:
    return Side(side.address + path, side.pid)


def _pin(side: Side, core: int) -> None:
    for task in Path(f"/proc/{side.pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def _measure_side(script: Path, seconds: float, core: int, side: Side) -> Json:
    assert side.pid is not None
    before = read_cpu_seconds(side.pid)
    answered = run_wrk(script, f"http://{side.address}", seconds, core)
    cpu_seconds = read_cpu_seconds(side.pid) - before
    return {"cpu": cpu_seconds / answered, "rate": answered / seconds}
