"""Mistakes, made by hand one at a time in a copy of the code: the tests named
beside each find it. One that lives tells which promise nobody holds any more.

`mutants.toml` has them. Its tests are quick ones, which `make test` runs as well.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly.mutations import Mutation, environment_of, id_of, mutated, mutations_of

MUTANTS = mutations_of("mutants.toml")
_SECONDS = 300


def passes(copy: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command.append("--timeout=60")  # a test that a mistake hangs has found it
    chosen = ["-m", "not slow and not nightly and not gpu and not e2e", *tests]
    ran = subprocess.run(
        [*command, *chosen],
        cwd=copy,
        env=environment_of(copy),
        timeout=_SECONDS,
        check=False,
        capture_output=True,
        text=True,
    )
    # 1: a test failed. Anything else (no such test, no such option) kills no mutant.
    assert ran.returncode in {0, 1}, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.returncode == 0


def test_tests_pass_on_unchanged_code(copy: Path):
    assert passes(copy, sorted({test for mutant in MUTANTS for test in mutant["tests"]}))


@pytest.mark.parametrize("mutant", MUTANTS, ids=id_of)
def test_a_mistake_is_found(copy: Path, mutant: Mutation):
    with mutated(copy, mutant):
        assert not passes(copy, mutant["tests"]), f"nobody noticed: {mutant['name']}"
