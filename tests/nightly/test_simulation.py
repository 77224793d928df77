"""Play simulated days, with planted faults and with mutations: docs/simulation.md."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nightly.mutations import Mutation, environment_of, id_of, mutated, mutations_of
from tests.simulation.faults import FAULTS
from tests.simulation.faults.__main__ import found
from tests.simulation.plan import drawn
from tests.simulation.world import played

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(0)]

_FAULT_SECONDS, _MUTATION_SECONDS = 60.0, 120


def test_nothing_is_wrong_in_new_days(seconds: float, seed: int) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert played(drawn(seed)).violation is None, f"make simulate SEED={seed}"
        seed += 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    violation, _, _ = found(FAULTS[name], _FAULT_SECONDS)
    assert violation is not None, FAULTS[name].breaks


@pytest.mark.parametrize("mutation", mutations_of("blind_mutants.toml"), ids=id_of)
def test_a_mutation_by_somebody_who_did_not_know_the_simulation_is_found(
    copy: Path, mutation: Mutation
) -> None:
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
