"""The log for people, of the real command."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.running import EMBEDDED, Client
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

STAMP = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (debug  |info   |warning|error  ) ")
COMMAND = (
    *(sys.executable, "-m", "adapter", "serve", "--log-format=text", "--grpc-data=off"),
    *(*EMBEDDED, "--grpc=127.0.0.1:0"),
)


class ForPeople:
    """`triton-adapter serve` with a log for people; `stop` ends it and has all lines."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()

    def wait_for(self, words: str) -> str:
        """The first line that holds them."""

        def found() -> list[str]:
            return [line for line in self.lines if words in line]

        with self._news:
            assert self._news.wait_for(found, 60), (words, self.lines[-5:])
            return found()[0]

    def client(self) -> Client:
        words = self.wait_for("adapter.listening listener=http").split("address=")
        return Client(words[1])

    def stop(self) -> str:
        """Returns what is on stderr."""
        self.process.send_signal(signal.SIGTERM)
        self.wait_for("adapter.stopped")
        assert self.process.wait(30) == 0
        self._reader.join(10)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout, self.process.stderr as errors:
            return errors.read()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of a start, a load, an invocation, two refusals, an unload and the end."""
    model = write_python_model(tmp_path_factory.mktemp("models") / "m")
    adapter = ForPeople(f"--model-roots={model.parent}")
    adapter.wait_for("adapter.started")
    with closing(adapter.client()) as client:
        assert client.load("m", model).status == 200
        assert client.post("/models/m/invoke", infer_body(1.0)).status == 200
        assert client.load("absent", model.parent / "absent").status == 404
        assert client.post("/models/none/invoke", b"{}").status == 404
        assert client.delete("/models/m").status == 200
    assert adapter.stop() == ""
    return adapter.lines


def test_every_line_has_the_time_and_the_level_in_front(lines: list[str]) -> None:
    assert [line for line in lines if not STAMP.match(line)] == []


def test_triton_speaks_in_bare_lines_without_its_own_stamp_and_tables(lines: list[str]) -> None:
    said = [line.partition(" triton | ")[2] for line in lines if " triton | " in line]
    assert "successfully loaded 'm'" in said
    assert [line for line in said if re.match(r"[IWE]\d{4} |[|+]|$", line)] == []


def test_a_healthy_run_says_nothing_as_warning_or_error(lines: list[str]) -> None:
    """What each machine without GPU says is one line."""
    assert [line for line in lines if re.search(r"\d (warning|error)", line)] == []


def at_terminal(*flags: str, **environ: str) -> tuple[int, str]:
    """What a command that ends by itself shows at a terminal, stdout and stderr."""
    master, terminal = pty.openpty()
    env: Mapping[str, str] = {**os.environ, "TERM": "xterm", "NO_COLOR": "", **environ}
    process = subprocess.Popen([*COMMAND, *flags], stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    text = b"".join(_chunks(master)).decode()
    os.close(master)
    return process.wait(60), text.replace("\r\n", "\n")


def _chunks(master: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # nobody has the terminal open any more
            return
        yield chunk


def test_a_start_that_fails_gives_its_reason_once(tmp_path: Path) -> None:
    code, text = at_terminal(f"--tritonserver={tmp_path}/none")
    assert code == 1
    assert text.count(f"{tmp_path}/none") == 1
    assert "\033[31merror  \033[0m adapter.failed reason=" in text


def test_no_colour_where_none_is_wanted(tmp_path: Path) -> None:
    _, text = at_terminal(f"--tritonserver={tmp_path}/none", NO_COLOR="1")
    assert "\033" not in text
