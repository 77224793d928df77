"""Memory of real processes as the kernel counts it."""

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from adapter.core.memory import HOST
from adapter.triton.memory.host import HostMemory

MIB = 2**20
ALLOCATE = """
import sys
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
block = bytearray(200 * 2**20)
block[::4096] = b"x" * len(block[::4096])
sys.stdout.write("touched\\n"); sys.stdout.flush(); sys.stdin.readline()
"""


@pytest.fixture
def child():
    """A small process that takes 200 MiB when it gets a line, and ends with the next."""
    with subprocess.Popen(
        [sys.executable, "-c", ALLOCATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def tell(process: subprocess.Popen[bytes]) -> None:
    process.stdin.write(b"\n")
    process.stdin.flush()


async def used_by(memory: HostMemory) -> int:
    return (await memory.read()).used[HOST]


async def test_what_a_process_allocates_and_touches_is_seen(child):
    memory = HostMemory(lambda: [child.pid], limit_bytes=1000 * MIB)
    before = await used_by(memory)
    tell(child)
    assert child.stdout.readline() == b"touched\n"
    after = await memory.read()
    assert after.devices[HOST].limit_bytes == 1000 * MIB
    assert after.used[HOST] - before == pytest.approx(200 * MIB, rel=0.1)
    assert memory.last == after


V1 = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def groups():
    """Two memory cgroups of v1, one in the other, below our own."""
    rows = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    [own] = [row[2] for row in rows if "memory" in row[1].split(",")] or [None]
    outer = V1 / f"{own or ''}".lstrip("/") / f"limits-{secrets.token_hex(4)}"
    try:
        (outer / "inner").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no memory cgroups of v1 here: {error}")
    yield outer, outer / "inner"
    (outer / "inner").rmdir()
    outer.rmdir()


@pytest.mark.parametrize(("outer_mib", "inner_mib"), [(500, None), (None, 300), (500, 300)])
def test_process_knows_limits_of_cgroups_above(groups, outer_mib, inner_mib):
    for group, mib in zip(groups, (outer_mib, inner_mib), strict=True):
        if mib is not None:
            (group / "memory.limit_in_bytes").write_text(str(mib * MIB))
    ask = "from adapter.triton.memory.host import host_limit_bytes; print(host_limit_bytes())"
    script = f'echo $$ > {groups[1]}/cgroup.procs && exec "$0" -c "{ask}"'

    said = subprocess.check_output(["sh", "-c", script, sys.executable], timeout=60)

    assert int(said) == min(mib for mib in (outer_mib, inner_mib) if mib) * MIB
