"""The pods of the chart as processes on this machine: what Kubernetes is told to run, run.

Only what cannot be so here is put in its place: ports that are free, a repository in a temporary
folder, the example models instead of the volume, and the tritonserver that is installed.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapter.triton.server.launch import prepare
from tests.chart.chart import ROOT, containers, pod_spec, variables
from tests.ports import free_ports
from tests.running import EXAMPLES, RunningAdapter

REPOSITORY = "/models/_triton_models"


@contextmanager
def running_pod(
    values: Mapping[str, Any],
    models: Path = EXAMPLES,
    *,
    before: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[RunningAdapter]:
    """Triton first, and ended last, as Kubernetes does with a native sidecar. See `pod_of`."""
    with (
        pod_of(values, models, before=before, environ=environ) as (given, flags),
        adapter(given, *flags) as running,
    ):
        yield running


@contextmanager
def pod_of(
    values: Mapping[str, Any],
    models: Path = EXAMPLES,
    *,
    before: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Run the container of Triton; the variables and flags of an adapter in front of it.

    `before`: a command that runs Triton's, such as one that gives it other mounts. `environ`: what
    is elsewhere on this machine than in a pod.
    """
    folder = Path(tempfile.mkdtemp(prefix="pod-"))
    repository = folder / "repository"
    repository.mkdir()
    http, grpc, metrics = free_ports(3)
    arguments = [
        argument.replace(REPOSITORY, str(repository))
        for argument in containers(pod_spec(values))["triton"]["args"]
    ]
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    own = variables(values)
    metrics_host = own.get("ADAPTER_TRITON_METRICS", "127.0.0.1:8002").rpartition(":")[0]
    flags = (
        f"--repository={repository}",
        f"--triton-http=127.0.0.1:{http}",
        f"--triton-grpc=127.0.0.1:{grpc}",
        f"--triton-metrics={metrics_host}:{metrics}",
    )
    try:
        with triton(folder, [*arguments, *ports], before):
            yield own | {"ADAPTER_MODEL_ROOTS": str(models)} | dict(environ or {}), flags
    finally:
        shutil.rmtree(folder)


def environment_of_the_image(target: str) -> dict[str, str]:
    """What the Dockerfile sets in this image, but for PATH."""
    stage = (ROOT / "Dockerfile").read_text().partition(f" AS {target}\n")[2]
    [line] = re.findall(
        r"^ENV (.*)$", stage.partition("\nFROM ")[0].replace("\\\n", " "), re.MULTILINE
    )
    found = dict(word.split("=", 1) for word in line.split())
    return {name: value for name, value in found.items() if name != "PATH"}


def environment_of_the_one_container(values: Mapping[str, Any]) -> dict[str, str]:
    """The image's, beaten by the ConfigMap's, beaten by the container's own: as kubelet does it."""
    given = containers(pod_spec(values))["adapter"]["env"]
    own = {each["name"]: each["value"] for each in given}
    return environment_of_the_image("sagemaker") | variables(values) | own


@contextmanager
def triton(folder: Path, arguments: Sequence[str], before: Sequence[str]) -> Iterator[None]:
    """Run the container of Triton, and end it as kubelet does."""
    launch = prepare(None, folder / "run")
    shared = f"--backend-config=python,shm-region-prefix-name={folder.name}"
    command = [*before, launch.binary, *arguments, *launch.arguments, shared]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **launch.environment}
        )
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(40) == 0, log.read_text()[-2000:]


@contextmanager
def adapter(environ: Mapping[str, str], *flags: str) -> Iterator[RunningAdapter]:
    running = start(environ, *flags)
    try:
        running.wait_for("adapter.started")
        yield running
    finally:
        code = running.stop()
    assert code == 0, running.errors


def start(environ: Mapping[str, str], *flags: str) -> RunningAdapter:
    """Start the container of the adapter, which the caller has to end."""
    here = (
        "--http=127.0.0.1:0",
        "--admin=127.0.0.1:0",
        "--metrics=127.0.0.1:0",
        "--drain-min-seconds=0",
    )
    return RunningAdapter(*here, *flags, environ=environ)
