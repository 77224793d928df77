"""One model's load and unload are nobody else's business."""

import time
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

from tests.running import EXAMPLES, Client, RunningAdapter
from tests.sagemaker.asking import Background, background
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_CONNECTIONS = 24
_QUIET_SECONDS = 2.0
_ALLOWED_STALL = 0.25


def invoke_until(over: Event, client: Client) -> tuple[set[int], float]:
    """All statuses, and the longest that an answer took, in seconds."""
    statuses, longest = set(), 0.0
    while not over.is_set():
        begun = time.monotonic()
        statuses.add(client.post("/models/echo/invoke", infer_body(1.0)).status)
        longest = max(longest, time.monotonic() - begun)
        over.wait(0.05)
    return statuses, longest


class Crowd:
    """Kept connections that invoke echo for as long as a `with` block takes."""

    def __init__(self, others: Background) -> None:
        self._others = others
        self._over = Event()
        self.longest = 0.0

    def __enter__(self) -> None:
        self._asked = [
            self._others.ask(lambda c: invoke_until(self._over, c)) for _ in range(_CONNECTIONS)
        ]

    def __exit__(self, *_: object) -> None:
        self._over.set()
        results = [each.result()[0] for each in self._asked]
        assert set().union(*(statuses for statuses, _ in results)) == {200}
        self.longest = max(longest for _, longest in results)


def test_nobody_waits_for_the_load_or_unload_of_another_model(
    adapter: RunningAdapter, client: Client, package: Path
) -> None:
    write_python_model(package, imports="import time", initialize="time.sleep(5)")
    assert client.load("echo", EXAMPLES / "identity").status == 200

    with background(adapter, _CONNECTIONS) as others:
        quiet, busy = Crowd(others), Crowd(others)
        with quiet:
            Event().wait(_QUIET_SECONDS)
        with busy:
            begun = time.monotonic()
            assert client.load("slow", package).status == 200
            assert time.monotonic() - begun > 5
            assert client.delete("/models/slow").status == 200

    assert busy.longest < quiet.longest + _ALLOWED_STALL


def test_many_loads_and_unloads_of_one_name_end_in_one_state(
    adapter: RunningAdapter, client: Client
) -> None:
    with background(adapter) as others:
        loads = [others.ask(lambda c: c.load("echo", EXAMPLES / "identity")) for _ in range(6)]
        statuses = sorted(each.result()[0].status for each in loads)
        deletes = [others.ask(lambda c: c.delete("/models/echo")) for _ in range(4)]
        gone = sorted(each.result()[0].status for each in deletes)

    assert statuses == [200, 409, 409, 409, 409, 409]
    assert gone == [200, 404, 404, 404]
    with closing(adapter.client()) as other:
        assert other.get("/models").json() == {"models": []}
    assert list(adapter.repository.iterdir()) == []
