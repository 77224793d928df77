"""Models that take CUDA memory in Triton's own process, as ONNX Runtime and TensorRT do."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.models import MIB, book, gpu, why_not, write_model_in_triton
from tests.running import Client, RunningAdapter, unload_all, wait_until

_MISSING = why_not()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.triton,
    pytest.mark.skipif(_MISSING is not None, reason=_MISSING or "there is one"),
    pytest.mark.timeout(200),
]


def held(adapter: RunningAdapter) -> dict[str, int]:
    return {name: sum(model["bytes"].values()) // MIB for name, model in adapter.models().items()}


def test_tritons_reported_sizes_are_the_models(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    """After the first model of a backend, which tells that the backend reports."""
    first = write_model_in_triton(root / "reports", 256, reports=True)
    empty = gpu().used
    assert client.load("first", first).status == 200
    context = (gpu().used - empty) // MIB - 256
    record_property("first_mib", held(adapter)["first"])
    record_property("context_of_triton_mib", context)
    sizes = {f"reports{n}": 512 * (n + 1) for n in range(4)}
    packages = [
        write_model_in_triton(root / name, mib, reports=True) for name, mib in sizes.items()
    ]

    def load(package: Path) -> int:
        with closing(adapter.client(300)) as own:
            return own.load(package.name, package).status

    with ThreadPoolExecutor(len(packages)) as pool:
        assert list(pool.map(load, packages)) == [200] * len(packages)

    found = held(adapter)
    record_property("reported_mib", str(found))
    assert {name: found[name] for name in sizes} == sizes
    assert {adapter.models()[name]["size_from"] for name in sizes} == {"triton"}
    ledger = book(adapter)["empty_bytes"] + book(adapter)["used_by_models_bytes"]
    record_property("ledger_over_driver", round(ledger / gpu().used, 4))
    assert ledger == pytest.approx(gpu().used, rel=0.05)
    unload_all(adapter)
    assert gpu().used - empty < (context + 64) * MIB


def test_unreported_sizes_are_read_and_given_back(
    adapter: RunningAdapter, client: Client, root: Path, record_property: Any
) -> None:
    package = write_model_in_triton(root / "silent", 3072)
    assert client.load("silent", package).status == 200
    wait_until(lambda: adapter.models()["silent"]["is_measured"], 15, "the size is learned")
    record_property("read_mib", held(adapter)["silent"])
    assert held(adapter)["silent"] == pytest.approx(3072, rel=0.25)  # with a context of Triton
    before = gpu().used
    assert client.delete("/models/silent").status == 200
    assert before - gpu().used >= 3072 * MIB
