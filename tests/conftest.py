"""Fixtures only. Servers are real, on free ports, and checked to leave nothing behind."""

import asyncio
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from adapter.runtime import background
from tests.asking import Gate
from tests.constants import HANG
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, unload_all
from tests.trees import write_python_model

pytest_plugins = ["tests.outcomes", "tests.another_triton"]
asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())  # the loop that the adapter runs on
# No example is a fault for the time it takes: others use the machine, too. A run's answer must not
# depend on chance, so both play the same examples each time (`make unit` a few of them), and the
# part `properties` of the nightly run others.
settings.register_profile(
    "untimed",
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
settings.register_profile("few", settings.get_profile("untimed"), max_examples=10)
settings.register_profile("random", settings.get_profile("untimed"), derandomize=False)
settings.load_profile("untimed")
# The two differ in when they write and what they close; asyncio's is what a reader debugs with.
_BOTH_LOOPS = {"asyncio": asyncio.SelectorEventLoop, "uvloop": uvloop.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All that collecting makes stays: to look for garbage in it takes each process seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files that several processes share out. Tests on a Triton mostly wait, so files of
    others, which compute, come between them and at the end. What takes long comes first of each:
    files of few tests on a Triton start servers of their own.
    """
    if hasattr(config, "workerinput"):
        counts = Counter(item.path for item in items)
        waiting = _paths_of("triton", items)
        slow = _paths_of("slow", items) - waiting
        rest = counts.keys() - waiting - slow
        places = {path: 0.85 * place for path, place in _spread(waiting, counts.__getitem__)}
        places.update(_spread(slow | rest, lambda path: (path in rest, -counts[path])))
        items.sort(key=lambda item: places[item.path])


def _paths_of(mark: str, items: list[pytest.Item]) -> set[Path]:
    return {item.path for item in items if item.get_closest_marker(mark)}


def _spread(paths: set[Path], key: Callable[[Path], Any]) -> Iterator[tuple[Path, float]]:
    """The paths in this order, at even distances from 0 to 1."""
    for number, path in enumerate(sorted(sorted(paths), key=key)):
        yield path, number / len(paths)


_left_behind: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Fail the test that leaves a background task behind, which ends with its event loop."""
    yield
    if (why := background.find_ended_task()) is not None and why not in _left_behind:
        _left_behind.add(why)
        pytest.fail(f"a test has left a background task behind: {why}")


def pytest_asyncio_loop_factories(item):
    both = item.get_closest_marker("both_loops")
    return _BOTH_LOOPS if both else {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the shared adapter accepts packages from."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def shared_adapter(model_root: Path) -> Iterator[RunningAdapter]:
    """One adapter with an embedded Triton for all tests that do not hurt it."""
    flags = (f"--model-roots={model_root}", "--grpc-data=127.0.0.1:0")
    with embedded_adapter(*flags, COMPLETE, constants={HANG: 8}) as adapter:
        yield adapter


@pytest.fixture
def adapter(shared_adapter: RunningAdapter) -> Iterator[RunningAdapter]:
    """The shared adapter; whatever the test loaded is unloaded after it."""
    yield shared_adapter
    unload_all(shared_adapter)


@pytest.fixture
def client(adapter: RunningAdapter) -> Iterator[Client]:
    client = adapter.client()
    yield client
    client.close()


@pytest.fixture(scope="session")
def triton() -> Iterator[RunningAdapter]:
    """A stock Triton to talk to directly: grpc_address, http_address, repository."""
    with embedded_adapter(COMPLETE) as adapter:
        yield adapter


@pytest.fixture
def package(model_root: Path, request: pytest.FixtureRequest) -> Path:
    """A folder to write one model package into (tests.trees)."""
    # a name that Triton takes as it is
    folder = model_root / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', request.node.name[:60])}-{id(request)}"
    folder.mkdir()
    return folder


@pytest.fixture
def identity(package: Path) -> Path:
    return write_python_model(package)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Open at the end, whatever happened: nothing hangs after a test that failed."""
    gate = Gate(tmp_path / "gate.open")
    yield gate
    gate.open()
