"""The limits of MPS, as its variable says them."""

import pytest

from adapter.triton.memory.nvml import mps_limits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("0=8G", {0: 8 * 2**30}),
        ("0=1G, 1=512MB", {0: 2**30, 1: 2**29}),
        ("0=1g,GPU-a=2G,1=,x", {0: 2**30}),
    ],
)
def test_the_variable_names_a_limit_for_each_gpu(text, expected):
    assert mps_limits(text) == expected
