"""Large models come and go for minutes: packages of 0.7 GiB in a limit of 3 GiB."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.journeys.memory.test_cycles import play

pytestmark = pytest.mark.triton


def test_cycles_of_large_models_stay_within_the_limit(
    seconds: float, seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The figures are kept as properties: `--junitxml=FILE` writes them down."""
    end = time.monotonic() + seconds
    cycles = itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())
    for key, value in play(cycles, 3072, (717,) * 5, seed, tmp_path).items():
        record_property(key, value)
