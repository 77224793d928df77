"""The adapter killed at one random moment after another, before a Triton that goes on."""

import itertools
import time
from pathlib import Path

import pytest

from tests.journeys.memory.test_killed import kill_at_moments

pytestmark = pytest.mark.triton


def test_an_adapter_killed_again_and_again_leaves_nothing(
    seconds: float, seed: int, tmp_path: Path
) -> None:
    end = time.monotonic() + seconds
    kill_at_moments(
        itertools.takewhile(lambda _: time.monotonic() < end, itertools.count()), seed, tmp_path
    )
