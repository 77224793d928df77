"""What tritonserver itself takes, over hundreds of loads and unloads, by its allocator."""

import os
import time
from contextlib import closing
from ctypes.util import find_library
from pathlib import Path

import pytest

from tests.processes import tritonserver
from tests.running import COMPLETE, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_LOADS = int(os.environ.get("NIGHTLY_LOADS", "500"))
_ALLOCATORS = ("glibc", "jemalloc")
_EACH = 100
_FIRST = 50  # until then whatever is made once has been made
_MOST_KIB_PER_LOAD = 8
_MEMORY = ("RssAnon", "VmRSS", "Threads")


def _status(pid: int) -> dict[str, int]:
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    split = [row.split() for row in rows]
    return {each[0].rstrip(":"): int(each[1]) for each in split if each[0].rstrip(":") in _MEMORY}


@pytest.mark.parametrize("allocator", _ALLOCATORS)
def test_tritonserver_keeps_little_of_each_load_and_unload(
    allocator: str, seconds: float, tmp_path: Path
) -> None:
    """Each load is of one of ten packages, and has one inference before its unload."""
    environ = {}
    if allocator != "glibc":
        library = find_library(allocator)
        if library is None:
            pytest.skip(f"no lib{allocator} on this machine")
        environ["LD_PRELOAD"] = library
    packages = [write_python_model(tmp_path / f"m{number}") for number in range(10)]
    end = time.monotonic() + seconds / len(_ALLOCATORS)
    with (
        embedded_adapter(f"--model-roots={tmp_path}", COMPLETE, environ=environ) as adapter,
        closing(adapter.client()) as client,
    ):
        server = tritonserver(adapter)
        maps = Path(f"/proc/{server}/maps").read_text()
        assert (allocator in maps) is (allocator != "glibc")
        seen = {0: _status(server)}
        for load in range(1, _LOADS + 1):
            package = packages[load % len(packages)]
            assert client.load(package.name, package).status == 200
            assert client.post(f"/models/{package.name}/invoke", infer_body(1.0)).status == 200
            assert client.delete(f"/models/{package.name}").status == 200
            if load in {1, _FIRST} or load % _EACH == 0:
                seen[load] = _status(server)
            if time.monotonic() > end:
                break
        seen[load] = _status(server)
    if load > _FIRST:
        grown = seen[load]["RssAnon"] - seen[_FIRST]["RssAnon"]
        assert grown / (load - _FIRST) <= _MOST_KIB_PER_LOAD, seen
