"""The supervisor, with a tritonserver that does what its own never does: a script in its place that
starts the real one, unless a file tells it otherwise.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from adapter.triton.server.launch import RunFolder, prepare
from tests.processes import children, descendants, is_alive
from tests.running import EMBEDDED, EXAMPLES, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body

pytestmark = pytest.mark.triton

_SCRIPT = """\
#!/bin/bash
{environment}
if [ -e {folder}/dies ]; then echo "it dies at once"; exit 7; fi
if [ -e {folder}/stays ]; then
  trap '' TERM
  {command} "$@" &
  while true; do wait; sleep 1; done
fi
exec {command} "$@"
"""


class Script:
    """`path` is the program. It dies at once, or stays when it is asked to end, while told to."""

    def __init__(self, folder: Path) -> None:
        self._run = RunFolder()
        launch = prepare(None, self._run.path)
        self._folder = folder
        self.path = folder / "tritonserver"
        exports = "\n".join(f"export {k}={v!r}" for k, v in launch.environment.items())
        command = " ".join([str(launch.binary), *launch.arguments])
        self.path.write_text(_SCRIPT.format(environment=exports, folder=folder, command=command))
        self.path.chmod(0o755)

    def dies(self) -> None:
        (self._folder / "dies").touch()

    def stays(self) -> None:
        (self._folder / "stays").touch()

    def is_well_again(self) -> None:
        (self._folder / "dies").unlink()

    def remove(self) -> None:
        self._run.remove()


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    script = Script(tmp_path)
    yield script
    script.remove()


def server(adapter: RunningAdapter) -> int:
    """The pid that the adapter takes for tritonserver's."""
    (keeper,) = [pid for pid in children(adapter.process.pid) if is_alive(pid)]
    (found,) = [pid for pid in children(keeper) if is_alive(pid)]
    return found


def test_dying_server_is_restarted_ever_more_rarely(
    script: Script,
) -> None:
    with (
        embedded_adapter(f"--tritonserver={script.path}", "--on-triton-restart=forget") as adapter,
        closing(adapter.client()) as client,
    ):
        assert client.load("echo", EXAMPLES / "identity").status == 200
        script.dies()
        os.kill(server(adapter), signal.SIGKILL)
        wait_until(lambda: len(adapter.events("triton.restart_failed")) >= 3, 60, "three tries")
        failed = adapter.events("triton.restart_failed")
        assert "exited with 7: it dies at once" in failed[0]["reason"]

        # all that listens answers meanwhile, and says what it is
        assert client.get("/ping").status == 503
        assert client.post("/models/echo/invoke", infer_body(1.0)).status in {404, 503}
        assert client.load("other", EXAMPLES / "identity").status == 503

        times = [seconds_of(line) for line in [adapter.events("triton.exited")[0], *failed]]
        pauses = [later - earlier for earlier, later in pairwise(times)]
        # each twice the one before; starting the script takes a little on top
        assert all(pauses[n] >= 0.5 * 2**n for n in range(3))

        script.is_well_again()
        adapter.wait_for("triton.restarted", 60)
        wait_until(lambda: client.get("/ping").status == 200, 30, "ready again")
        assert client.load("echo", EXAMPLES / "identity").status == 200
        assert client.post("/models/echo/invoke", infer_body(1.0)).status == 200


def seconds_of(line: dict[str, str]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def test_server_that_ignores_sigterm_is_killed(script: Script) -> None:
    script.stays()
    # nothing is in flight: none of the time for a drain is taken, and 8 s for Triton
    flags = (f"--tritonserver={script.path}", "--drain-timeout-seconds=300")
    adapter = RunningAdapter(*EMBEDDED, *flags)
    try:
        adapter.wait_for("adapter.started")
        family = descendants(adapter.process.pid)
        adapter.process.send_signal(signal.SIGTERM)
        assert adapter.process.wait(60) == 0
        wait_until(lambda: not [pid for pid in family if is_alive(pid)], 60, "no process is left")
    finally:
        adapter.stop()


def test_sigterm_without_a_server_ends_the_adapter(script: Script) -> None:
    flags = (f"--tritonserver={script.path}", "--drain-timeout-seconds=300")
    with embedded_adapter(*flags) as adapter:
        script.dies()
        os.kill(server(adapter), signal.SIGKILL)
        adapter.wait_for("triton.restart_failed", 60)
        adapter.process.send_signal(signal.SIGTERM)
        assert adapter.process.wait(60) == 0
