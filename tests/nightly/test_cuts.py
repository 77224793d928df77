"""The storm of cut connections of tests/attack/test_cuts.py, for minutes."""

import pytest

from tests.attack.test_cuts import storm
from tests.running import embedded_adapter

pytestmark = pytest.mark.triton


def test_minutes_of_cuts(seconds, seed, tmp_path):
    with embedded_adapter() as triton:
        storm(triton, tmp_path, seconds, seed)
