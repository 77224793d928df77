"""The adapter beside Triton's built-in SageMaker endpoint, and beside a Triton driven directly."""

import functools
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from adapter.backend.processes import descendants
from adapter.backend.tritonserver import Launch
from tests.benchmarks.copying import copying
from tests.benchmarks.figures import Json, of, over, spread
from tests.benchmarks.place import (
    IDENTITY,
    MIB,
    FailedError,
    NotMeasuredError,
    Scale,
    Side,
    free_port,
    has_own_network,
    in_turns,
    pss_bytes,
    stack,
    tritonserver,
)
from tests.compare.conftest import BUILTIN_MODELS, builtin_models
from tests.compare.servers import builtin_command
from tests.running import Client, RunningAdapter, wait_until

_MODEL_HEADER = "X-Amzn-SageMaker-Target-Model"
_STEADY_RATE = 100
_PAUSE = 0.05
_START_SECONDS = 60

# -- the built-in endpoint --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Builtin:
    """`other` is a package for a second model: it serves no package under two names."""

    address: str
    pid: int
    other: Path

    def call(self, method: str, path: str, name: str, body: object = None) -> int:
        with closing(Client(self.address)) as client:
            return client.request(method, path, body, {_MODEL_HEADER: name}).status

    def answers(self) -> bool:
        try:
            return self.call("GET", "/ping", "") == 200
        except OSError:
            return False


@contextmanager
def builtin_endpoint() -> Iterator[Builtin]:
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
        command = functools.partial(builtin_command, port=(port := free_port()))
        process = undo.enter_context(tritonserver(command, SAGEMAKER_MULTI_MODEL="true"))
        server = Builtin(f"127.0.0.1:{port}", process.pid, other / "model")
        wait_until(server.answers, _START_SECONDS, "the built-in endpoint is ready")
        body = {"model_name": "identity", "url": str(one / "model")}
        if (status := server.call("POST", "/models", "identity", body)) != 200:
            raise FailedError(f"the built-in endpoint did not load identity: {status}")
        yield server


def builtin(scale: Scale) -> Json:
    """Small JSON, the time of a DELETE, and memory with one model after each round of load."""
    shared = (f"--header={_MODEL_HEADER}: {{model}}", f"--duration={scale.seconds}")
    found: Json = {}
    sizes: tuple[list[int], ...] = ([], [], [])
    with (
        stack() as adapter,
        builtin_endpoint() as server,
        copying(server.address) as (proxy, pid),
    ):
        asked, own = f"--metadata=grpc://{adapter.grpc_address}", adapter.process.pid
        sides = {
            "adapter": Side(
                (f"http://{adapter.http}", asked), own, meanwhile=lambda: _weighed(own, sizes[:2])
            ),
            "copying": Side((f"http://{proxy}", asked), pid),
            "builtin": Side(
                (f"http://{server.address}", asked),
                meanwhile=lambda: _weighed(server.pid, sizes[2:]),
            ),
        }
        for count in (8, 32):
            rounds = in_turns(
                sides, scale.rounds, *shared, f"--connections={count}", "--warmup=0.3"
            )
            found[f"rate_{count}"] = over(rounds, "rate", "adapter", "copying")
            found |= {f"{name}_{count}": of(rounds, name, "rate") for name in sides}
        found["delete_builtin"] = spread(_delete(server) for _ in range(min(3, scale.repeats)))
    names = ("memory", "memory_adapter", "memory_builtin")
    return found | {n: spread(each, 1 / MIB) for n, each in zip(names, sizes, strict=True)}


@contextmanager
def _weighed(pid: int, sizes: Sequence[list[int]]) -> Iterator[None]:
    """After a round: of the process with all below it, then of the process alone."""
    yield
    for pids, each in zip(((pid, *descendants(pid)), (pid,)), sizes, strict=False):
        each.append(pss_bytes(*pids))


def _delete(server: Builtin) -> float:
    body = {"model_name": "idle", "url": str(server.other)}
    if (status := server.call("POST", "/models", "idle", body)) != 200:
        raise FailedError(f"the built-in endpoint did not load a model: {status}")
    begun = time.perf_counter()
    if (status := server.call("DELETE", "/models/idle", "idle")) != 200:
        raise FailedError(f"the built-in endpoint did not unload a model: {status}")
    return time.perf_counter() - begun


# -- a model that comes and goes --------------------------------------------------------------


@dataclass
class Coming:
    """Loads and unloads in a thread, as long as it is entered. `loads`: seconds of each load."""

    load: Callable[[], object]
    unload: Callable[[], object]
    loads: list[float] = field(default_factory=list)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        over, failures = threading.Event(), list[Exception]()
        thread = threading.Thread(target=self._run, args=(over, failures))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if failures:
            raise FailedError(f"a load or an unload: {failures[0]!r}")

    def _run(self, over: threading.Event, failures: list[Exception]) -> None:
        try:
            while not over.is_set():
                begun = time.perf_counter()
                self.load()
                self.loads.append(time.perf_counter() - begun)
                over.wait(_PAUSE)
                self.unload()
                over.wait(_PAUSE)
        except Exception as error:  # noqa: BLE001 - of whichever client; raised by who waits
            failures.append(error)


def churn(scale: Scale) -> Json:
    """The p99 of `identity` over gRPC at a steady rate, while `other` is loaded and unloaded.

    The copying proxy shows what one more process on the way costs, whatever it does.
    """
    seconds = max(3.0, 3 * scale.seconds)  # a load and an unload at least
    pace = (f"--rate={_STEADY_RATE}", f"--duration={seconds}", "--warmup=0.3")
    with stack() as adapter, driven() as (address, triton), copying(address) as (proxy, _):
        own = _by_adapter(adapter)
        direct = Coming(lambda: triton.load_model("other"), lambda: _unload(triton))
        sides = {
            "adapter": Side((f"grpc://{adapter.grpc}",), meanwhile=own),
            "copying": Side((f"grpc://{proxy}",), meanwhile=direct),
            "triton": Side((f"grpc://{address}",), meanwhile=direct),
        }
        rounds = in_turns(sides, scale.rounds, *pace)
    return {
        "ratio": over(rounds, "p99", "adapter", "triton"),
        "ratio_copying": over(rounds, "p99", "adapter", "copying"),
        **{f"{name}_p99": of(rounds, name, "p99", 1e3) for name in sides},
        "adapter_load": spread(own.loads),
        "triton_load": spread(direct.loads),
    }


def _by_adapter(adapter: RunningAdapter) -> Coming:
    def call(method: str, path: str, body: object = None) -> None:
        with closing(adapter.client()) as client:
            reply = client.request(method, path, body)
        if reply.status != 200:
            raise FailedError(f"{method} {path}: {reply.status} {reply.body!r}")

    package = {"model_name": "other", "url": str(IDENTITY)}
    return Coming(lambda: call("POST", "/models", package), lambda: call("DELETE", "/models/other"))


@contextmanager
def driven() -> Iterator[tuple[str, Any]]:
    """Address and client of a Triton that has the model `identity` and can load `other`."""
    address = f"127.0.0.1:{free_port()}"

    def command(launch: Launch, folder: Path) -> tuple[str, ...]:
        for name in ("identity", "other"):
            shutil.copytree(IDENTITY, folder / "repository" / name)
        return (
            str(launch.binary),
            f"--model-repository={folder / 'repository'}",
            *("--model-control-mode=explicit", "--allow-http=false", "--allow-metrics=false"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={address.rpartition(':')[2]}"),
            f"--backend-config=python,shm-region-prefix-name={folder.name}",
            *launch.arguments,
        )

    with tritonserver(command), tritonclient.grpc.InferenceServerClient(address) as client:
        wait_until(lambda: _is_ready(client), _START_SECONDS, "Triton is ready")
        client.load_model("identity")
        yield address, client


def _is_ready(client: Any) -> bool:
    try:
        return bool(client.is_server_ready())
    except InferenceServerException:
        return False


def _unload(client: Any) -> None:
    """Triton answers when it has begun to; wait until its index says that it is done."""
    client.unload_model("other")
    wait_until(
        lambda: (
            {m.state for m in client.get_model_repository_index().models if m.name == "other"}
            <= {"", "UNAVAILABLE"}
        ),
        _START_SECONDS,
        "the model is gone",
    )
