"""A pod of ModelMesh's controller: the containers of a runtime in namespaces of their own.

Commands, arguments and environments are those of the manifest word for word. The pod has its own
loopback and, over what this machine has, a `/mm-sock` and a `/models`; for that user namespaces
must be allowed, and where they are not the tests are skipped. In the place of images stand the
Python that runs the tests and the tritonserver that is installed.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.modelmesh.tritons import write_tritonserver

# What else listens in such a pod, from the controller's source: controllers/modelmesh at 0.12.
# 8085 is where the mesh looks for its runtime when nothing else is said.
TAKEN = {
    8008: "the REST proxy",
    8080: "the mesh",
    8085: "the mesh's default for grpcEndpoint",
    8086: "the puller",
    8089: "probes of the mesh",
    8090: "the preStop hook",
}
START_SECONDS = 60
_GIB = 2**30
_LISTENS = "0A"

_MAKE = """
set -e
ip link set lo up
mount -t tmpfs none "$1/root"
for path in /*; do
  if [ -L "$path" ]; then cp -P "$path" "$1/root$path"
  elif [ -d "$path" ]; then mkdir "$1/root$path"; mount --rbind "$path" "$1/root$path"; fi
done
mkdir -p "$1/root/models" "$1/root/mm-sock"
mount --bind "$1/models" "$1/root/models"
mount --bind "$1/mm-sock" "$1/root/mm-sock"
exec chroot "$1/root" sh -c 'echo made; exec cat'
"""


@dataclass
class Pod:
    """`folder` has what the pod sees as `/models` and `/mm-sock`. `events` are the adapter's."""

    folder: Path
    adapter: "Container"

    @property
    def ports(self) -> set[int]:
        """Where anything in the pod listens over TCP."""
        return {port for _, port in self._listening()}

    @property
    def open_ports(self) -> set[int]:
        """Those at all addresses of the pod."""
        return {port for address, port in self._listening() if int(address, 16) == 0}

    def _listening(self) -> set[tuple[str, int]]:
        found = set()
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{self.adapter.process.pid}/net/{table}").read_text().splitlines()
            for line in lines[1:]:
                _, local, _, state = line.split()[:4]
                if state == _LISTENS:
                    address, _, port = local.rpartition(":")
                    found.add((address, int(port, 16)))
        return found


class Container:
    def __init__(self, command: list[str], environ: Mapping[str, str]) -> None:
        self.lines: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            command, env=dict(environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text) if text.startswith("{") else {"event": "", "text": text}
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, event: str) -> None:
        def is_there() -> bool:
            return any(line["event"] == event for line in self.lines) or self._has_ended

        with self._news:
            self._news.wait_for(is_there, START_SECONDS)
        assert event in {line["event"] for line in self.lines}, self.lines[-5:]

    @property
    def _has_ended(self) -> bool:
        return not self._reader.is_alive()

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(45)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def running_pod(containers: Mapping[str, Mapping[str, Any]]) -> Iterator[Pod]:
    """Triton and the adapter, each as its container says; the adapter is ready for work."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="mm-"))
        stack.callback(shutil.rmtree, folder)
        inside = stack.enter_context(_namespaces(folder))
        shared = f"--backend-config=python,shm-region-prefix-name={folder.name}"
        program = write_tritonserver(folder, shared)
        image = {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        triton, adapter = containers["triton"], containers["adapter"]
        command = [*inside, *triton["command"], *triton["args"]]
        started = Container(command, image | environment(triton))
        stack.callback(started.stop)
        command = [*inside, sys.executable, "-m", "adapter", *adapter["args"]]
        running = Container(command, image | environment(adapter))
        stack.callback(running.stop)
        running.wait_for("adapter.started")
        yield Pod(folder, running)


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """As kubelet would set it; the one reference to a resource is Triton's memory."""
    return {e["name"]: e.get("value", str(8 * _GIB)) for e in container.get("env", [])}


@contextmanager
def _namespaces(folder: Path) -> Iterator[list[str]]:
    """What to put before a command so that it runs in the pod."""
    for name in ("root", "models", "mm-sock"):
        (folder / name).mkdir()
    holder = subprocess.Popen(
        ["unshare", "-Urnm", "sh", "-c", _MAKE, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "made\n":
            pytest.skip(f"no namespaces here: {holder.stderr.read().strip()}")
        yield [
            *("nsenter", f"--target={holder.pid}", "--user", "--preserve-credentials"),
            *("--net", "--mount", f"--root=/proc/{holder.pid}/root", f"--wd={folder}"),
        ]
    finally:
        holder.stdin.close()
        holder.wait(10)
        holder.stdout.close()
        holder.stderr.close()
