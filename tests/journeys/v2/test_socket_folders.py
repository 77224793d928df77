"""The folders in which a gRPC listener keeps a socket of its own."""

import signal
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from adapter.frontends import listeners
from tests.grpc_calls import calls_to
from tests.running import EMBEDDED, RunningAdapter

pytestmark = pytest.mark.triton


def folders(root: Path) -> set[str]:
    return {path.name for path in root.glob("triton-adapter-grpc-*")}


def started(root: Path) -> RunningAdapter:
    adapter = RunningAdapter(*EMBEDDED, environ={"TMPDIR": str(root)})
    adapter.wait_for("adapter.started")
    return adapter


def test_only_killed_adapters_socket_folders_are_removed(tmp_path_factory):
    root = tmp_path_factory.mktemp("t")
    with ExitStack() as ends:
        killed, other = started(root), started(root)
        ends.callback(killed.process.kill)
        ends.callback(other.stop)
        both = folders(root)
        assert len(both) == 2
        killed.stop(signal.SIGKILL)
        assert folders(root) == both
        ends.callback(started(root).stop)
        left = folders(root)
        assert len(left) == 2
        assert len(left & both) == 1
    assert folders(root) == set()


def socket_folder(adapter: RunningAdapter) -> Path:
    """The folder of the socket that it listens at, as the kernel tells."""
    own = set()
    for descriptor in Path(f"/proc/{adapter.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(descriptor.readlink()))
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    [path] = {
        line[7]
        for line in listed
        if "triton-adapter-grpc-" in line[-1] and f"socket:[{line[6]}]" in own
    }
    return Path(path).parent


def test_long_tmpdir_moves_the_socket(tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    adapter = started(long)
    try:
        folder = socket_folder(adapter)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert not folders(long)
        with calls_to(adapter.grpc) as calls:
            assert calls.refused_infer("none", 1.0)[0] == "NOT_FOUND"  # of the server behind it
    finally:
        assert adapter.stop() == 0
    assert not folder.exists()


def test_log_says_which_socket_path_is_long(monkeypatch, tmp_path):
    long = str(tmp_path / ("x" * 100))
    monkeypatch.setattr(tempfile, "tempdir", long)
    monkeypatch.setattr(listeners, "_SHORT", ())
    with pytest.raises(OSError, match=f"at most 76 bytes long.*TMPDIR, {long}, is too long"):
        listeners._own_folder()
