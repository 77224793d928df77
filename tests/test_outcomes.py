"""The end of a run: reruns and skips are told, and a skip in CI is a decision."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = """
import pytest

def test_skipped():
    pytest.skip("{}")

@pytest.mark.xfail(strict=True)
def test_that_fails_as_it_should():
    raise AssertionError
"""


def run(folder: Path, text: str, *flags: str, **environ: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = races\n")
    plugins = [f"-p{name}" for name in ("tests.outcomes", "pytest_rerunfailures", "xdist")]
    quiet = "-Wignore::pytest.PytestAssertRewriteWarning"  # xdist is there before it is named
    command = [sys.executable, "-m", "pytest", "-q", quiet, *plugins, *flags, "test_it.py"]
    # what these runs skip is no news of the run that they are part of
    left_out = {"CI", "TEST_OUTCOMES"}
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    env = {**inherited, **alone, **environ}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("flags", [(), ("-n", "1")])
def test_unlisted_skip_fails_ci(tmp_path, flags):
    listed, other = (SKIPPED.format(reason) for reason in ("no namespaces here: x", "too late"))
    assert run(tmp_path, listed, *flags, CI="true")[0] == 0
    assert run(tmp_path, other, *flags)[0] == 0
    code, said = run(tmp_path, other, *flags, CI="true")
    assert code == 1
    assert "not allowed in CI (tests/outcomes.py): too late" in said
