"""The processes of an adapter as the kernel shows them; an adapter beside somebody's Triton."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from adapter.core.triton_input import HTTP_KEY_HEADER
from tests.running import EXAMPLES, Client, RunningAdapter, running_adapter, wait_until


@contextmanager
def beside(
    triton: RunningAdapter, *flags: str, environ: Mapping[str, str] | None = None
) -> Iterator[RunningAdapter]:
    """An adapter in front of a Triton that is somebody else's."""
    with running_adapter(
        "--triton=external",
        "--http=127.0.0.1:0",
        "--admin=127.0.0.1:0",
        f"--triton-http={triton.http_address}",
        f"--triton-grpc={triton.grpc_address}",
        f"--repository={triton.repository}",
        f"--model-roots={EXAMPLES}",
        *flags,
        environ=environ,
    ) as adapter:
        yield adapter


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:  # gone meanwhile
        return []


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def tritonserver(adapter: RunningAdapter) -> int:
    """Below its keeper."""
    keepers = children(adapter.process.pid)
    (pid,) = [pid for k in keepers for pid in children(k) if is_tritonserver(pid)]
    return pid


_IS_KEY = f":{HTTP_KEY_HEADER}="


def triton_client(adapter: RunningAdapter) -> Client:
    """Return a client of the raw Triton behind the adapter, with the key of restricted calls.

    That Triton may be embedded in another adapter.
    """
    port = adapter.http_address.rpartition(":")[2]
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    commands = [found for pid in pids if f"--http-port={port}" in (found := arguments(pid))]
    keys = [each.rpartition("=")[2] for found in commands for each in found if _IS_KEY in each]
    return Client(adapter.http_address, headers={HTTP_KEY_HEADER: keys[0]} if keys else {})


def is_tritonserver(pid: int) -> bool:
    """By the program's own name: NVIDIA's images have the stubs below /opt/tritonserver as well."""
    return Path("".join(arguments(pid)[:1])).name.startswith("tritonserver")


def stubs(adapter: RunningAdapter, triton_name: str) -> list[int]:
    """The python processes of one model."""
    folder = f"{adapter.repository / triton_name}/"
    return [
        pid
        for pid in descendants(adapter.process.pid)
        if any(argument.startswith(folder) for argument in arguments(pid))
    ]


def is_alive(pid: int) -> bool:
    """A zombie, whose parent has not looked yet, counts as gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def suspend(pid: int) -> None:
    """Stop a process with SIGSTOP; return when each of its threads has stopped, not before."""

    def states() -> set[str]:
        try:
            stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
        except OSError:  # a thread ended meanwhile
            return set()
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: states() == {"T"}, 10, f"process {pid} has stopped")
