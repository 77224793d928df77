"""The folders in which the listener for inference alone keeps a socket of its own."""

import signal
from pathlib import Path

import pytest

from tests.running import EMBEDDED, RunningAdapter

pytestmark = pytest.mark.triton


def folders(root: Path) -> set[str]:
    return {path.name for path in root.glob("triton-adapter-lane-*")}


def started(root: Path) -> RunningAdapter:
    adapter = RunningAdapter(*EMBEDDED, "--grpc-data=127.0.0.1:0", environ={"TMPDIR": str(root)})
    adapter.wait_for("adapter.started")
    return adapter


def test_what_a_killed_adapter_left_is_removed_and_what_others_use_is_not(tmp_path_factory):
    root = tmp_path_factory.mktemp("t")
    killed, other = started(root), started(root)
    both = folders(root)
    assert len(both) == 2
    killed.stop(signal.SIGKILL)
    try:
        assert folders(root) == both
        third = started(root)
        try:
            left = folders(root)
            assert len(left) == 2
            assert len(left & both) == 1
        finally:
            third.stop()
    finally:
        other.stop()
    assert folders(root) == set()
