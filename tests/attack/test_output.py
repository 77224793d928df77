"""The real command with a model that prints as fast as it can."""

import statistics
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_PRINTS = """
import time
end = time.monotonic() + float(values[0])
while time.monotonic() < end:
    print("x\\n" * 5000, end="", flush=True)
"""
_SECONDS = 6


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    return write_python_model(tmp_path / "chatty", answer=_PRINTS)


def test_a_model_that_prints_in_a_loop_holds_up_no_probe(chatty: Path) -> None:
    with embedded_adapter(f"--model-roots={chatty.parent}", COMPLETE) as adapter:
        client, printing = adapter.client(), adapter.client()
        with closing(client), closing(printing):
            assert client.load("chatty", chatty).status == 200
            body = infer_body(_SECONDS)
            thread = threading.Thread(target=printing.post, args=("/models/chatty/invoke", body))
            thread.start()
            slowest = slowest_ping(client, thread)
            thread.join()
        assert slowest < 1, "SageMaker allows 2 s, a kubelet 1 s"
        dropped = adapter.wait_for("triton.log_dropped")
        assert dropped["lines"] > 0
        check_bound(adapter)


def slowest_ping(client: Client, while_alive: threading.Thread) -> float:
    seconds = []
    while while_alive.is_alive():
        began = time.monotonic()
        assert client.get("/ping").status == 200
        seconds.append(time.monotonic() - began)
        time.sleep(0.02)
    assert len(seconds) > _SECONDS
    assert statistics.median(seconds) < 0.1
    return max(seconds)


def check_bound(adapter: RunningAdapter) -> None:
    lines = [line for line in adapter.events("triton.log") if line["line"] == "x"]
    assert len(lines) <= 500 * (_SECONDS + 3)
    with closing(Client(adapter.admin)) as admin:
        page = admin.get("/metrics").body.decode()
    (total,) = [
        row for row in page.splitlines() if row.startswith("adapter_triton_log_lines_dropped_total")
    ]
    assert float(total.split()[1]) > 1000
