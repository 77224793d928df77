"""Programs in other languages: built where their tools are, and kept in pytest's cache."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

BUILD_SECONDS = 600


def built(pytestconfig, source: Path, *tools: str) -> tuple[Path, bool]:
    """A folder for what is made of these sources, and whether it has been made."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)}")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
    folder = Path(pytestconfig.cache.mkdir(f"{source.name}-{digest}"))
    return folder, (folder / "done").exists()


def build(folder: Path, source: Path, *command: str) -> None:
    try:
        subprocess.run(command, cwd=source, check=True, timeout=BUILD_SECONDS, capture_output=True)
    except subprocess.CalledProcessError as error:
        text = (error.stdout + error.stderr).decode("utf-8", "replace")
        if any(word in text for word in ("dial tcp", "Could not transfer", "no such host")):
            pytest.skip("what it is built of cannot be fetched")
        raise AssertionError(text[-4000:]) from error
    (folder / "done").touch()


def go_program(pytestconfig: pytest.Config, name: str, source: str, seconds: float) -> Path:
    """Have Go build a program, once, into pytest's cache; return it."""
    assert pytestconfig.cache is not None
    program = Path(pytestconfig.cache.mkdir(name)) / name
    if not program.exists():
        try:
            subprocess.run(
                ["nice", "go", "install", "-p", "1", source],
                env={**os.environ, "GOBIN": str(program.parent)},
                capture_output=True,
                timeout=seconds,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"{name} cannot be had: {error}")
    return program
