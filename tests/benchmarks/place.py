"""Where the measuring is done: a network of one's own, the servers, the load tester."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.backend.processes import descendants
from tests.builtin.alone import leave_the_network
from tests.running import EXAMPLES, RunningAdapter, embedded_adapter

Json = dict[str, Any]
IDENTITY = EXAMPLES / "identity"
MIB = 2**20

# What is not in force by default and costs something per request.
FEATURES: tuple[str, ...] = ()
_LOAD_SECONDS = 300


class NotMeasuredError(Exception):
    """Why this cannot be measured here."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long and how often. `requests` are those to the adapter in one round; `floats` the sizes
    of tensors, beside those of the targets.
    """

    is_quick: bool
    rounds: int
    slow_rounds: int  # of what takes a server of its own
    requests: int
    seconds: float
    repeats: int
    models: int
    floats: tuple[int, ...]
    connections: tuple[int, ...]  # with 1 and 8, which have targets


FULL = Scale(
    is_quick=False,
    rounds=3,
    slow_rounds=3,
    requests=20_000,
    seconds=6.0,
    repeats=10,
    models=10_000,
    floats=(256, 16_384, 262_144),
    connections=(1, 8, 32),
)
QUICK = Scale(
    is_quick=True,
    rounds=2,
    slow_rounds=1,
    requests=2_000,
    seconds=1.0,
    repeats=3,
    models=500,
    floats=(16_384,),
    connections=(1, 8),
)


@functools.cache
def has_own_network() -> bool:
    """From the first call on nothing of this process and its children is reached from outside.

    False where that is not allowed: then the loopback is shared with the machine, and Triton's
    built-in endpoint, which listens on all addresses, is not started.
    """
    try:
        leave_the_network()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def stack(*flags: str) -> Iterator[RunningAdapter]:
    """The adapter with a Triton of its own that has the model `identity`."""
    with embedded_adapter(f"--grpc-data=127.0.0.1:{free_port()}", *FEATURES, *flags) as adapter:
        client = adapter.client()
        reply = client.load("identity", IDENTITY)
        client.close()
        if reply.status != 200:
            raise NotMeasuredError(f"identity was not loaded: {reply.body!r}")
        yield adapter


def load(url: str, *args: str) -> Json:
    """What `triton-adapter bench URL ARGS` writes as JSON; it runs in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-"))
    try:
        path = folder / "result.json"
        command = (sys.executable, "-m", "adapter", "bench", url, f"--json={path}", *args)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOAD_SECONDS, check=False
        )
        if not path.exists() or not path.stat().st_size:
            raise NotMeasuredError(f"the load tester: {done.stderr[-500:]}")
        return json.loads(path.read_text())
    finally:
        shutil.rmtree(folder)


def rss_bytes(pid: int, field: str = "VmRSS") -> int:
    """VmHWM is the most since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise NotMeasuredError(f"no {field} of process {pid}")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def share_bytes(pid: int) -> int:
    """The proportional share (PSS) of a process and all below it."""
    total = 0
    for each in (pid, *descendants(pid)):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def environment() -> Json:
    """The machine as far as it matters for the figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    told = subprocess.run(
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
        "versions": told.stdout.split("\n"),
    }


def busy_share(seconds: float) -> float:
    """Of all cores, by whatever runs on this machine at the moment."""

    def times() -> tuple[int, int]:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = times()
    time.sleep(seconds)
    total, idle = times()[0] - total, times()[1] - idle
    return 1 - idle / total if total else 0.0
