"""Thirty and some mistakes, made by hand one at a time in a copy of the code: the tests named
beside each find it. One that lives tells which promise nobody holds any more.

`mutants.toml` has them. Its tests are quick ones, which `make test` runs as well.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS: list[dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8")
)["mutant"]
_SECONDS = 300


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files of this checkout, as they are now."""
    place = tmp_path_factory.mktemp("copy") / "repository"
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    return place


def passes(copy: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command.append("--timeout=60")  # a test that a mistake hangs has found it
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(copy)}
    chosen = ["-m", "not slow and not nightly and not gpu and not e2e", *tests]
    ran = subprocess.run(
        [*command, *chosen],
        cwd=copy,
        env=environment,
        timeout=_SECONDS,
        check=False,
        capture_output=True,
        text=True,
    )
    # 1: a test failed. Anything else (no such test, no such option) kills no mutant.
    assert ran.returncode in {0, 1}, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.returncode == 0


def test_there_are_as_many_as_were_promised():
    assert len(MUTANTS) >= 30


def test_the_tests_pass_on_the_code_as_it_is(copy: Path):
    assert passes(copy, sorted({test for mutant in MUTANTS for test in mutant["tests"]}))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"].replace(" ", "-"))
def test_a_mistake_is_found(copy: Path, mutant: dict[str, Any]):
    file = copy / mutant["file"]
    text = file.read_text(encoding="utf-8")
    assert text.count(mutant["was"]) == 1, "the code has changed: say anew what is to be mutated"
    file.write_text(text.replace(mutant["was"], mutant["becomes"]), encoding="utf-8")
    try:
        assert not passes(copy, mutant["tests"]), f"nobody noticed: {mutant['name']}"
    finally:
        file.write_text(text, encoding="utf-8")
