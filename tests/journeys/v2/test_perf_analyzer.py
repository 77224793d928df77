"""NVIDIA's own load generator runs through the listeners as it does against Triton."""

import csv
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packages.models import write_adding, write_ensemble
from tests.running import EXAMPLES, RunningAdapter, unload_all, wait_until

pytestmark = [pytest.mark.triton, pytest.mark.timeout(300)]

_REQUESTS = 300

# the last wheel with a perf_analyzer for any glibc; it needs CUDA's runtime, but no GPU
_WHEELS = ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12==12.9.79")
_DEBIAN = "libb64-0d"


@dataclass(frozen=True)
class Tool:
    binary: Path
    libraries: list[Path]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        found = os.pathsep.join(map(str, self.libraries))
        return subprocess.run(
            [self.binary, *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": found},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


def fetched(folder: Path, *command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=90, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"perf_analyzer cannot be had: {error}")
    if done.returncode != 0:
        pytest.skip(f"perf_analyzer cannot be had: {command[0]}: {done.stderr[-200:]}")


def fill(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest=wheels"]
    fetched(folder, *pip, "--only-binary=:all:", *_WHEELS)
    for wheel in (folder / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder / "unpacked")
    fetched(folder / "debian", "apt-get", "download", _DEBIAN)
    (package,) = (folder / "debian").glob("*.deb")
    fetched(folder, "dpkg", "-x", str(package), "unpacked")


@pytest.fixture(scope="session")
def perf_analyzer(request) -> Tool:
    """Downloaded once, into pytest's cache."""
    if platform.machine() != "x86_64":
        pytest.skip("perf_analyzer is for x86-64")
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("perf_analyzer")
    unpacked = folder / "unpacked"
    if not (folder / "complete").exists():
        shutil.rmtree(unpacked, ignore_errors=True)
        fill(folder)
        (folder / "complete").touch()
    (binary,) = unpacked.rglob("perf_analyzer")
    binary.chmod(0o755)
    patterns = ("libcudart.so.12", "libb64.so.0d")
    return Tool(binary, [next(unpacked.rglob(pattern)).parent for pattern in patterns])


@pytest.fixture(scope="module")
def served(shared_adapter, model_root) -> Iterator[RunningAdapter]:
    package = model_root / "perf-ensemble"
    write_adding(package / "first", 1)
    write_adding(package / "second", 2)
    write_ensemble(package / "whole", "first", "second")
    with shared_adapter.client() as client:
        client.load_model("echo", EXAMPLES / "identity")
        client.load_model("ensemble", package)
        yield shared_adapter
    unload_all(shared_adapter)


def inferences(adapter: RunningAdapter, model: str) -> int:
    """How many Triton has answered, by its own count."""
    with adapter.client() as client:
        (found,) = client.get(f"/v2/models/{model}/stats").json()["model_stats"]
    assert found["inference_stats"]["fail"]["count"] == 0
    return found["inference_stats"]["success"]["count"]


@pytest.mark.parametrize("model", ["echo", "ensemble"])
@pytest.mark.parametrize(
    ("listener", "more"),
    [
        ("http", ()),
        ("grpc", ("--async",)),
        ("grpc_data", ("--async", "--streaming")),
    ],
)
def test_it_measures_without_a_failure(served, perf_analyzer, tmp_path, *, listener, more, model):
    report, before = tmp_path / "report.csv", inferences(served, model)
    done = perf_analyzer.run(
        *(
            "-m",
            model,
            "-i",
            listener.split("_")[0],
            "-u",
            served.listeners[listener],
            "--shape",
            "IN:16",
        ),
        *("--request-count", str(_REQUESTS), "--concurrency-range", "2", "-f", str(report)),
        *more,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "fail" not in (done.stdout + done.stderr).lower()
    # Triton counts an inference when it has answered it
    wait_until(lambda: inferences(served, model) - before >= _REQUESTS, 30, "all are counted")
    (measured,) = csv.DictReader(report.read_text().splitlines())
    assert float(measured["Inferences/Second"]) > 0
