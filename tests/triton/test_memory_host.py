"""Host memory, from a tree of files as the kernel writes them."""

import shutil

import pytest

from adapter.core.memory import HOST
from adapter.triton.memory.host import (
    HostMemory,
    available_bytes,
    host_limit_bytes,
    models_limit_bytes,
)

KIB = 1024


class Machine:
    def __init__(self, root):
        self.root = root
        self.pids = []
        self.now = 100.0
        self.between = lambda: None
        (root / "dev/shm").mkdir(parents=True)
        self.memory = HostMemory(lambda: self.pids, 1000, root=root, clock=self.clock)

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


async def test_process_with_unchanged_counts_is_not_rewalked(machine):
    machine.run(1, share_kib=100)
    machine.run(2, share_kib=50)
    await machine.used_kib()
    machine.run(1, share_kib=999)
    machine.run(2, share_kib=60, resident=11)
    assert await machine.used_kib() == 160


@pytest.mark.parametrize("change", ["shared", "came", "went"])
async def test_change_of_pages_or_processes_rewalks_all(machine, change):
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


async def test_process_ending_during_reading_counts_nothing(machine):
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


async def test_free_shared_memory_may_be_unknown(machine):
    machine.run(1, share_kib=1)
    assert (await machine.memory.read()).shm_free_bytes > 0
    (machine.root / "dev/shm").rmdir()
    assert (await machine.memory.read()).shm_free_bytes is None


# -- the limit ----------------------------------------------------------------------------------

V1_UNLIMITED = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {}, 4000 * KIB),
        ("0::/\n", {"memory.max": "max\n"}, 4000 * KIB),
        ("0::/\n", {"memory.max": "9000000\n"}, 4000 * KIB),
        ("0::/\n", {"memory.max": "100000\n"}, 100000),
        ("0::/a/b\n", {"a/b/memory.max": "300\n"}, 300),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "200\n"}, 200),
        ("0::/a/b\n", {"a/b/memory.max": "300\n", "a/memory.max": "200\n"}, 200),
        ("0::/a/b\n", {"a/b/memory.max": "300\n", "x/memory.max": "200\n"}, 300),
        ("0::/not/seen/here\n", {"memory.max": "100\n"}, 100),
        ("0::/../b\n", {"memory.max": "100\n"}, 100),
        ("9:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "500\n"}, 500),
        ("9:memory:/a\n", {"memory/memory.limit_in_bytes": "600\n"}, 600),
        (
            "9:cpu,memory:/a/b\n",
            {
                "memory/a/b/memory.limit_in_bytes": V1_UNLIMITED,
                "memory/a/memory.limit_in_bytes": "700\n",
            },
            700,
        ),
        ("9:memory:/a\n", {"memory/a/memory.limit_in_bytes": V1_UNLIMITED}, 4000 * KIB),
        ("9:cpu:/a\n0::/b\n", {"unified/b/memory.max": "800\n"}, 800),
        (None, {"memory.max": "100\n"}, 100),
    ],
)
def test_limit_is_the_least_of_all_cgroups(tmp_path, groups, files, limit):
    machine = Machine(tmp_path)
    machine.write("proc/meminfo", "MemTotal: 4000 kB\nMemFree: 1 kB\n")
    if groups is not None:
        machine.write("proc/self/cgroup", groups)
    for path, text in files.items():
        machine.write(f"sys/fs/cgroup/{path}", text)
    assert host_limit_bytes(tmp_path) == limit


@pytest.mark.parametrize(("limit_mib", "models_mib"), [(1024, 896), (256, 128), (200, 100)])
def test_adapter_keeps_128_mib_or_half_limit(tmp_path, limit_mib, models_mib):
    machine = Machine(tmp_path)
    machine.write("proc/meminfo", "MemTotal: 99999999 kB\n")
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("sys/fs/cgroup/memory.max", f"{limit_mib * KIB * KIB}\n")

    assert models_limit_bytes(tmp_path) == models_mib * KIB * KIB


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {}, 900 * KIB),  # the machine alone
        ("0::/a\n", {"a/memory.max": "500\n", "a/memory.current": "300\n"}, 200),
        (
            "0::/a\n",
            {
                "a/memory.max": "500\n",
                "a/memory.current": "300\n",
                "a/memory.stat": "anon 1\ninactive_file 40\n",
            },
            240,
        ),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "300\n"}, 900 * KIB),
        (
            "9:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "500\n", "memory/a/memory.usage_in_bytes": "600\n"},
            0,
        ),
    ],
)
def test_available_is_the_least_of_machine_and_cgroups(tmp_path, groups, files, expected):
    machine = Machine(tmp_path)
    machine.write("proc/meminfo", "MemTotal: 4000 kB\nMemAvailable: 900 kB\n")
    machine.write("proc/self/cgroup", groups)
    for path, text in files.items():
        machine.write(f"sys/fs/cgroup/{path}", text)
    assert available_bytes(tmp_path) == expected
