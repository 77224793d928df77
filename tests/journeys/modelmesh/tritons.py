"""A `tritonserver` to be found on PATH or given as a setting: the one that is installed."""

import shlex
import subprocess
from pathlib import Path

from adapter.triton.server.launch import prepare
from tests.ports import free_ports

KINDS = ("http", "grpc", "metrics")


class Elsewhere:
    """A Triton that is not the adapter's, as in another container; always at the same ports."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(3)
        self.http, self.grpc, self.metrics = (f"127.0.0.1:{port}" for port in ports)
        self.repository = folder / "repository"
        self.repository.mkdir()
        shared = f"--backend-config=python,shm-region-prefix-name={folder.name}"
        self._command = [
            str(write_tritonserver(folder, shared)),
            f"--model-repository={self.repository}",
            *(f"--{kind}-port={port}" for kind, port in zip(KINDS, ports, strict=True)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, mode: str = "explicit") -> None:
        quiet = subprocess.DEVNULL
        command = [*self._command, f"--model-control-mode={mode}"]
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet)

    def send(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


def write_tritonserver(folder: Path, *more: str, held_by: Path | None = None) -> Path:
    """In a folder of its own below `folder`, with the arguments that it needs and `more`. Whoever
    starts it waits while the file `held_by` is there.
    """
    launch = prepare(None, folder / "run")
    words = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    arguments = shlex.join((*launch.arguments, *more))
    program = folder / "bin" / "tritonserver"
    program.parent.mkdir()
    held = f"while [ -e {shlex.quote(str(held_by))} ]; do sleep 0.05; done\n" if held_by else ""
    program.write_text(
        f'#!/bin/sh\n{held}{" ".join(words)} exec {launch.binary} "$@" {arguments}\n'
    )
    program.chmod(0o755)
    return program
