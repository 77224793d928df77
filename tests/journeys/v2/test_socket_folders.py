"""The folders in which a gRPC listener keeps a socket of its own."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.running import EMBEDDED, RunningAdapter

pytestmark = pytest.mark.triton


def folders(root: Path) -> set[str]:
    return {path.name for path in root.glob("triton-adapter-lane-*")}


def started(root: Path) -> RunningAdapter:
    adapter = RunningAdapter(*EMBEDDED, environ={"TMPDIR": str(root)})
    adapter.wait_for("adapter.started")
    return adapter


def test_what_a_killed_adapter_left_is_removed_and_what_others_use_is_not(tmp_path_factory):
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
