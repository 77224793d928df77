"""Loads models at once of which nothing is known: nothing that fits is refused."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.journeys.memory.models import check_agreement, counted, tree_bytes, write_eater
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

_MODELS = 10
_MODEL_MIB = 60  # its process takes 18 MiB more
_FITTING = 6
_LARGE_MIB = 700  # four of these leave room for less than half a one
_FULL_MIB = 717  # four of these leave 2 % of the limit
_LOAD_SECONDS = 0.5  # of each, besides what Triton needs to start a process
_HOST = ("--memory-source=host", COMPLETE)
_INITIALIZE = f"import time\ntime.sleep({_LOAD_SECONDS})\n"


@pytest.fixture
def packages(tmp_path: Path) -> list[Path]:
    """Ten packages of one size, of which the adapter cannot know that."""
    return [
        write_eater(
            tmp_path / "models" / f"m{number}",
            _MODEL_MIB,
            imports=f"# {number}",
            initialize=_INITIALIZE,
        )
        for number in range(_MODELS)
    ]


def measure(act: Callable[[Path], int], packages: list[Path]) -> tuple[float, Counter[int]]:
    """Return the seconds until all have been answered, and the statuses."""
    started_at = time.monotonic()
    with ThreadPoolExecutor(len(packages)) as pool:
        statuses = Counter(pool.map(act, packages))
    return time.monotonic() - started_at, statuses


def load(adapter: RunningAdapter, package: Path) -> int:
    with closing(adapter.client()) as client:
        return client.load(package.name, package).status


def invoke(adapter: RunningAdapter, package: Path) -> int:
    path = "/endpoints/any/invocations"
    headers = {"X-Amzn-SageMaker-Target-Model": package.name}
    with closing(adapter.client()) as client:
        return client.post(path, infer_body(1.0), headers).status


def limit_for(count: int, packages: list[Path]) -> int:
    """Return a limit that so many of the packages fit into, and half a one more."""
    with embedded_adapter(f"--model-roots={packages[0].parent}", *_HOST) as adapter:
        empty = tree_bytes(adapter)
        assert load(adapter, packages[0]) == 200
        return int(empty + (count + 0.5) * (tree_bytes(adapter) - empty))


def test_unknown_models_fill_what_there_is(packages: list[Path]) -> None:
    limit = limit_for(_FITTING, packages)
    flags = (f"--memory-limit={limit}", "--memory-reserve=0")
    with embedded_adapter(f"--model-roots={packages[0].parent}", *flags, *_HOST) as adapter:
        seconds, statuses = measure(lambda package: load(adapter, package), packages)
        used = tree_bytes(adapter)
    print(f"ten loads where six fit: {seconds:.1f} s, {dict(statuses)}")  # noqa: T201
    assert statuses.keys() == {200, 507}
    assert _FITTING - 1 <= statuses[200] <= _FITTING
    assert used <= limit


def test_unknown_models_of_a_store_evict_no_more_than_needed(
    packages: list[Path], tmp_path: Path
) -> None:
    """Each of the ten is called once at the same time, six fit: four have to go at least."""
    limit = limit_for(_FITTING, packages)
    flags = (
        f"--memory-limit={limit}",
        "--memory-reserve=0",
        f"--model-store={packages[0].parent}",
        f"--cache-dir={tmp_path / 'cache'}",
    )
    with embedded_adapter(*flags, *_HOST) as adapter:
        seconds, statuses = measure(lambda package: invoke(adapter, package), packages)
        evictions = counted(adapter, "triton_adapter_endpoint_evictions_total{")
    print(f"ten calls: {seconds:.1f} s, {dict(statuses)}, {evictions:.0f} evictions")  # noqa: T201
    assert statuses == {200: _MODELS}
    assert _MODELS - _FITTING <= evictions <= _MODELS


@pytest.mark.parametrize("size_mib", [_LARGE_MIB, _FULL_MIB])
def test_large_unknown_models_fill_what_there_is(tmp_path: Path, size_mib: int) -> None:
    """Four of seven fit. The three others are refused, and nobody gets another status."""
    packages = [
        write_eater(tmp_path / "models" / f"m{number}", size_mib, imports=f"# {number}")
        for number in range(7)
    ]
    flags = (f"--model-roots={tmp_path / 'models'}", "--memory-limit=3GiB", "--memory-reserve=0")
    with embedded_adapter(*flags, *_HOST) as adapter:
        seconds, statuses = measure(lambda package: load(adapter, package), packages)
        loaded = [model["state"] for model in adapter.state()["models"]]
        check_agreement(adapter)
    print(f"seven loads: {seconds:.1f} s, {dict(statuses)}")  # noqa: T201
    assert statuses == {200: 4, 507: 3}
    assert loaded == ["READY"] * 4
