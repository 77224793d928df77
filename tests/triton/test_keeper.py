"""The parent of tritonserver, with other programs in Triton's place."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from adapter.triton.server.process import NotStarted, ServerProcess
from adapter.triton.server.processes import family, kill

_DAEMON = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
        time.sleep(3600)
    os._exit(0)
os.wait()
print("started", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine takes longer than a second to end processes."""
    monkeypatch.setattr("adapter.triton.server.process._REST_SECONDS", 60.0)
    monkeypatch.setattr("adapter.triton.server.process._KILL_SECONDS", 60.0)


def is_there(pid: int) -> bool:
    """A zombie is, until it is reaped."""
    return Path(f"/proc/{pid}").exists()


def descendants(ancestor: int) -> list[int]:
    return [member.id.pid for member in family(ancestor, set())]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def spawn(*command: str) -> ServerProcess:
    return await ServerProcess.spawn(command, dict(os.environ), "no-such-region")


async def until(condition, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.01)


async def daemonising(path: Path, end: str = "") -> ServerProcess:
    """With two daemons below its keeper; it ends once there is a file at `path`."""
    server = await spawn(sys.executable, "-c", f"{_DAEMON}\n{end}", str(path))
    # three there are for a moment before as well: itself, and two that are still below it
    await until(lambda: len(descendants(server.keeper)) == 3 and descendants(server.server) == [])
    return server


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "exited with 0"),
        ("sys.exit(5)", "exited with 5"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ],
)
async def test_keepers_end_is_reported_with_nothing_left(tmp_path, end, said):
    server = await daemonising(tmp_path / "end", end)
    pids = descendants(server.keeper)
    assert server.pid == server.server == pids[0]
    (tmp_path / "end").touch()
    assert await server.wait() == said
    assert server.pid is None
    assert not [pid for pid in pids if is_there(pid)]


async def test_sigterm_reaches_it(tmp_path):
    server = await daemonising(tmp_path / "end")
    pids = descendants(server.keeper)
    await server.stop(60)
    assert await server.wait() == "exited with 3"
    assert not [pid for pid in pids if is_there(pid)]


@pytest.mark.slow
async def test_server_does_not_outlive_a_killed_keeper(tmp_path, monkeypatch):
    server = await daemonising(tmp_path / "end")
    # its daemons live on and hold the pipe of the output: this time is waited in full
    monkeypatch.setattr("adapter.triton.server.process._REST_SECONDS", 1.0)
    found = [member.id for member in family(server.keeper, set())]
    os.kill(server.keeper, signal.SIGKILL)
    try:
        assert await server.wait() == "lost its keeper, and was killed"
        assert server.pid is None
        await until(lambda: not is_there(server.server))
    finally:
        kill(found)


async def test_its_orphans_are_reaped_while_it_runs(tmp_path):
    server = await daemonising(tmp_path / "end")
    first, second = descendants(server.keeper)[1:]
    os.kill(first, signal.SIGKILL)
    await until(lambda: not is_there(first))
    assert descendants(server.keeper) == [server.pid, second]
    await server.stop(0)


async def test_what_cannot_be_executed_is_named(tmp_path):
    program = tmp_path / "tritonserver"
    program.write_text("#!/nothing/there\n")
    program.chmod(0o755)
    server = await spawn(str(program))
    assert await server.wait() == "exited with 127"
    assert server.complaint().startswith(f"{program} cannot be executed: No such file or directory")


async def test_failing_keeper_is_a_failed_start(monkeypatch, tmp_path):
    keeper = tmp_path / "keeper.py"
    keeper.write_text("raise SystemExit('no prctl here')")
    monkeypatch.setattr(
        "adapter.triton.server.process._KEEPER", (sys.executable, "-I", str(keeper))
    )
    before = descriptors()
    with pytest.raises(NotStarted, match="cannot be started: no prctl here"):
        await spawn("/bin/true")
    await until(lambda: descriptors() <= before)


async def test_no_descriptor_of_the_adapter_is_passed_on():
    """Else a model's process would keep open what it stands for."""
    seen = "[n for n in range(3, 999) if os.path.exists(f'/proc/self/fd/{n}')]"
    server = await spawn(sys.executable, "-c", f"import os; print({seen})")
    await server.wait()
    assert server.complaint().splitlines()[0] == "[]"
