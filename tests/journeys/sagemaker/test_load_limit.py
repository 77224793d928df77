"""A load that is past its time limit, or under way when the adapter stops, leaves nothing."""

import io
import os
import signal
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.asking import background, refusal
from tests.processes import arguments, children, is_alive, suspend
from tests.running import EMBEDDED, EXAMPLES, RunningAdapter, embedded_adapter, wait_until

pytestmark = pytest.mark.triton

_FILES = 60_000  # seconds of work


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "many.tar"
    with tarfile.open(path, "w") as packed:
        for number in range(_FILES):
            entry = tarfile.TarInfo(f"1/{number}")
            entry.size = 1
            packed.addfile(entry, io.BytesIO(b"x"))
    return path


def unpackers(adapter: RunningAdapter) -> list[int]:
    found = children(adapter.process.pid)
    return [
        pid for pid in found if any("adapter.packages.archive" in text for text in arguments(pid))
    ]


def suspended(adapter: RunningAdapter, count: int = 1) -> list[int]:
    """The processes that unpack, which go no further.

    Each is stopped when it is seen: a quick disk is done with the first of them before a busy
    machine has begun the last.
    """
    stopped: set[int] = set()

    def all_are_stopped() -> bool:
        for pid in set(unpackers(adapter)) - stopped:
            with suppress(ProcessLookupError):
                suspend(pid)
                stopped.add(pid)
        return len(stopped) == count

    wait_until(all_are_stopped, 30, "all are being unpacked")
    return sorted(stopped)


def test_unpacking_ends_at_its_loads_time_limit(archive):
    """Also the loads that wait for a thread."""
    roots = (f"--model-roots={archive.parent}", f"--model-roots={EXAMPLES}")
    with (
        embedded_adapter(*roots, "--load-timeout-seconds=8") as adapter,
        background(adapter) as others,
        adapter.client() as client,
    ):
        loads = [others.ask(lambda c, n=n: c.load(f"m{n}", archive)) for n in range(6)]
        pids = suspended(adapter, 4)  # which are all threads
        for load in loads:
            reply = load.result()
            assert refusal(reply)[:2] == (504, "BackendTimeout")
            assert b"did not load within 8 s" in reply.body
        wait_until(lambda: adapter.state()["models"] == [], 60, "the models are absent")
        assert adapter.events("model.loaded") == []
        assert not [pid for pid in pids if is_alive(pid)]
        assert unpackers(adapter) == []
        assert list(adapter.repository.iterdir()) == []

        def loads() -> bool:  # a busy machine may need longer: 504, and 409 for a while
            status = client.load("echo", EXAMPLES / "identity").status
            assert status in {200, 409, 504}
            return status == 200

        wait_until(loads, 60, "another is loaded")


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short path: there are sockets in it."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture
def stopping(scratch, archive) -> Iterator[RunningAdapter]:
    """Its drain is over before any archive is unpacked."""
    flags = (f"--model-roots={archive.parent}", "--drain-timeout-seconds=0.1")
    adapter = RunningAdapter(*EMBEDDED, *flags, environ={"TMPDIR": str(scratch)})
    adapter.wait_for("adapter.started")
    yield adapter
    with suppress(ProcessLookupError):
        adapter.process.kill()
    adapter.stop()


@pytest.mark.parametrize("is_suspended", [False, True], ids=["running", "suspended"])
def test_unpacking_ends_with_the_adapter_and_leaves_nothing(
    stopping, archive, scratch, is_suspended
):
    count = 1 if is_suspended else 4
    with background(stopping) as others:
        loads = [others.ask(lambda c, n=n: c.load(f"m{n}", archive)) for n in range(count)]
        unpacking = suspended(stopping, count)
        stopping.process.send_signal(signal.SIGTERM)
        if not is_suspended:
            for pid in unpacking:
                with suppress(ProcessLookupError):  # killed already
                    os.kill(pid, signal.SIGCONT)
        replies = [load.result() for load in loads]
        assert stopping.process.wait(30) == 0
    for reply in replies:
        assert refusal(reply)[:2] == (503, "BackendUnavailable")
        assert b"the adapter stopped" in reply.body
    assert list(scratch.iterdir()) == []
