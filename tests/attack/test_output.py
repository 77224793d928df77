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
# What the model does shows in each of them, what else the machine does in one now and then.
_ROUNDS = 3


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    return write_python_model(tmp_path / "chatty", answer=_PRINTS)


def test_printing_model_holds_up_no_probe(chatty: Path) -> None:
    with embedded_adapter(f"--model-roots={chatty.parent}", COMPLETE) as adapter:
        client, printing = adapter.client(), adapter.client()
        with closing(client), closing(printing):
            assert client.load("chatty", chatty).status == 200
            begun, slow = time.monotonic(), []
            for _ in range(_ROUNDS):
                median, slowest = pings_while_it_prints(client, printing)
                if median < 0.1 and slowest < 1:
                    break
                slow.append((median, slowest))
            printed = time.monotonic() - begun
        assert len(slow) < _ROUNDS, f"SageMaker allows 2 s, a kubelet 1 s: {slow}"
        dropped = adapter.wait_for("triton.log_dropped")
        assert dropped["lines"] > 0
        check_bound(adapter, printed)


def pings_while_it_prints(client: Client, printing: Client) -> tuple[float, float]:
    """The median and the longest time of a ping, in seconds."""
    body = infer_body(_SECONDS)
    thread = threading.Thread(target=printing.post, args=("/models/chatty/invoke", body))
    thread.start()
    seconds = []
    while thread.is_alive():
        began = time.monotonic()
        assert client.get("/ping").status == 200
        seconds.append(time.monotonic() - began)
        time.sleep(0.02)
    thread.join()
    return statistics.median(seconds), max(seconds)


def check_bound(adapter: RunningAdapter, printed_seconds: float) -> None:
    lines = [line for line in adapter.events("triton.log") if line["line"] == "x"]
    assert len(lines) <= 500 * (printed_seconds + 3)
    assert sum(line["lines"] for line in adapter.events("triton.log_dropped")) > 1000
