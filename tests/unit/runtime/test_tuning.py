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
asyncio.run(tuning.MemoryReturns().give_back())
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


def test_lowered_priority_is_inherited():
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


def test_freed_memory_of_garbage_is_returned():
    (taken,), (left,) = printed(_GARBAGE)
    assert taken > 50
    assert left < 10


# prints how many full passes of the garbage collector there were, without and with `give_back`:
# while few objects lived, while many did, the same ten minutes later, and after that
_PASSES = """
import asyncio, gc
from adapter.runtime import clock, tuning
tuning.tune()
tuning.settle()
now, full = 0.0, []
clock.monotonic = lambda: now
gc.callbacks.append(lambda phase, about: full.append(phase) if about["generation"] == 2 else None)
returns = tuning.MemoryReturns()
for living, now in ((1, 20.0), (150_000, 40.0), (150_000, 640.0), (150_000, 660.0), (1, 680.0)):
    full.clear()
    held = None
    held = [[[]] for _ in range(living)]
    gc.collect(1)
    print(len(full))
    asyncio.run(returns.give_back())
    print(len(full) // 2)
"""


def test_full_garbage_collections_are_rare():
    assert printed(_PASSES) == [(0,), (1,), (0,), (0,), (0,), (1,), (0,), (0,), (0,), (1,)]
