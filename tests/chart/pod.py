"""The pod of the chart as two processes on this machine: what Kubernetes is told to run, run.

Only what cannot be so here is put in its place: ports that are free, a repository in a temporary
folder, the example models instead of the volume, and the tritonserver that is installed.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from adapter.backend.tritonserver import prepare
from tests.chart.chart import containers, pod_spec, variables
from tests.running import EXAMPLES, RunningAdapter

REPOSITORY = "/models/_triton_models"


@contextmanager
def running_pod(values: Mapping[str, Any]) -> Iterator[RunningAdapter]:
    """Triton first, and ended last, as Kubernetes does with a native sidecar."""
    folder = Path(tempfile.mkdtemp(prefix="pod-"))
    repository = folder / "repository"
    repository.mkdir()
    http, grpc, metrics = free_ports(3)
    arguments = [
        argument.replace(REPOSITORY, str(repository))
        for argument in containers(pod_spec(values))["triton"]["args"]
    ]
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    try:
        with (
            triton(folder, [*arguments, *ports]),
            adapter(
                variables(values) | {"ADAPTER_MODEL_ROOTS": str(EXAMPLES)},
                f"--repository={repository}",
                f"--triton-http=127.0.0.1:{http}",
                f"--triton-grpc=127.0.0.1:{grpc}",
                f"--triton-metrics=127.0.0.1:{metrics}",
            ) as running,
        ):
            yield running
    finally:
        shutil.rmtree(folder)


@contextmanager
def triton(folder: Path, arguments: list[str]) -> Iterator[None]:
    launch = prepare(None, folder / "run")
    shared = f"--backend-config=python,shm-region-prefix-name={folder.name}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [launch.binary, *arguments, *launch.arguments, shared],
            stdout=log,
            stderr=log,
            env={**os.environ, **launch.environment},
        )
    try:
        yield
    finally:
        process.terminate()
        code = process.wait(40)
    assert code == 0, (folder / "log").read_text()[-2000:]


@contextmanager
def adapter(environ: Mapping[str, str], *flags: str) -> Iterator[RunningAdapter]:
    here = ("--http=127.0.0.1:0", "--admin=127.0.0.1:0", "--drain-min-seconds=0")
    running = RunningAdapter(*here, *flags, environ=environ)
    try:
        running.wait_for("adapter.started")
        yield running
    finally:
        code = running.stop()
    assert code == 0, running.errors


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
