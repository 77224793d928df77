"""The lower bounds of pyproject.toml exist and go together, for every Python that it allows."""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.builds import build

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALLOWED = SpecifierSet(PROJECT["requires-python"])
PYTHONS = [f"3.{minor}" for minor in range(8, 30) if ALLOWED.contains(f"3.{minor}")]


@pytest.fixture(scope="module")
def uv(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uv")
    venv.create(folder, with_pip=True)
    build(folder, folder, str(folder / "bin" / "pip"), "install", "--quiet", "uv")
    return folder / "bin" / "uv"


def resolved(uv: Path, python: str, resolution: str) -> dict[str, Version]:
    """Return what an installation of the adapter consists of."""
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-annotate",
        "--no-header",
        f"--python={sys.executable}",
        f"--python-version={python}",
        f"--resolution={resolution}",
        "--extra=store",
        "--extra=tracing",
        "pyproject.toml",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    pins = (line.split("==") for line in done.stdout.split("\n") if line)
    return {name: Version(version) for name, version in pins}


@pytest.mark.parametrize("python", PYTHONS)
def test_newest_versions_resolve(uv, python):
    resolved(uv, python, "highest")


@pytest.mark.parametrize("python", PYTHONS)
def test_each_lower_bound_goes_with_the_others(uv, python):
    """Resolving goes above a bound that is no version, or that no other package allows."""
    versions = resolved(uv, python, "lowest-direct")
    for text in PROJECT["dependencies"]:
        asked = Requirement(text)
        (floor,) = (one.version for one in asked.specifier if one.operator == ">=")
        assert versions[asked.name] in SpecifierSet(f"=={floor}.*"), text
