"""Who started whom, read from /proc."""

import os
import subprocess
import sys

import pytest

from adapter.backend.processes import descendants

_RENAMED = """
import sys
open("/proc/self/comm", "wb").write(bytes.fromhex(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", [b"\xff\xfe", b") Z 1 (", b"\xc3", b"a b"])
def test_a_process_is_seen_whatever_any_process_calls_itself(name):
    command = [sys.executable, "-c", _RENAMED, name.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in descendants(os.getpid())
        process.communicate()
    assert process.pid not in descendants(os.getpid())
