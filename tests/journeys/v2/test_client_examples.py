"""The clients of examples/clients do what they print."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import EXAMPLES

pytestmark = pytest.mark.triton

CLIENTS = EXAMPLES.parent / "clients"
LABELS = [8, 4, 0, 0, 2, 7, 2, 2]


def run(*command: str | Path) -> dict[str, str]:
    """What it printed, line by line: what stands before the first `: ` and what behind."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


def test_the_http_client(adapter):
    said = run(sys.executable, CLIENTS / "http_client.py", adapter.http)
    assert said["server"] == "triton ready: True"
    assert said["inputs"] == "['IMAGE']"
    assert said["labels"] == f"{LABELS} truth: {LABELS}"
    assert said["unloaded"].startswith("404 ")


def test_the_grpc_client(adapter):
    said = run(sys.executable, CLIENTS / "grpc_client.py", adapter.grpc)
    assert said["server"] == "triton"
    assert said["labels"] == f"{LABELS} truth: {LABELS}"
    assert said["again"] == str(LABELS)
    assert said["unloaded"].startswith("StatusCode.NOT_FOUND Request for unknown model: ")


def test_the_curl_lines(adapter):
    done = subprocess.run(
        ["sh", CLIENTS / "curl.sh", adapter.http],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    server, loaded, described, inferred, other, index, unloaded = done.stdout.splitlines()
    assert json.loads(server)["name"] == "triton"
    assert (loaded, unloaded) == ("{}", "{}")
    assert json.loads(described)["name"] == "digits"
    assert json.loads(inferred)["outputs"][0]["data"] == LABELS
    assert other == "team/digits: 404"
    assert [model["name"] for model in json.loads(index)] == ["digits"]
