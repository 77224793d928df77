"""Where the measuring is done: a network of one's own, the servers, the load tester."""

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.backend.tritonserver import Launch, prepare
from tests.benchmarks.figures import Rounds
from tests.compare.alone import leave_the_network
from tests.running import EXAMPLES, RunningAdapter, embedded_adapter

Json = dict[str, Any]
IDENTITY = EXAMPLES / "identity"
MIB = 2**20

_LOAD_SECONDS = 300


class NotMeasuredError(Exception):
    """Why this cannot be measured here."""


class FailedError(Exception):
    """A call that was measured went wrong, or nothing could be measured at all."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long and how often. `seconds` are those of one side in one round."""

    is_quick: bool
    rounds: int
    seconds: float
    repeats: int
    models: int


FULL = Scale(is_quick=False, rounds=5, seconds=4.0, repeats=10, models=10_000)
QUICK = Scale(is_quick=True, rounds=1, seconds=0.5, repeats=2, models=500)


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
    with embedded_adapter(*flags) as adapter:
        with closing(adapter.client()) as client:
            reply = client.load("identity", IDENTITY)
        if reply.status != 200:
            raise FailedError(f"identity was not loaded: {reply.body!r}")
        yield adapter


@contextmanager
def tritonserver(
    command: Callable[[Launch, Path], Sequence[str]], **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """One without an adapter. `command` is told what to start, and a folder for what it needs."""
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-"))
    try:
        launch = prepare(None, folder)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command(launch, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env={**os.environ, **launch.environment, **environ},
                start_new_session=True,
            )
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    finally:
        for region in Path("/dev/shm").glob(f"{folder.name}*"):  # it is named so by `command`
            region.unlink()
        shutil.rmtree(folder)


def load(*args: str) -> Json:
    """What `triton-adapter bench ARGS` says of its only target; it runs in a process of its own.

    FailedError when a call went wrong.
    """
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-"))
    try:
        path = folder / "result.json"
        command = (sys.executable, "-m", "adapter", "bench", f"--json={path}", *args)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LOAD_SECONDS, check=False
        )
        text = path.read_text() if path.exists() else ""
        target = json.loads(text)["targets"][0] if text else {}
        if done.returncode != 0:
            why = target.get("errors_by_code") or done.stderr[-500:]
            raise FailedError(f"{' '.join(args)}: {why}")
        return target
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class Side:
    """One that takes part. `at`: where the load tester sends what; `pid`: whose CPU time counts;
    `meanwhile` is entered for the time of each round.
    """

    at: tuple[str, ...]
    pid: int | None = None
    meanwhile: Callable[[], AbstractContextManager[object]] = nullcontext


def in_turns(sides: Mapping[str, Side], rounds: int, *shared: str) -> Rounds:
    """Each side once a round, every other round backwards. CPU in seconds a request."""
    found: dict[str, list[Json]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            side = sides[name]
            pid = () if side.pid is None else (f"--cpu-pid={side.pid}",)
            with side.meanwhile():
                target = load(*side.at, *pid, "--model=identity", *shared)
            figures = {"rate": target["rate"], "p50": target["latency"]["p50"]}
            figures |= {"p99": target["latency"]["p99"]}
            figures["generator"] = target["generator_cpu_share"] / target["rate"]
            if pid:
                figures["cpu"] = target["processes"][0]["cpu_seconds_per_request"]
            found[name].append(figures)
    return found


def rss_bytes(pid: int, field: str = "VmRSS") -> int:
    """VmHWM is the most since `forget_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise FailedError(f"no {field} of process {pid}")


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def pss_bytes(*pids: int) -> int:
    """The proportional share of these processes together."""
    total = 0
    for each in pids:
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
        "versions": told.stdout.split("\n")[:-1],
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
