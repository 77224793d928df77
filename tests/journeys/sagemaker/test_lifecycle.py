"""Start, stop and sudden death of the whole adapter."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.asking import background, triton_index
from tests.processes import beside, descendants, is_alive
from tests.running import (
    COMPLETE,
    EMBEDDED,
    RunningAdapter,
    embedded_adapter,
    running_adapter,
    wait_until,
)
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


def shared_memory(adapter: RunningAdapter) -> list[Path]:
    """Of the adapter's Triton: its regions bear the name of the private folder."""
    return list(Path("/dev/shm").glob(f"{adapter.repository.parent.name}*"))


def run_to_its_end(*flags: str) -> tuple[int, str]:
    """Exit code and stderr of an adapter that should not come up."""
    done = forked.run(["serve", "--log-format=json", *flags], os.environ, seconds=60)
    return done.returncode, done.stderr.decode()


def test_sigterm_lets_load_end_and_leaves_nothing(tmp_path, gate):
    folder = write_python_model(tmp_path / "model", initialize=gate.statements)
    with embedded_adapter(f"--model-roots={tmp_path}", COMPLETE) as adapter:
        with background(adapter) as others:
            asked = others.ask(lambda c: c.load("slow", folder))
            gate.wait_reached()
            family = descendants(adapter.process.pid)
            assert shared_memory(adapter)
            adapter.process.send_signal(signal.SIGTERM)
            adapter.wait_for("adapter.stopping")
            gate.open()
            assert asked.result().status == 200
        assert adapter.process.wait(30) == 0
        wait_until(lambda: not any(map(is_alive, family)), 60, "no process is left")
        assert not shared_memory(adapter)
        assert not adapter.repository.parent.exists()


def test_killed_adapter_takes_its_triton_along(tmp_path, gate):
    folder = write_python_model(tmp_path / "model", answer=gate.statements)
    roots = f"--model-roots={tmp_path}"
    with running_adapter(*EMBEDDED, COMPLETE, roots) as adapter, background(adapter) as others:
        with adapter.client() as client:
            client.load_model("slow", folder)
        family = descendants(adapter.process.pid)
        assert len(family) >= 2  # tritonserver and the stub
        others.ask(lambda c: c.invoke("slow"))
        gate.wait_reached()
        assert adapter.stop(signal.SIGKILL) == -signal.SIGKILL

        wait_until(lambda: not any(map(is_alive, family)), 60, "no process is left")
        wait_until(lambda: not shared_memory(adapter), 60, "no shared memory is left")
    with embedded_adapter():
        wait_until(lambda: not adapter.repository.parent.exists(), 60, "the next one tidies up")


def test_bad_settings_exit_with_2_and_list():
    code, said = run_to_its_end("--http=nonsense", "--memory-limit=much", "--triton=inside")

    assert code == 2
    assert all(word in said for word in ("http", "nonsense", "memory-limit", "much", "inside"))
    assert "Traceback" not in said


def test_half_done_load_of_killed_adapter_is_unloaded(triton, tmp_path, gate):
    """In an external Triton."""
    package = write_python_model(tmp_path / "model", initialize=gate.statements)
    roots = f"--model-roots={tmp_path}"
    with beside(triton, roots) as killed, background(killed) as others:
        others.ask(lambda c: c.load("left-over", package))
        gate.wait_reached()
        killed.stop(signal.SIGKILL)
        gate.open()

    with beside(triton, roots) as adapter, adapter.client() as client:
        assert client.get("/models").json() == {"models": []}
        assert triton_index(triton).get("left-over", "UNAVAILABLE") == "UNAVAILABLE"
        assert [path for path in triton.repository.iterdir() if path.is_dir()] == []
        client.load_model("left-over", package)
        client.unload_model("left-over")
        assert adapter.stop() == 0


def test_load_ended_by_sigterm_leaves_nothing(triton, tmp_path, gate):
    """Have an external Triton answer the load while the adapter stops."""
    package = write_python_model(tmp_path / "model", initialize=gate.statements)
    flags = (f"--model-roots={tmp_path}", "--drain-timeout-seconds=0.5")
    with beside(triton, *flags) as adapter, background(adapter) as others:
        asked = others.ask(lambda c: c.load("ended", package))
        gate.wait_reached()
        adapter.process.send_signal(signal.SIGTERM)
        assert asked.result().status == 503
        gate.open()
        assert adapter.process.wait(30) == 0
        assert triton_index(triton).get("ended", "UNAVAILABLE") == "UNAVAILABLE"
        assert [path for path in triton.repository.iterdir() if path.is_dir()] == []
        assert [line for line in adapter.lines if line["level"] == "error"] == []


def test_load_that_outlasts_a_stop_is_no_bug(triton, tmp_path, gate):
    """Have an external Triton answer the load only once the adapter has ended."""
    package = write_python_model(tmp_path / "model", initialize=gate.statements)
    flags = (f"--model-roots={tmp_path}", "--drain-timeout-seconds=0.5")
    with beside(triton, *flags) as adapter, background(adapter) as others:
        asked = others.ask(lambda c: c.load("lasting", package))
        gate.wait_reached()
        adapter.process.send_signal(signal.SIGTERM)
        assert asked.result().status == 503
        assert adapter.process.wait(30) == 0
        gate.open()
        assert [line for line in adapter.lines if line["level"] == "error"] == []


@pytest.fixture
def nobody() -> Iterator[tuple[str, ...]]:
    """Flags of an external Triton at an address where nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        where = (f"--triton-grpc={address}", f"--triton-http={address}")
        yield ("--triton=external", "--http=off", "--admin=off", *where)


def test_start_without_triton_ends_at_its_limit(nobody):
    code, said = run_to_its_end(*nobody, "--start-timeout-seconds=1")

    address = nobody[-1].partition("=")[2]
    assert code == 1
    assert f"Triton was not live within 1 s, gRPC {address}: " in said
    assert "Connection refused" in said
    assert f"start one there, with its HTTP at {address}, or " in said
    assert "--triton=embedded starts one" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("listener", ["http", "admin", "grpc"])
def test_taken_port_is_named_with_its_setting(listener):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = run_to_its_end(*EMBEDDED, "--examples", f"--{listener}={address}")
        _, plain = run_to_its_end(*EMBEDDED, f"--{listener}={address}")

    assert code == 1
    assert f"{listener} cannot listen at {address} (setting {listener}, --{listener}, " in said
    assert "; make run takes others: HTTP=127.0.0.1:" in said
    assert f"{listener.upper()}=127.0.0.1:" in said
    assert "make run" not in plain


def test_start_without_triton_says_what_it_awaits(nobody):
    adapter = RunningAdapter(*nobody, "--start-timeout-seconds=300")
    try:
        adapter.wait_for("triton.awaited")
        wait_until(lambda: len(adapter.events("triton.awaited")) > 1, 30, "it is said again")
    finally:
        assert adapter.stop() == 0

    first, again = adapter.events("triton.awaited")[:2]
    address = nobody[-1].partition("=")[2]
    assert (first["for"], first["limit_seconds"]) == (f"gRPC {address}", 300)
    assert "Connection refused" in first["reason"]
    assert first["seconds"] < again["seconds"] < 300


def test_start_warns_of_open_listeners_and_odd_roots(tmp_path):
    """Listeners that other machines may reach, and roots that are relative or not there."""
    relative = Path(os.path.relpath(tmp_path))
    roots = (f"--model-roots={tmp_path / 'none'}", f"--model-roots={relative}")
    with embedded_adapter("--http=0.0.0.0:0", "--admin=[::]:0", *roots) as adapter:
        [opened] = adapter.events("adapter.open_to_others")
        assert opened["listeners"] == f"admin {adapter.admin}, http {adapter.http}"
        [missing] = adapter.events("adapter.root_missing")
        [made_absolute] = adapter.events("adapter.root_relative")
    assert (missing["level"], missing["path"]) == ("warning", str(tmp_path / "none"))
    assert (made_absolute["root"], made_absolute["path"]) == (str(relative), str(tmp_path))
