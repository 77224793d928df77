"""Compares learned sizes of models in tritonserver with what they take, after many loads of each.

Those of python models: test_memory_oracle.py.
"""

import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.journeys.memory.models import MIB, tree_bytes
from tests.journeys.memory.native import build_native_backend, write_native_model
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

_SIZES_MIB = (90, 120, 160, 220)
_ROUNDS = 24  # of loads and unloads, of one package after the other
_TOLERANCE = 0.1
_RECOVERY_SECONDS = 5.0  # after which an unload is answered in any case
_UNLOADED_SHARE = 0.75


def held_bytes(adapter: RunningAdapter, name: str) -> int:
    [model] = [model for model in adapter.state()["models"] if model["model_id"] == name]
    return sum(model["bytes"].values())


def load(adapter: RunningAdapter, client: Client, package: Path) -> tuple[int, int]:
    """Return the bytes that a load took, and those that the adapter holds for the model."""
    before = tree_bytes(adapter)
    reply = client.load(package.name, package)
    assert reply.status == 200, reply.body
    return tree_bytes(adapter) - before, held_bytes(adapter, package.name)


def unload(adapter: RunningAdapter, client: Client, package: Path, taken: int) -> None:
    """Unload a model, and see its memory back with the answer, not after the longest wait."""
    before = tree_bytes(adapter)
    started_at = time.monotonic()
    reply = client.delete(f"/models/{package.name}")
    seconds = time.monotonic() - started_at
    assert reply.status == 200, reply.body
    assert before - tree_bytes(adapter) >= _UNLOADED_SHARE * taken
    assert seconds < _RECOVERY_SECONDS


def test_learned_sizes_are_right_after_many_rounds(tmp_path: Path) -> None:
    """A package takes in an empty Triton what it takes; later loads may reuse what stayed."""
    root = tmp_path / "models"
    library = build_native_backend(tmp_path)
    packages = [
        write_native_model(root / f"m{size}", library, mebibytes=size) for size in _SIZES_MIB
    ]
    taken = {}
    differences = []
    with (
        embedded_adapter(f"--model-roots={root}", "--memory-source=host", COMPLETE) as adapter,
        closing(adapter.client()) as client,
    ):
        for number in range(_ROUNDS):
            package = packages[number % len(packages)]
            count, held = load(adapter, client, package)
            taken.setdefault(package, count)
            differences.append(held / taken[package] - 1)
            unload(adapter, client, package, count)
    last = differences[-len(packages) :]
    shown = ", ".join(f"{difference:+.1%}" for difference in differences)
    print(f"held less taken: {shown}; taken {[count // MIB for count in taken.values()]} MiB")  # noqa: T201
    assert max(map(abs, last)) <= _TOLERANCE, differences
