"""Says which allocator an embedded Triton is given."""

import pytest

from adapter.backend.tritonserver import allocator_variables


def test_freed_memory_is_returned_by_default() -> None:
    assert allocator_variables({"PATH": "/bin", "LD_LIBRARY_PATH": "/lib"}) == {
        "MALLOC_MMAP_THRESHOLD_": "2097152",
        "MALLOC_TRIM_THRESHOLD_": "8388608",
    }


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "MALLOC_CONF", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_"]
)
def test_operators_allocator_is_not_tuned(name: str) -> None:
    assert allocator_variables({name: "1"}) == {}
