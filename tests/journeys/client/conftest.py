"""One adapter with a Triton of its own, and its models."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import COMPLETE, RunningAdapter, embedded_adapter, unload_all
from tests.trees import write_python_model

LIMIT = 1 << 30


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """`echo` answers with its input; `slow` is loaded once the file `go` is there."""
    folder = tmp_path_factory.mktemp("packages")
    write_python_model(folder / "echo")
    write_python_model(
        folder / "slow",
        imports="import os, time",
        initialize=f"while not os.path.exists({str(folder / 'go')!r}): time.sleep(0.02)",
    )
    write_python_model(folder / "broken", initialize="raise ValueError('weights are missing')")
    return folder


@pytest.fixture(scope="module")
def running(packages) -> Iterator[RunningAdapter]:
    flags = (f"--model-roots={packages}", f"--memory-limit={LIMIT}")
    with embedded_adapter(*flags, COMPLETE) as adapter:
        yield adapter


@pytest.fixture
def adapter(running, packages) -> Iterator[RunningAdapter]:
    yield running
    (packages / "go").touch()  # what a failed test may have left in the middle of its load
    unload_all(running)
    (packages / "go").unlink()


@pytest.fixture
def environ(adapter) -> dict[str, str]:
    """The adapter's settings, as the commands read them."""
    return {"ADAPTER_HTTP": adapter.http, "ADAPTER_ADMIN": adapter.admin}
