"""Only what is open at a listener is told of."""

import pytest

from adapter.frontends.access import Extensions

TRITONS = (
    *("classification", "model_repository", "model_repository(unload_dependents)"),
    *("system_shared_memory", "cuda_shared_memory", "statistics", "trace", "logging"),
)


@pytest.mark.parametrize(
    ("passthrough", "left"),
    [
        ((), set()),
        (("shared_memory",), {"system_shared_memory", "cuda_shared_memory"}),
        (("trace", "log"), {"trace", "logging"}),
    ],
)
def test_what_passthrough_does_not_open_is_not_named(passthrough, left):
    found = Extensions(passthrough).served(TRITONS)
    assert found == [*TRITONS[:3], *(name for name in TRITONS if name in {*left, "statistics"})]


def test_without_loads_there_is_no_repository():
    served = Extensions(("shared_memory", "trace", "log"), has_repository=False).served(TRITONS)
    assert set(TRITONS) - set(served) == set(TRITONS[1:3])
