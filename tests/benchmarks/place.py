"""The machine and the servers that the measures share."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from adapter.triton.server.launch import prepare
from tests.ports import free_ports
from tests.running import EXAMPLES, RunningAdapter, embedded_adapter, wait_until

Json = dict[str, Any]
IDENTITY = EXAMPLES / "identity"
MIB = 2**20

_START_SECONDS = 60


class NotMeasuredError(Exception):
    """Says why a measure is not possible on this machine."""


class FailedError(Exception):
    """Says which call of a measure went wrong."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Says how often a measure is repeated, and for how long."""

    is_quick: bool
    rounds: int
    seconds: float  # of one side in one round


FULL = Scale(is_quick=False, rounds=5, seconds=4.0)
QUICK = Scale(is_quick=True, rounds=1, seconds=1.0)


@dataclass(frozen=True, slots=True)
class Side:
    """A server that takes part in a measure."""

    address: str
    pid: int | None = None  # of the process whose CPU time counts


def find_program(name: str, package: str) -> str:
    """Return the path of a program of Debian. Raise NotMeasuredError if it is not installed."""
    path = shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    if path is None:
        raise NotMeasuredError(f"there is no {name} (Debian: {package})")
    return path


@contextmanager
def run_stack() -> Iterator[RunningAdapter]:
    """Run the adapter with a Triton of its own that has the model `identity`."""
    with embedded_adapter() as adapter:
        load_identity(adapter)
        yield adapter


def load_identity(adapter: RunningAdapter) -> None:
    with closing(adapter.client()) as client:
        reply = client.load("identity", IDENTITY)
    if reply.status != 200:
        raise FailedError(f"identity was not loaded: {reply.body!r}")


@dataclass(frozen=True, slots=True)
class RunningTriton:
    """A Triton without an adapter, which loads and unloads the models of its repository."""

    address: str  # of its gRPC port
    repository: Path
    client: Any  # of tritonclient, which has no types


@contextmanager
def run_triton(*models: str, argument: str | None = None) -> Iterator[RunningTriton]:
    """Run a Triton whose repository has `identity` under each of these names. Load none of them."""
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-"))
    try:
        repository = folder / "repository"
        repository.mkdir()
        for model in models:
            shutil.copytree(IDENTITY, repository / model)
        launch = prepare(None, folder)
        [port] = free_ports(1)
        command = (
            str(launch.binary),
            f"--model-repository={repository}",
            "--model-control-mode=explicit",
            "--allow-http=false",
            "--allow-metrics=false",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={port}",
            f"--backend-config=python,shm-region-prefix-name={folder.name}",
            *launch.arguments,
            *([argument] if argument else []),
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, **launch.environment},
                start_new_session=True,
            )
        address = f"127.0.0.1:{port}"
        try:
            with tritonclient.grpc.InferenceServerClient(address) as client:
                wait_until(lambda: _is_ready(client), _START_SECONDS, "Triton is ready")
                yield RunningTriton(address, repository, client)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    finally:
        for region in Path("/dev/shm").glob(f"{folder.name}*"):  # named by the prefix above
            region.unlink()
        shutil.rmtree(folder)


def _is_ready(client: Any) -> bool:
    with suppress(InferenceServerException):
        return bool(client.is_server_ready())
    return False


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process that are still there."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def describe_machine() -> Json:
    """Return what of the machine and the software matters for the figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    version = subprocess.run(
        (sys.executable, "-m", "adapter", "version", "--all"),
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "cpu": models[0] if models else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": os.uname().release,
        "versions": version.stdout.split("\n")[:-1],
    }
