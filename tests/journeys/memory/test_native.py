"""Memory that a native backend takes and frees in tritonserver, over many loads and unloads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.journeys.memory.models import MIB, tree_bytes
from tests.journeys.memory.native import build_native_backend, write_native_model
from tests.processes import tritonserver
from tests.running import COMPLETE, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

_MODEL_MIB = 90
_AT_ONCE = 4  # as many as Triton loads at a time, each in a thread with a heap of its own
_ROUNDS = 24
_KEPT_MIB = 40


def load_and_unload(adapter: RunningAdapter, package: Path) -> None:
    with adapter.client() as client:
        reply = client.load(package.name, package)
        assert reply.status == 200, reply.body
        client.unload_model(package.name)


def read_environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_native_memory_comes_back_after_each_unload(tmp_path):
    """Hold Triton to a little more than before. With glibc's own thresholds 195 MiB stay."""
    library = build_native_backend(tmp_path)
    root = tmp_path / "models"
    packages = [
        write_native_model(root / f"m{number}", library, mebibytes=_MODEL_MIB)
        for number in range(_AT_ONCE)
    ]
    kept = []
    with (
        embedded_adapter(f"--model-roots={root}", COMPLETE) as adapter,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        empty = tree_bytes(adapter)
        for _ in range(_ROUNDS // _AT_ONCE):
            list(pool.map(lambda package: load_and_unload(adapter, package), packages))
            kept.append((tree_bytes(adapter) - empty) // MIB)

    assert max(kept) <= _KEPT_MIB, kept


def test_allocator_of_the_operator_is_kept():
    with embedded_adapter(COMPLETE, environ={"MALLOC_ARENA_MAX": "2"}) as adapter:
        environment = read_environment(tritonserver(adapter))

    malloc = {name: value for name, value in environment.items() if name.startswith("MALLOC_")}
    assert malloc == {"MALLOC_ARENA_MAX": "2"}
