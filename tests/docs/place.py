"""A copy of the repository to paste the lines of a page into, with ports of its own.

The lines are run as they stand but for the well-known ports and `/models`. Of the commands that
they call five are stand-ins: `make` sets nothing up, `curl` fails when the answer is an error,
`tritonserver` is that of the wheel, `moto_server` and `.venv/bin` have the Python of the tests.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from adapter.cli.client import Target
from adapter.cli.probes import probe
from adapter.triton.server.launch import RunFolder, prepare
from tests.docs.pages import ROOT, Block, blocks
from tests.ports import free_ports
from tests.running import wait_until

SECONDS = 240
PORTS = {
    8080: "http",
    8081: "admin",
    8085: "grpc",
    8000: "triton_http",
    8001: "triton_grpc",
    8002: "triton_metrics",
}
# moto's, where a page starts one
BUCKET = 5000
# what the Makefile calls them
_OF_MAKE = {"http": "HTTP", "admin": "ADMIN", "grpc": "GRPC"}
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "shared", "tests", "node_modules", "gpu-*")


def free_listeners() -> dict[str, str]:
    ports = free_ports(len(PORTS))
    return {name: f"127.0.0.1:{port}" for name, port in zip(PORTS.values(), ports, strict=True)}


def objects(text: str) -> list[object]:
    """All of JSON that is in there; curl ends no answer with a line break."""
    decoder, found, at = json.JSONDecoder(), [], text.find("{")
    while at >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
            found.append(value)
        except ValueError:
            at += 1
        at = text.find("{", at)
    return found


class Place:
    """`listeners`: where the adapter of the page listens."""

    def __init__(self, folder: Path, run_folder: Path) -> None:
        self.folder = folder
        self.listeners: dict[str, str] = {}
        self._bucket = str(free_ports(1)[0])
        self._server: subprocess.Popen[bytes] | None = None
        self._said = folder.with_name(f"{folder.name}.log")
        shutil.copytree(ROOT, folder, ignore=_LEFT_OUT)
        self._bin = folder / ".venv" / "bin"
        self._bin.mkdir(parents=True)
        python = f"exec {sys.executable}"
        launch = prepare(None, run_folder)
        environment = " ".join(f"{k}={shlex.quote(v)}" for k, v in launch.environment.items())
        # a page's own tritonserver listens where the adapter looks for it; an adapter that
        # starts one names its addresses itself, and has hidden these variables
        own_addresses = "".join(
            f" ${{{variable}:+--{listener}-address=127.0.0.1 --{listener}-port=${{{variable}#*:}}}}"
            for listener, variable in (
                ("http", "ADAPTER_TRITON_HTTP"),
                ("grpc", "ADAPTER_TRITON_GRPC"),
                ("metrics", "ADAPTER_TRITON_METRICS"),
            )
        )
        for name, line in {
            "python": f'{python} "$@"',
            "triton-adapter": f'{python} -m adapter "$@"',
            "moto_server": f'{python} -m moto.server "$@"',
            "make": f'{python} {Path(__file__).with_name("make_stand_in.py")} "$@"',
            "curl": f'exec {shutil.which("curl")} --fail-with-body "$@"',
            "tritonserver": (
                f"{environment} exec {launch.binary} {' '.join(launch.arguments)}"
                f'{own_addresses} "$@"'
            ),
        }.items():
            (self._bin / name).write_text(f"#!/bin/sh\n{line}\n")
            (self._bin / name).chmod(0o755)

    def text(self, block: Block) -> str:
        """What is run in place of the block."""
        text = block.text
        if block.language == "console":
            text = "".join(f"{line}\n" for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE))
        for port, listener in PORTS.items():
            if listener in self.listeners:
                own = self.listeners[listener].rpartition(":")[2]
                text = re.sub(rf"(?<=:){port}\b", own, text)
        text = re.sub(rf"(?<=:){BUCKET}\b|(?<=-p ){BUCKET}\b", self._bucket, text)
        return re.sub(r"(?<![\w.}])/models\b", str(self.folder / "models-of-the-page"), text)

    def environment(self) -> Mapping[str, str]:
        listeners = {
            f"ADAPTER_{listener.upper()}": address for listener, address in self.listeners.items()
        }
        of_make = {
            _OF_MAKE[listener]: self.listeners[listener]
            for listener in _OF_MAKE
            if listener in self.listeners
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ADAPTER_")}
        path = f"{self._bin}{os.pathsep}{os.environ['PATH']}"
        return {**inherited, **listeners, **of_make, "PATH": path, "PYTHONPATH": str(self.folder)}

    def command(self, block: Block) -> list[str]:
        if block.language == "python":
            return [sys.executable, "-c", self.text(block)]
        return ["bash", "-eu", "-o", "pipefail", "-c", self.text(block)]

    def paste(self, page: Path) -> None:
        """Every block of the page that is to be run, in its order."""
        said = ""
        for block in blocks(page):
            if block.mode == "answer":
                assert json.loads(block.text) in objects(said), f"{block}: {said}"
            elif block.is_run_here and block.mode == "server":
                self.serve(block)
            elif block.is_run_here:
                said = self.run(block)

    def run(self, block: Block) -> str:
        """Return what the block printed."""
        done = subprocess.run(
            self.command(block),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        is_as_shown = (done.returncode != 0) == (block.mode == "refused")
        assert is_as_shown, f"{block}: exit code {done.returncode}\n{done.stdout}{self.said()}"
        return done.stdout

    def serve(self, block: Block) -> None:
        """Start the block and return when the adapter is ready; what ran before is stopped."""
        self.stop()
        self.listeners = free_listeners()
        with self._said.open("wb") as said:
            self._server = subprocess.Popen(
                self.command(block),
                cwd=self.folder,
                env=self.environment(),
                stdout=said,
                stderr=said,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        host, _, port = self.listeners["admin"].rpartition(":")

        def is_up() -> bool:
            assert self._server is not None
            assert self._server.poll() is None, f"{block} ended\n{self.said()}"
            return not probe(Target(host, int(port)), 2)[0]

        wait_until(is_up, SECONDS, f"{block} is ready")

    def stop(self) -> None:
        """As Ctrl-C on a terminal does, for all that the block started."""
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGINT)
            self._server.wait(45)
            self._server = None

    def said(self) -> str:
        return self._said.read_text(errors="replace") if self._said.exists() else ""


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    run_folder = RunFolder()
    try:
        made = Place(folder, run_folder.path)
        try:
            yield made
        finally:
            made.stop()
    finally:
        run_folder.remove()
