"""What every long test is given: for how long it plays, and the seed of its random numbers.

A part that is run by hand takes them from NIGHTLY_SECONDS and NIGHTLY_SEED; the seed is printed,
and the same seed plays the same part again as far as the machine does.
"""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SECONDS = float(os.environ.get("NIGHTLY_SECONDS", "60"))
SEED = int(os.environ.get("NIGHTLY_SEED") or random.randrange(1, 10**6))
# what a part may take beside them: to start servers, to end them, to look at what is left
_BESIDE_SECONDS = 600


def pytest_report_header() -> str:
    return f"nightly: NIGHTLY_SECONDS={SECONDS:.0f} NIGHTLY_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.nightly)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(SECONDS + _BESIDE_SECONDS))


@pytest.fixture(scope="session")
def seconds() -> float:
    """This part's share of the time: how long its load goes on."""
    return SECONDS


@pytest.fixture(scope="session")
def seed() -> int:
    return SEED


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
