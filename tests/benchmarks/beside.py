"""The adapter beside Triton's built-in SageMaker endpoint, and both while models come and go."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from adapter.backend.tritonserver import prepare
from tests.benchmarks.figures import Json, compared, ratios, spread
from tests.benchmarks.place import (
    IDENTITY,
    MIB,
    NotMeasuredError,
    Scale,
    free_port,
    has_own_network,
    load,
    rss_bytes,
    share_bytes,
    stack,
)
from tests.builtin.conftest import BUILTIN_MODELS, builtin_models
from tests.builtin.doors import builtin_command
from tests.running import Client, RunningAdapter, wait_until

_MODEL_HEADER = "X-Amzn-SageMaker-Target-Model"
_HEADER = f"--header={_MODEL_HEADER}: {{model}}"
_STEADY_RATE = 100
_CHURN_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Builtin:
    """`other` is a package for a second model: it serves no package under two names."""

    address: str
    pid: int
    other: Path

    def call(self, method: str, path: str, name: str, body: object = None) -> int:
        client = Client(self.address)
        try:
            return client.request(method, path, body, {_MODEL_HEADER: name}).status
        finally:
            client.close()


@contextmanager
def builtin() -> Iterator[Builtin]:
    """Triton with its built-in endpoint, which has the model `identity`."""
    if not has_own_network():
        raise NotMeasuredError(
            "it listens on all addresses, and a network of its own needs the right to make one"
        )
    with ExitStack() as undo:
        try:
            undo.enter_context(builtin_models())
        except pytest.skip.Exception as reason:
            raise NotMeasuredError(str(reason)) from reason
        one, other = (BUILTIN_MODELS / f"test_{uuid.uuid4().hex}" for _ in range(2))
        for folder in (one, other):
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            shutil.copytree(IDENTITY, folder / "model")
        server = undo.enter_context(_server(other / "model"))
        body = {"model_name": "identity", "url": str(one / "model")}
        if (status := server.call("POST", "/models", "identity", body)) != 200:
            raise NotMeasuredError(f"the built-in endpoint did not load identity: {status}")
        yield server


@contextmanager
def _server(other: Path) -> Iterator[Builtin]:
    folder, port = Path(tempfile.mkdtemp(prefix="builtin-")), free_port()
    try:
        launch = prepare(None, folder)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                builtin_command(launch, folder, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, **launch.environment, "SAGEMAKER_MULTI_MODEL": "true"},
                start_new_session=True,
            )
        try:
            server = Builtin(f"127.0.0.1:{port}", process.pid, other)
            wait_until(lambda: _answers(server), 30, "the built-in endpoint is ready")
            yield server
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    finally:
        for region in Path("/dev/shm").glob(f"{folder.name}*"):
            region.unlink()
        shutil.rmtree(folder)


def _answers(server: Builtin) -> bool:
    try:
        return server.call("GET", "/ping", "") == 200
    except OSError:
        return False


# -- side by side ---------------------------------------------------------------------------


def beside_builtin(scale: Scale) -> Json:
    """Small JSON by how many connections, the time of a DELETE, and memory."""
    with stack() as adapter, builtin() as server:
        pids = {"adapter": adapter.process.pid, "builtin": server.pid}
        idle = {name: share_bytes(pid) / MIB for name, pid in pids.items()}
        found: Json = {"by_connections": {}}
        for number in scale.connections:
            result = load(
                f"http://{adapter.http}",
                "--model=identity",
                f"--compare=http://{server.address}",
                f"--metadata=grpc://{adapter.grpc_address}",
                f"--cpu-pid={adapter.process.pid}",
                _HEADER,
                f"--slices={scale.rounds}",
                f"--duration={scale.seconds * scale.rounds}",
                "--warmup=0.5",
                f"--connections={number}",
            )
            found["by_connections"][str(number)] = compared(result)
        found["delete"] = spread(_builtin_delete(server) for _ in range(min(3, scale.repeats)))
        found["memory_mib"] = {
            name: {"idle": idle[name], "after_load": share_bytes(pid) / MIB}
            for name, pid in pids.items()
        }
        found["adapter_alone_mib"] = rss_bytes(adapter.process.pid) / MIB
        return found


def _builtin_delete(server: Builtin) -> float:
    body = {"model_name": "idle", "url": str(server.other)}
    assert server.call("POST", "/models", "idle", body) == 200
    begun = time.perf_counter()
    assert server.call("DELETE", "/models/idle", "idle") == 200
    return time.perf_counter() - begun


# -- models that come and go ----------------------------------------------------------------


def churn(scale: Scale) -> Json:
    """The p99 of one model at a steady rate, quiet and while another is loaded and unloaded all the
    time: at the adapter, at its Triton past it, and at the built-in endpoint with its own loads.
    """
    found: Json = {}
    with stack() as adapter:
        found["adapter"] = _churned(_at_adapter(adapter), str(IDENTITY), scale)
        found["triton"] = _churned(_past_adapter(adapter), str(IDENTITY), scale)
    try:
        with builtin() as server, stack() as adapter:
            at = (
                f"http://{server.address}",
                _HEADER,
                f"--metadata=grpc://{adapter.grpc_address}",
            )
            found["builtin"] = _churned(at, str(server.other), scale)
    except NotMeasuredError as reason:
        found["builtin"] = {"not_measured": str(reason)}
    else:
        share = found["adapter"]["churn_p99"]["median"] / found["builtin"]["churn_p99"]["median"]
        found["over_builtin"] = spread([share])
    return found


def _at_adapter(adapter: RunningAdapter) -> tuple[str, ...]:
    return (f"http://{adapter.http}", f"--metadata=grpc://{adapter.grpc_address}")


def _past_adapter(adapter: RunningAdapter) -> tuple[str, ...]:
    return (
        f"http://{adapter.http_address}",
        "--protocol=v2-json",
        f"--churn-at=http://{adapter.http}",
    )


def _churned(at: tuple[str, ...], package: str, scale: Scale) -> Json:
    quiet, busy, changes = [], [], []
    for _ in range(scale.slow_rounds):
        quiet.append(_p99(*(arg for arg in at if not arg.startswith("--churn")), *_pace(scale)))
        result = load(*at, *_pace(scale), f"--churn={package}", f"--churn-every={_CHURN_PAUSE}")
        busy.append(float(result["targets"][0]["latency"]["p99"]))
        changes += result["targets"][0]["churn"]
    seconds = {
        kind: spread(
            each["seconds"] for each in changes if each["operation"] == kind and not each["error"]
        )
        for kind in ("load", "unload")
    }
    return {
        "quiet_p99": spread(quiet),
        "churn_p99": spread(busy),
        "ratio": ratios(busy, quiet),
        "load_seconds": seconds["load"],
        "unload_seconds": seconds["unload"],
        "failed": sum(bool(each["error"]) for each in changes),
    }


def _pace(scale: Scale) -> tuple[str, ...]:
    seconds = max(3.0, scale.seconds * 1.5)  # a load and an unload at least
    return (
        "--model=identity",
        f"--rate={_STEADY_RATE}",
        f"--duration={seconds}",
        "--warmup=0.3",
    )


def _p99(*args: str) -> float:
    return float(load(*args)["targets"][0]["latency"]["p99"])


# -- a talkative Triton ---------------------------------------------------------------------


def log_storm(scale: Scale) -> Json:
    """The p99 at a steady rate, quiet and while Triton logs each step of each request."""
    with stack() as adapter:
        places = {"adapter": _at_adapter(adapter), "triton": _past_adapter(adapter)[:2]}
        seen: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in places}
        lines, seconds = 0, 0.0
        for _ in range(scale.slow_rounds):
            for level in (0, 1):
                _set_verbosity(adapter, level)
                for name, at in places.items():
                    before, begun = len(adapter.lines), time.perf_counter()
                    seen[name][level].append(_p99(*at, *_pace(scale)))
                    if level:
                        lines += len(adapter.lines) - before
                        seconds += time.perf_counter() - begun
        return {
            "lines_per_second": lines / seconds,
            **{
                name: {
                    "quiet_p99": spread(quiet),
                    "storm_p99": spread(loud),
                    "ratio": ratios(loud, quiet),
                }
                for name, (quiet, loud) in seen.items()
            },
        }


def _set_verbosity(adapter: RunningAdapter, level: int) -> None:
    client = Client(adapter.http_address)
    reply = client.post("/v2/logging", {"log_verbose_level": level})
    client.close()
    if reply.status != 200:
        raise NotMeasuredError(f"Triton's log settings: {reply.status} {reply.body!r}")
