"""The client that docs/sagemaker.md has made of the document talks to a real adapter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.running import EXAMPLES, RunningAdapter, unload_all

pytestmark = pytest.mark.triton

PAGE = ROOT / "docs" / "sagemaker.md"
SCRIPT = ROOT / "examples" / "clients" / "openapi_client.py"
# the one thing that the generator leaves out, as the page says
LEFT_OUT = "application/vnd.amazon.eventstream"


@pytest.fixture
def made(opened: RunningAdapter, tmp_path: Path) -> Path:
    """The folder with the client, and with the examples as in a clone."""
    (tmp_path / "examples").symlink_to(EXAMPLES.parent)
    [_, command] = read_command_block().splitlines()
    words = command.replace("127.0.0.1:8080", opened.http).split()
    program = [sys.executable, "-m", "openapi_python_client"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # it wants a ruff
    told = subprocess.run(
        [*program, *words[1:]],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    warnings = (told.stdout + told.stderr).split("WARNING")[1:]
    assert len(warnings) == 1, warnings
    assert LEFT_OUT in warnings[0]
    return tmp_path


def read_command_block() -> str:
    """Return the only block of the page that a test runs."""
    [text] = [block.text for block in blocks(PAGE) if block.mode == "run-by"]
    return text


def test_pages_client_loads_invokes_and_unloads(opened: RunningAdapter, made: Path):
    code = SCRIPT.read_text(encoding="utf-8").replace("127.0.0.1:8080", opened.http)
    try:
        told = subprocess.run(
            [sys.executable, "-c", code],
            cwd=made,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        unload_all(opened)

    assert told.returncode == 0, told.stderr
    loaded, listed, outputs, unloaded, refused = told.stdout.splitlines()
    assert "identity" in loaded
    assert listed.count("Model(") == 1
    assert outputs == "[1.0, 2.0]"
    assert unloaded == "Unloaded(model_name='identity')"
    assert refused == "ModelNotFound model 'identity' is not loaded"
