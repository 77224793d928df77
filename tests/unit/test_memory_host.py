"""Host memory, from a tree of files as the kernel writes them."""

import os
import shutil

import pytest

from adapter.backend.memory import HostMemory
from adapter.core.memory import HOST

KIB = 1024
PAGE = os.sysconf("SC_PAGE_SIZE")


class Machine:
    def __init__(self, root):
        self.root = root
        self.pids = []
        self.now = 100.0
        self.between = lambda: None
        (root / "dev/shm").mkdir(parents=True)
        self.memory = HostMemory(lambda: list(self.pids), 1000, root=root, clock=self.clock)

    def clock(self):
        self.between()
        return self.now

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, pid, *, resident=10, shared=2, share_kib):
        """Start a process, or change its figures."""
        self.write(f"proc/{pid}/statm", f"900 {resident} {shared} 3 0 7 0\n")
        self.write(
            f"proc/{pid}/smaps_rollup",
            f"5581-7ffd ---p 00000000 00:00 0  [rollup]\nRss: 99 kB\nPss: {share_kib} kB\n"
            "Pss_Dirty: 77 kB\n",
        )
        self.pids = sorted({*self.pids, pid})

    async def used_kib(self):
        return (await self.memory.read()).used[HOST] / KIB


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


async def test_the_shares_of_all_processes_are_added_up(machine):
    machine.run(1, share_kib=100)
    machine.run(2, share_kib=50)
    assert await machine.used_kib() == 150
    assert (machine.memory.why, machine.memory.last.source) == ("", "host")


async def test_a_process_whose_counts_stand_still_is_not_walked_again(machine):
    machine.run(1, share_kib=100)
    machine.run(2, share_kib=50)
    await machine.used_kib()
    machine.run(1, share_kib=999)
    machine.run(2, share_kib=60, resident=11)
    assert await machine.used_kib() == 160


@pytest.mark.parametrize("change", ["shared", "came", "went"])
async def test_all_are_walked_when_shared_pages_or_processes_change(machine, change):
    machine.run(1, share_kib=100)
    machine.run(2, share_kib=50)
    await machine.used_kib()
    machine.run(1, share_kib=70)
    if change == "shared":
        machine.run(2, share_kib=50, shared=3)
    elif change == "came":
        machine.run(3, share_kib=0)
    else:
        machine.pids = [1]
    assert await machine.used_kib() == (70 if change == "went" else 120)


async def test_all_are_walked_every_5_seconds(machine):
    machine.run(1, share_kib=100)
    await machine.used_kib()
    machine.run(1, share_kib=70)
    machine.now += 4.9
    assert await machine.used_kib() == 100
    machine.now += 0.1
    assert await machine.used_kib() == 70


async def test_all_that_is_resident_counts_where_the_share_cannot_be_read(machine):
    machine.run(1, share_kib=0, resident=10)
    (machine.root / "proc/1/smaps_rollup").unlink()
    assert await machine.used_kib() == 10 * PAGE / KIB


async def test_a_process_that_ends_while_it_is_looked_at_counts_nothing(machine):
    machine.run(1, share_kib=100)
    machine.run(2, share_kib=50)
    # the clock is asked once all are counted, and before any is walked
    machine.between = lambda: shutil.rmtree(machine.root / "proc/2")
    assert await machine.used_kib() == 100


async def test_a_zombie_counts_nothing(machine):
    machine.run(1, share_kib=100)
    machine.run(2, share_kib=50, resident=0)
    assert await machine.used_kib() == 100


async def test_nothing_is_known_without_a_process(machine):
    assert await machine.memory.read() is None
    assert (machine.memory.last, machine.memory.why) == (None, "no process of Triton runs")


@pytest.mark.parametrize(
    ("groups", "files", "kills"),
    [
        ("0::/\n", {"memory.events": "oom 9\noom_kill 3\noom_group_kill 8\n"}, 3),
        ("0::/a/b\n", {"a/b/memory.events": "oom_kill 4\n", "memory.events": "oom_kill 9\n"}, 4),
        ("0::/not/seen/here\n", {"memory.events": "oom_kill 5\n"}, 5),
        (
            "9:cpu,memory:/a\n0::/\n",
            {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 6\n"},
            6,
        ),
        ("9:memory:/a\n0::/\n", {"memory/memory.oom_control": "oom_kill 7\n"}, 7),
        ("9:memory:/a\n0::/\n", {"memory/memory.oom_control": "oom_kill_disable 0\n\n"}, None),
        ("0::/\n", {}, None),
        (None, {"memory.events": "oom_kill 5\n"}, 5),
    ],
)
async def test_kills_are_read_from_our_own_cgroup(machine, groups, files, kills):
    machine.run(1, share_kib=1)
    if groups is not None:
        machine.write("proc/self/cgroup", groups)
    for path, text in files.items():
        machine.write(f"sys/fs/cgroup/{path}", text)
    assert (await machine.memory.read()).oom_kills == kills


async def test_free_shared_memory_is_unknown_where_there_is_no_such_place(machine):
    machine.run(1, share_kib=1)
    assert (await machine.memory.read()).shm_free_bytes > 0
    (machine.root / "dev/shm").rmdir()
    assert (await machine.memory.read()).shm_free_bytes is None
