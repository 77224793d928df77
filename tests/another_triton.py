"""Has the tests run on another tritonserver than the embedded one: TRITON_SERVER names it.

It is found as users' own is, as the first `tritonserver` on PATH. The first process of a run looks
at it; those of xdist find in their environment what was seen.
"""

import os
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.running import Client, RunningAdapter, embedded_adapter

SERVER = "TRITON_SERVER"
VERSION = "TRITON_SERVER_VERSION"
PACKAGE = "nvidia-pytriton"
EMBEDDED = "2.51.0"  # that of the package


def version_of(path: Path) -> str:
    """Start it once below an adapter, and ask it. The adapter says why it does not come up."""
    try:
        with embedded_adapter(f"--tritonserver={path}") as adapter:
            return _version(adapter)
    except AssertionError as error:
        raise pytest.UsageError(f"{SERVER}: {path} does not start: {error}") from error


def _version(adapter: RunningAdapter) -> str:
    client = Client(adapter.http_address)
    try:
        return client.get("/v2").json()["version"]
    finally:
        client.close()


def place(path: Path, folder: Path) -> None:
    """Let it be the first `tritonserver` on PATH, for this process and all that it starts."""
    (folder / "tritonserver").symlink_to(path)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def pytest_configure(config: pytest.Config) -> None:
    given = os.environ.get(SERVER)
    if not given or hasattr(config, "workerinput"):
        return
    path = Path(given).absolute()
    os.environ[VERSION] = version_of(path)
    folder = tempfile.TemporaryDirectory(prefix="tritonserver-of-the-tests-")
    config.add_cleanup(folder.cleanup)
    place(path, Path(folder.name))


def pytest_report_header() -> str:
    given, found = os.environ.get(SERVER), os.environ.get(VERSION)
    if given and found:
        return f"tritonserver: {given}, version {found}"
    try:
        return f"tritonserver: {EMBEDDED}, of {PACKAGE} {version(PACKAGE)}"
    except PackageNotFoundError:
        return f"tritonserver: none, {PACKAGE} is not installed"


def is_of(wanted: Sequence[str], found: str) -> bool:
    """Return whether the version, or the one that it patches, is among `wanted` (2.51, ...)."""
    return f"{found}.".startswith(tuple(f"{version}." for version in wanted))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = os.environ.get(VERSION) or EMBEDDED
    for item in items:
        for mark in item.iter_markers("of_triton"):
            *wanted, reason = mark.args
            if not is_of(wanted, found):
                why = f"of Triton {' and '.join(wanted)} alone, here is {found}: {reason}"
                item.add_marker(pytest.mark.skip(reason=why))
