"""Play simulated days, and days with mistakes in the code: docs/simulation.md."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nightly.mutations import Mutation, environment_of, id_of, mutated, mutations_of
from tests.simulation.plan import drawn
from tests.simulation.world import played

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]

_MUTATION_SECONDS = 120


def test_nothing_is_wrong_in_new_days(seconds: float, seed: int) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert played(drawn(seed)).violation is None, f"make simulate SEED={seed}"
        seed += 1


@pytest.mark.parametrize("mutation", mutations_of("simulated_mutants.toml"), ids=id_of)
def test_mistake_in_the_code_is_found(copy: Path, mutation: Mutation) -> None:
    limits = [f"--seconds={_MUTATION_SECONDS}", "--first=0", "--whole"]
    command = [sys.executable, "-m", "tests.simulation", *limits]
    with mutated(copy, mutation):
        ran = subprocess.run(
            command,
            cwd=copy,
            env=environment_of(copy),
            check=False,
            capture_output=True,
            text=True,
        )
    assert "again: make simulate SEED=" in ran.stdout, mutation["breaks"]
