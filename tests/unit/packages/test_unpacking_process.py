"""A large archive is unpacked by a process of its own, which is never left behind."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.errors import AdapterError, BackendError, BackendUnavailable, NoRoom
from adapter.packages import archive as archive_reader
from adapter.packages import unpacking_process
from adapter.packages.roots import Inside, Opened
from adapter.packages.staging import Packages
from adapter.packages.unpack import Limits
from adapter.packages.unpacking_process import UnpackingProcess
from tests.processes import children, is_alive
from tests.running import wait_until

LIMITS = Limits()
# How an archive begins, again and again: its type is looked at before it is read.
BEGIN = tarfile.TarInfo("1/weights")
BEGIN.size = 2**30
BEGINNING = BEGIN.tobuf() * 40
LARGE = os.stat_result((0o100644, 0, 0, 0, 0, 0, 2**30, 0, 0, 0))


def packed(path, *names, size=3):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = size
            archive.addfile(entry, io.BytesIO(bytes(size)))
    return path


def run(archive, target, limits=LIMITS, process=None):
    with Inside([str(archive.parent)]).open_entry(str(archive)) as content:
        (process or UnpackingProcess()).run(archive, target, limits, content)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def unpackers(parent):
    """The processes that unpack for a parent: a worker of pytest may have other children."""
    found = []
    for pid in children(parent):
        with suppress(OSError):  # gone meanwhile
            if b"adapter.packages.archive" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


class Endless:
    """The unpacking of an archive that does not go on: a pipe with a tar's first bytes."""

    def __init__(self, folder):
        self.archive, self.target = folder / "a.tar", folder / "target"
        self.process = UnpackingProcess()
        self.error = None
        os.mkfifo(self.archive)
        self._pipe = os.open(self.archive, os.O_RDWR)
        self._run = threading.Thread(target=self._unpack)
        self._run.start()

    def _unpack(self):
        opened = os.open(self.archive, os.O_PATH)
        try:
            content = Opened(opened, str(self.archive), LARGE)
            self.process.run(self.archive, self.target, LIMITS, content)
        except AdapterError as error:
            self.error = error
        finally:
            os.close(opened)

    def begun(self):
        """Returns its pid once it has begun to write."""
        os.write(self._pipe, BEGINNING)
        wait_until(self.target.exists, 30, "the target is there")
        (pid,) = unpackers(os.getpid())
        return pid

    def ended(self):
        self._run.join(30)
        assert not self._run.is_alive()
        return self.error

    def close(self):
        self.process.kill()
        self._run.join(30)
        os.close(self._pipe)


@contextmanager
def endless(folder):
    unpacking = Endless(folder)
    try:
        yield unpacking
    finally:
        unpacking.close()


def test_adapter_itself_imports_no_reader_of_archives():
    """Whoever may name a model may send an archive: a fault of a reader ends one load at most."""
    code = "import adapter.cli.serve, adapter.cli.inspect, sys; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "adapter.packages.unpacking_process" in modules
    assert "adapter.packages.archive" not in modules


def test_without_a_process_an_archive_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking_process, "_COMMAND", ("/none",))
    with pytest.raises(BackendUnavailable, match="no process can be started"):
        run(packed(tmp_path / "a.tar.gz", "1/model.bin"), tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("name", "limits", "size"),
    [
        ("../out", LIMITS, 3),
        ("a\udcff/../b", LIMITS, 3),
        ("fine", Limits(max_unpacked_bytes=2), 3),
        ("fine", Limits(max_entries=0), 3),
    ],
    ids=["path", "no text", "bytes", "entries"],
)
def test_refusal_says_what_it_says_without_process(tmp_path, name, limits, size):
    archive, target = packed(tmp_path / "a.tar", name, size=size), tmp_path / "target"
    with pytest.raises(AdapterError) as here:
        archive_reader.unpack(archive, target, limits)
    with pytest.raises(AdapterError) as there:
        run(archive, target, limits)
    assert type(there.value) is type(here.value)
    assert str(there.value) == str(here.value)
    assert not target.exists()


def test_process_has_priority_of_work_that_can_wait(tmp_path):
    with endless(tmp_path) as unpacking:
        pid = unpacking.begun()
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(nice + 5, 19)


def test_process_shares_the_session_but_not_the_group(tmp_path):
    """Ctrl-C at a terminal is sent to the group. Linux shares the CPU out among sessions first: in
    one of its own the process got a fifth of what it gets beside the adapter on a busy machine.
    """
    with endless(tmp_path) as unpacking:
        pid = unpacking.begun()
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(0)


@pytest.mark.parametrize("killer", ["kill", "kernel"])
def test_killed_process_is_error_and_leaves_nothing(tmp_path, killer):
    with endless(tmp_path) as unpacking:
        pid = unpacking.begun()
        if killer == "kill":
            unpacking.process.kill()
        else:
            os.kill(pid, signal.SIGKILL)
        error = unpacking.ended()
        assert type(error) is BackendError
        assert str(error) == (
            f"cannot unpack {unpacking.archive}: the process for it was killed by SIGKILL"
        )
        # whoever gives a load up removes all that there is of it
        assert unpacking.target.exists() == (killer == "kill")
        assert not is_alive(pid)


def test_process_is_not_started_once_it_was_killed(tmp_path):
    process = UnpackingProcess()
    process.kill()
    archive = packed(tmp_path / "a.tar", "1/model.bin")
    with pytest.raises(BackendUnavailable, match="the load was given up"):
        run(archive, tmp_path / "target", process=process)


def test_a_process_that_fails_says_its_last_line(tmp_path, monkeypatch):
    failing = (sys.executable, "-c", "raise KeyError('lost')")
    monkeypatch.setattr(unpacking_process, "_COMMAND", failing)
    archive = packed(tmp_path / "a.tar", "1/model.bin")
    with pytest.raises(BackendError, match="the process for it ended with 1: KeyError: 'lost'"):
        run(archive, tmp_path / "target")


class Room:
    """Room on disk for `left` bytes."""

    def __init__(self, left: int) -> None:
        self.left = self.most = left
        self.asked = 0

    def reserve(self, count: int, inodes: int) -> None:
        self.asked += 1
        if count > self.left:
            raise NoRoom("the disk is full")
        self.left -= count


def unpack_with(room: Room, archive: Path) -> Path:
    target = archive.with_name("target")
    with Inside([str(archive.parent)]).open_entry(str(archive)) as content:
        UnpackingProcess().run(archive, target, LIMITS, content, room.reserve)
    return target


@pytest.mark.parametrize("size", [10_000, 2**23])
def test_room_is_asked_in_steps_before_writing(tmp_path, size):
    room = Room(2**30)
    target = unpack_with(room, packed(tmp_path / "a.tar", "a", "b", size=size))
    assert files(target) == ["a", "b"]
    taken = room.most - room.left
    assert 2 * size <= taken <= 2.5 * size + 20_000  # and the end of the archive
    assert 2 <= room.asked <= 30


@pytest.mark.parametrize("size", [10_000, 2**23])
def test_archive_without_room_leaves_nothing_and_no_process(tmp_path, size):
    room = Room(int(1.5 * size))
    with pytest.raises(NoRoom, match="the disk is full"):
        unpack_with(room, packed(tmp_path / "a.tar", "a", "b", size=size))
    assert not (tmp_path / "target").exists()
    assert not unpackers(os.getpid())


_PARENT = """
import os, sys
from pathlib import Path
from adapter.packages.roots import Opened
from adapter.packages.unpack import Limits
from adapter.packages.unpacking_process import UnpackingProcess
archive = Path(sys.argv[1])
status = os.stat_result((0o100644, 0, 0, 0, 0, 0, 2**30, 0, 0, 0))
content = Opened(os.open(archive, os.O_PATH), str(archive), status)
UnpackingProcess().run(archive, archive.with_name("target"), Limits(), content)
"""


def test_process_ends_with_adapter_that_is_killed(tmp_path):
    archive = tmp_path / "a.tar"
    os.mkfifo(archive)
    pipe = os.open(archive, os.O_RDWR)
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, archive])
    try:
        os.write(pipe, BEGINNING)
        wait_until((tmp_path / "target").exists, 30, "it is being unpacked")
        (pid,) = unpackers(parent.pid)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_alive(pid), 10, "the process has ended")
    os.close(pipe)


# Before the child's own program: it stops itself at the hundredth file that it opens to write.
_STOPS = """
import itertools, os, signal, sys
files = itertools.count(1)
def look(event, given):
    if event == "open" and given[2] & os.O_WRONLY and next(files) == 100:
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(look)
"""


async def test_abandoned_load_writes_nothing_leaves_no_process(tmp_path, monkeypatch):
    *before, program, path = unpacking_process._COMMAND
    monkeypatch.setattr(unpacking_process, "_COMMAND", (*before, _STOPS + program, path))
    root, repository = tmp_path / "models", tmp_path / "repository"
    root.mkdir()
    repository.mkdir()
    archive = packed(root / "a.tar", *(f"1/{number}" for number in range(300)), size=2**14)
    packages = Packages(repository, [root])
    name = TritonName("a")
    source = ModelSource(str(archive))
    load = asyncio.ensure_future(packages.prepare(name, ModelId("a"), source))
    while not any(repository.glob("a/*/1/*")):
        assert not load.done()
        await asyncio.sleep(0.01)
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert unpackers(os.getpid()) == []
    await packages.remove(name)
    assert list(repository.iterdir()) == []
