"""The real command with a reader of its stdout that stands still."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.running import EMBEDDED, SERVE, Client
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_REFUSED = 1_500  # more lines than are kept: of 4 MiB
_LINES = ("model.loading", "model.load_refused")


class ReadByHand:
    """`triton-adapter serve` whose log is read only when a test does so."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "adapter", *SERVE, *EMBEDDED, *flags], stdout=subprocess.PIPE
        )
        listeners = {}
        while (line := self.line())["event"] != "adapter.started":
            if line["event"] == "adapter.listening":
                listeners[line["listener"]] = line["address"]
        self.http, self.admin = listeners["http"], listeners["admin"]

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_python_model(tmp_path / "m")


@pytest.fixture
def adapter(model: Path) -> Iterator[ReadByHand]:
    adapter = ReadByHand(f"--model-roots={model.parent}")
    yield adapter
    adapter.process.kill()
    adapter.process.wait()
    assert adapter.process.stdout is not None
    adapter.process.stdout.close()


def refuse(client: Client, count: int) -> None:
    """Each two lines of some 2,000 characters: the names of request and model are the caller's."""
    headers = {"X-Request-Id": "r" * 1000}
    for number in range(count):
        body = {"model_name": f"{'n' * 900}{number}", "url": "/nowhere"}
        assert client.post("/models", body, headers).status == 400


def test_unread_log_holds_up_nothing(adapter: ReadByHand, model: Path) -> None:
    """Requests and probes are answered, and the process ends."""
    with closing(Client(adapter.http)) as client, closing(Client(adapter.admin)) as admin:
        refuse(client, 500)
        assert client.load("m", model).status == 200
        assert client.post("/models/m/invoke", infer_body(1.0)).status == 200
        assert (client.get("/ping").status, admin.get("/livez").status) == (200, 200)
    adapter.process.send_signal(signal.SIGTERM)
    assert adapter.process.wait(60) == 0


@pytest.mark.timeout(300)
def test_late_reader_gets_sum_of_missed_lines(adapter: ReadByHand) -> None:
    with closing(Client(adapter.http)) as client, closing(Client(adapter.admin)) as admin:
        refuse(client, _REFUSED)
        assert dropped_by_metric(admin) > 0
        seen = 0
        while (line := adapter.line())["event"] in _LINES:
            seen += 1
        assert line["event"] == "log.dropped"
        assert seen + line["lines"] == len(_LINES) * _REFUSED
        assert dropped_by_metric(admin) == line["lines"]
        refuse(client, 1)
        assert adapter.line()["event"] == _LINES[0]


def dropped_by_metric(admin: Client) -> float:
    rows = admin.get("/metrics").body.decode().splitlines()
    (row,) = [row for row in rows if row.startswith("triton_adapter_log_lines_dropped_total")]
    return float(row.split()[1])


def test_one_request_logs_a_bounded_amount(adapter: ReadByHand) -> None:
    headers = {
        "X-Request-Id": "r" * 4000,
        "X-Amzn-SageMaker-Inference-Id": "i" * 4000,
        "X-Amzn-SageMaker-Target-Model": "t" * 4000,
    }
    with closing(Client(adapter.http)) as client:
        assert client.post(f"/models/{'n' * 1000}/invoke", b"{}", headers).status == 404
        assert client.load("m", "/" + "u" * 900_000).status == 400
    assert adapter.process.stdout is not None
    for _ in range(2):
        assert len(os.fsencode(adapter.process.stdout.readline())) < 16_000
