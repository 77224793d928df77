"""What tests start ends with them."""

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.processes import arguments
from tests.running import wait_until

CRASH = """
import os
from tests.running import RunningAdapter

adapter = RunningAdapter("--triton=external", "--http=127.0.0.1:0", "--admin=127.0.0.1:0")
adapter.wait_for("adapter.listening")
print(adapter.process.pid, flush=True)
os._exit(1)
"""


@pytest.mark.slow
def test_adapter_ends_when_its_tests_crash():
    """A test that hangs ends its process, at its time limit."""
    crash = [sys.executable, "-c", CRASH]
    done = subprocess.run(crash, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout, done.stderr
    pid = int(done.stdout)
    wait_until(lambda: not any(arguments(pid)), 20, "the adapter ends")
