"""The time slice of the event loop's thread, on the real kernel, and memory that is free."""

import platform
import re
import subprocess
import sys

import pytest

# prints nice and slice of the thread that called tune(), of one that it started, and of a process
_PROGRAM = """
import ctypes, os, struct, subprocess, sys, threading
from adapter.runtime import tuning
READ = "import ctypes, struct; SIZE = 48; read = ctypes.create_string_buffer(SIZE)"
READ += "; ctypes.CDLL(None).syscall({0}, 0, read, SIZE, 0)"
READ += "; found = struct.unpack('=IIQiIQQQ', read.raw); print(found[3], found[5], flush=True)"
READ = READ.format({"x86_64": 315, "aarch64": 275}[os.uname().machine])
exec(READ)
CHANGE
tuning.tune()
exec(READ)
thread = threading.Thread(target=exec, args=(READ,))
thread.start()
thread.join()
subprocess.run([sys.executable, "-c", READ], check=True)
"""
# prints how many MiB more are resident with garbage that is old, and when memory was given back
_GARBAGE = """
import asyncio, gc
from pathlib import Path
from adapter.runtime import tuning
class Circle: pass
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
tuning.tune()
tuning.settle()
before, circles = resident(), []
for i in range(1000):
    circle = Circle()
    circle.own, circle.held = circle, b"%d" % i * 2**15
    circles.append(circle)
gc.collect()
still = [circle.held for circle in circles[::100]]
del circle, circles
print(resident() - before)
asyncio.run(tuning.give_back())
print(resident() - before)
"""
_HAS_SLICES = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 12)


def printed(program):
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
    )
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def seen(change=""):
    """Returns nice and slice: before tune(), after it, in a thread, in a process."""
    return printed(_PROGRAM.replace("CHANGE", change))


def test_the_loops_thread_alone_gets_a_short_slice():
    before, loop, thread, process = seen()
    assert loop == (before[0], 100_000 if _HAS_SLICES else before[1])
    assert thread == process == before


def test_a_lowered_priority_is_kept_by_the_loop_and_all_that_it_starts():
    before, *after = seen("os.nice(3)")
    assert [nice for nice, _ in after] == [min(before[0] + 3, 19)] * 3


@pytest.mark.parametrize(
    "change",
    [
        "tuning._SCHED_SETATTR = {}",
        "tuning._SCHED_SETATTR = dict.fromkeys(tuning._SCHED_SETATTR, 9999)",
        "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))",
    ],
    ids=["another machine", "another kernel", "another policy"],
)
def test_where_there_are_no_slices_nothing_changes(change):
    before, *after = seen(change)
    assert after == [before] * 3


def test_free_memory_is_given_back_that_of_old_garbage_too():
    (taken,), (left,) = printed(_GARBAGE)
    assert taken > 50
    assert left < 10
