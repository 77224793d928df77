"""compose.yaml brought up on free ports under a name of its own, and callers that keep calling."""

import json
import os
import subprocess
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from docker import DockerClient
from docker.models.containers import Container

from tests.ports import free_ports
from tests.running import Client, wait_until

ROOT = Path(__file__).resolve().parents[2]
HEAL_SECONDS = 60

# What a builder may need here to reach its packages; compose.yaml and the Dockerfile name them.
PYTHON_IMAGE = os.environ.get("PYTHON_IMAGE", "python:3.12-slim-bookworm")
BUILD_CA = os.environ.get("PIP_CERT") or "/dev/null"

# Kills what runs under the container's init, as a crash would: a kill through the engine counts as
# asked for, and is not followed by a restart.
_KILL = """
import os, pathlib, signal
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    if (folder / "stat").read_text().rpartition(")")[2].split()[1] == "1":
        os.kill(int(folder.name), signal.SIGKILL)
"""


class Stack:
    """One project of compose.yaml, with one profile."""

    def __init__(
        self, engine: DockerClient, environ: Mapping[str, str], *files: Path, profile: str = "cpu"
    ) -> None:
        self.project = f"e2e-{uuid.uuid4().hex[:8]}"
        http, admin, grpc = free_ports(3)
        self.http, self.admin = f"127.0.0.1:{http}", f"127.0.0.1:{admin}"
        self.grpc = f"127.0.0.1:{grpc}"
        self._engine = engine
        self._profile = profile
        self._files = [f"--file={file}" for file in (ROOT / "compose.yaml", *files)]
        self._environ = {
            **os.environ,
            "HTTP_PORT": str(http),
            "ADMIN_PORT": str(admin),
            "GRPC_PORT": str(grpc),
            "BUILD_NETWORK": "host",
            "BUILD_CA": BUILD_CA,
            **environ,
        }

    def compose(self, *arguments: str) -> str:
        done = subprocess.run(
            [
                *("docker", "compose", f"--project-name={self.project}"),
                *(f"--project-directory={ROOT}", *self._files, f"--profile={self._profile}"),
                *arguments,
            ],
            env=self._environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + self.logs()
        return done.stdout

    def container(self, service: str) -> Container:
        [found] = self.containers(service)
        return found

    def containers(self, service: str) -> list[Container]:
        """Return all of a service, by their names."""
        labels = [
            f"com.docker.compose.project={self.project}",
            f"com.docker.compose.service={service}",
        ]
        found = self._engine.containers.list(all=True, filters={"label": labels})
        return sorted(found, key=lambda each: str(each.name))

    def logs(self) -> str:
        """The end of each container's log, for messages of failed tests."""
        mine = {"label": f"com.docker.compose.project={self.project}"}
        return "".join(
            f"\n--- {one.name}\n{one.logs(tail=30).decode()}"
            for one in self._engine.containers.list(all=True, filters=mine)
        )

    def events(self, event: str) -> list[dict[str, Any]]:
        lines = self.container("adapter").logs().decode().splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in said if line["event"] == event]

    def client(self, timeout: float = 60) -> Client:
        return Client(self.http, timeout)

    def kill(self, service: str) -> None:
        self.container(service).exec_run(["python3", "-c", _KILL])

    def restarts(self, service: str) -> int:
        container = self.container(service)
        return int(container.attrs["RestartCount"])

    def wait_healthy(self) -> None:
        for service in ("triton-cpu", "adapter"):
            wait_until(
                lambda service=service: self.container(service).health == "healthy",
                HEAL_SECONDS,
                f"{service} is healthy{self.logs()}",
            )


@contextmanager
def running(
    engine: DockerClient, environ: Mapping[str, str], *files: Path, profile: str = "cpu"
) -> Iterator[Stack]:
    """Up with images that are there, and down again with all that it made."""
    stack = Stack(engine, environ, *files, profile=profile)
    try:
        stack.compose("up", "--wait", "--no-build")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--timeout=10")
    assert engine.volumes.list(filters={"name": stack.project}) == []
    assert engine.networks.list(names=[stack.project]) == []


class Caller:
    """Calls without a pause until it is stopped, and counts what came of it.

    `call` says what it got. No connection, or one that breaks, counts as "no answer".
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.counts: Counter[object] = Counter()
        self._call = call
        self._news = threading.Condition()
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join(HEAL_SECONDS)

    def _run(self) -> None:
        while not self._is_stopped.wait(0.005):
            got: object = "no answer"
            with suppress(OSError, HTTPException):
                got = self._call()
            with self._news:
                self.counts[got] += 1
                self._news.notify_all()

    def wait_more(self, result: object, more: int = 10) -> None:
        """Until it was got so many times more than by now."""
        with self._news:
            wanted = self.counts[result] + more
            came = self._news.wait_for(lambda: self.counts[result] >= wanted, HEAL_SECONDS)
        assert came, f"no {more} more of {result!r}: {self.counts}"

    def wait_other(self, result: object) -> None:
        """Until something else was got."""
        with self._news:
            came = self._news.wait_for(lambda: set(self.counts) - {result}, HEAL_SECONDS)
        assert came, f"nothing but {result!r}: {self.counts}"
