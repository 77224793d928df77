"""Measures what it costs inferences that glibc returns freed memory, on several Tritons in turns.

    python -m tests.nightly.allocating [ROUNDS]

prints the table of docs/measurements.md, "Memory that Triton keeps": CPU time of a request, divided
by that with glibc's own thresholds. Each round asks all Tritons with the same tensors. The first
column is a second Triton with glibc's own thresholds, which shows what is noise.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adapter.triton.server.launch import allocator_variables
from tests.processes import descendants, tritonserver
from tests.running import COMPLETE, Client, embedded_adapter
from tests.trees import write_python_model

ROUNDS = 12
_MIB = 2**20
_TENSOR_MIB = (0.5, 1.0, 3.0, 8.0)
_MIB_PER_TURN = 24
_WARM_UP_REQUESTS = 3
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_OWN = {"MALLOC_CHECK_": "0"}  # any such variable, so that the adapter adds none
_ENVIRONMENTS = {
    "glibc's own": _OWN,
    "the same again": _OWN,
    "2 and 8 MiB": {},  # the adapter's
    "with huge pages": _HUGE_PAGES,
    "1 and 8 MiB": allocator_variables({}) | {"MALLOC_MMAP_THRESHOLD_": str(_MIB)},
    "4 and 8 MiB": allocator_variables({}) | {"MALLOC_MMAP_THRESHOLD_": str(4 * _MIB)},
}
_WORK = """
values = values * 2 + 1
values = values - values.mean()
values = values * values / 3
"""
_MODELS = {"echo": "pass", "work": _WORK}


@dataclass(frozen=True)
class Server:
    """A Triton that computes, and all of its processes."""

    triton: Client
    pids: tuple[int, ...]

    def infer(self, model: str, head: bytes, body: bytes) -> None:
        """Send a tensor and read the answer, without the adapter in between."""
        reply = self.triton.post(
            f"/v2/models/{model}/infer",
            head + body,
            {"Inference-Header-Content-Length": str(len(head))},
        )
        assert reply.status == 200, reply.body[:300]

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads so far."""
        tasks = [task for pid in self.pids for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def write_request(mebibytes: float) -> tuple[bytes, bytes]:
    """Return the JSON and the binary part of a request with a tensor of this size."""
    values = np.ones(int(mebibytes * _MIB / 4), np.float32)
    tensor = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [len(values)],
        "parameters": {"binary_data_size": values.nbytes},
    }
    head = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    return json.dumps(head).encode(), values.tobytes()


def start(stack: ExitStack, root: Path, environ: dict[str, str]) -> Server:
    adapter = stack.enter_context(
        embedded_adapter(f"--model-roots={root}", COMPLETE, environ=environ)
    )
    with closing(adapter.client()) as client:
        for model in _MODELS:
            assert client.load(model, root / model).status == 200
    server = tritonserver(adapter)
    triton = stack.enter_context(closing(Client(adapter.http_address)))
    return Server(triton, (server, *descendants(server)))


def measure(
    servers: dict[str, Server], model: str, mebibytes: float, rounds: int
) -> dict[str, float]:
    """Return the median CPU seconds of a request, by server. They take turns."""
    head, body = write_request(mebibytes)
    requests = max(3, int(_MIB_PER_TURN / max(1, mebibytes)))
    seconds = defaultdict(list)
    for server in servers.values():
        for _ in range(_WARM_UP_REQUESTS):
            server.infer(model, head, body)
    names = list(servers)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            before = servers[name].cpu_seconds()
            for _ in range(requests):
                servers[name].infer(model, head, body)
            seconds[name].append((servers[name].cpu_seconds() - before) / requests)
    return {name: statistics.median(figures) for name, figures in seconds.items()}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = Path(folder)
        for model, answer in _MODELS.items():
            write_python_model(root / model, answer=answer)
        servers = {name: start(stack, root, env) for name, env in _ENVIRONMENTS.items()}
        base, *others = servers
        sys.stdout.write(f"| model, tensor | {base} | {' | '.join(others)} |\n")
        sys.stdout.write(f"{'| --- ' * (len(servers) + 1)}|\n")
        for model in _MODELS:
            for mebibytes in _TENSOR_MIB:
                found = measure(servers, model, mebibytes, rounds)
                ratios = " | ".join(f"{found[name] / found[base]:.2f}" for name in others)
                row = f"| {model}, {mebibytes:g} MiB | {found[base] * 1e3:.1f} ms | {ratios} |"
                sys.stdout.write(row + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
