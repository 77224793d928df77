"""The versions of pyproject.toml and those of requirements/ fit each other."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ \\;]+)", re.MULTILINE)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins_of(path: Path) -> list[tuple[str, str]]:
    """Names and versions; a package has several where they depend on Python's version."""
    return [(normalized(name), version) for name, version in PINNED.findall(path.read_text())]


@pytest.mark.parametrize("name", ["adapter", "run", "demo", "dev"])
def test_pins_satisfy_what_the_project_asks_for(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = pins_of(ROOT / "requirements" / f"{name}.txt")
    for text in project["dependencies"]:
        asked = Requirement(text)
        versions = [version for pinned, version in pins if pinned == normalized(asked.name)]
        assert versions, f"{asked.name} is not pinned"
        assert all(asked.specifier.contains(version) for version in versions), (text, versions)
