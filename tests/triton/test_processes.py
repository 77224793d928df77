"""Who started whom, read from /proc."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from adapter.triton.server.processes import family

_RENAMED = """
import sys
open("/proc/self/comm", "wb").write(bytes.fromhex(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", [b"\xff\xfe", b") Z 1 (", b"\xc3", b"a b"])
def test_process_is_seen_under_any_name(name):
    command = [sys.executable, "-c", _RENAMED, name.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in list_family()
        process.communicate()
    assert process.pid not in list_family()


def list_family() -> list[int]:
    """Return the processes below this one."""
    return [member.id.pid for member in family(os.getpid(), set())]


def test_strangers_are_read_once_newcomers_are_seen():
    with sleeping() as ancestor, sleeping() as other:
        others: set[int] = set()
        assert family(ancestor.pid, others) == []
        assert {os.getpid(), os.getppid(), other.pid} <= others
        assert ancestor.pid not in others
        found = [member.id.pid for member in family(os.getpid(), others)]
        assert (ancestor.pid in found, other.pid in found) == (True, False)
        with sleeping() as later:
            assert later.pid in [member.id.pid for member in family(os.getpid(), others)]


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()
