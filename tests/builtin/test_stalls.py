"""Fault 1 of sagemaker.md section 2: nobody waits for the load or unload of another model."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tests.builtin.doors import FAULTS, Door, on_both, path_of
from tests.running import Client
from tests.trees import infer_body

pytestmark = [pytest.mark.triton, pytest.mark.builtin]

CONNECTIONS = 24
PAUSE_SECONDS = 0.2
QUIET_SECONDS = 1.5
STALL_SECONDS = 0.25  # what SageMaker allows for accepting a connection


@dataclass
class Traffic:
    """Kept connections that invoke one model again and again. Begin and end of each invocation."""

    door: Door
    spans: list[tuple[float, float]] = field(default_factory=list)
    bad: list[object] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def invoke(self, name: str) -> None:
        client = Client(self.door.address, 20)
        while not self.over.is_set():
            begun = time.monotonic()
            try:
                reply = client.post(f"{path_of(name)}/invoke", infer_body(1.0))
            except FAULTS as error:
                self.bad.append(error)
                break
            self.spans.append((begun, time.monotonic()))
            if reply.status != 200:
                self.bad.append(reply)
            self.over.wait(PAUSE_SECONDS)
        client.close()

    def longest(self, since: float, until: float) -> float:
        """Of the invocations that were under way at some time in between, in seconds."""
        spans = [end - begin for begin, end in self.spans if begin < until and end > since]
        if not spans:
            raise RuntimeError("there was no traffic")
        return max(spans)


@contextmanager
def traffic(door: Door, name: str) -> Iterator[Traffic]:
    running = Traffic(door)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for _ in range(CONNECTIONS):
            pool.submit(running.invoke, name)
        try:
            yield running
        finally:
            running.over.set()


@on_both("1: a load runs in a thread of the event loop")
def test_invocations_do_not_stall_during_the_load_of_another_model(door: Door) -> None:
    door.put("other", door.model())
    url = door.model(initialize="import time; time.sleep(5)")
    with traffic(door, "other") as running:
        quiet = time.monotonic()
        running.over.wait(QUIET_SECONDS)
        begun = time.monotonic()
        door.put("slow", url)
        ended = time.monotonic()

    assert running.bad == []
    assert running.longest(begun, ended) <= running.longest(quiet, begun) + STALL_SECONDS


@on_both("1: an unload runs in a thread of the event loop")
def test_invocations_do_not_stall_during_the_unload_of_another_model(door: Door) -> None:
    door.put("other", door.model())
    door.put("slow", door.model(finalize="import time; time.sleep(2)"))
    with traffic(door, "other") as running:
        quiet = time.monotonic()
        running.over.wait(QUIET_SECONDS)
        begun = time.monotonic()
        if door.delete("slow").status != 200:
            raise RuntimeError("the unload failed")
        ended = time.monotonic()

    assert running.bad == []
    assert running.longest(begun, ended) <= running.longest(quiet, begun) + STALL_SECONDS
