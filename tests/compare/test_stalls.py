"""Nobody waits for the load or unload of another model."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import pytest

from tests.asking import Gate
from tests.compare.servers import FAULTS, Endpoint, on_both, path_of, wait_for_file
from tests.running import Client, wait_until
from tests.trees import infer_body

pytestmark = [pytest.mark.triton, pytest.mark.builtin, pytest.mark.nightly]

CONNECTIONS = 24
PAUSE_SECONDS = 0.05


@dataclass
class Traffic:
    """Kept connections that invoke one model again and again."""

    endpoint: Endpoint
    # when, on each connection, the last request was sent that has had its answer
    answered: list[float] = field(default_factory=lambda: [0.0] * CONNECTIONS)
    bad: list[object] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def invoke(self, connection: int, name: str) -> None:
        with closing(Client(self.endpoint.address, 30)) as client:
            while not self.over.is_set():
                sent = time.monotonic()
                try:
                    reply = client.post(f"{path_of(name)}/invoke", infer_body(1.0))
                except FAULTS as error:
                    self.bad.append(error)
                    break
                if reply.status != 200:
                    self.bad.append(reply)
                self.answered[connection] = sent
                self.over.wait(PAUSE_SECONDS)

    def check_all_are_answered(self) -> None:
        """Each connection is answered a request that is sent from now on."""
        now = time.monotonic()
        wait_until(lambda: min(self.answered) > now, 25, "every connection is answered")
        assert self.bad == []


@contextmanager
def traffic(endpoint: Endpoint, name: str) -> Iterator[Traffic]:
    running = Traffic(endpoint)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for connection in range(CONNECTIONS):
            pool.submit(running.invoke, connection, name)
        try:
            wait_until(lambda: min(running.answered) > 0, 30, "all have begun")
            yield running
        finally:
            running.over.set()


@on_both("a load runs in a thread of the event loop")
def test_invocations_do_not_stall_during_the_load_of_another_model(
    endpoint: Endpoint, gate: Gate
) -> None:
    endpoint.put("other", endpoint.model())
    url = endpoint.model(initialize=gate.statements)
    with traffic(endpoint, "other") as running, ThreadPoolExecutor(1) as pool:
        load = pool.submit(endpoint.put, "slow", url)
        wait_for_file(gate.reached)
        try:
            running.check_all_are_answered()
        finally:
            gate.open()
            load.result()


@on_both("an unload runs in a thread of the event loop")
def test_invocations_do_not_stall_during_the_unload_of_another_model(
    endpoint: Endpoint, gate: Gate
) -> None:
    endpoint.put("other", endpoint.model())
    endpoint.put("slow", endpoint.model(finalize=gate.statements))
    with traffic(endpoint, "other") as running, ThreadPoolExecutor(1) as pool:
        unload = pool.submit(lambda: endpoint.delete("slow", seconds=60))
        wait_for_file(gate.reached)
        try:
            running.check_all_are_answered()
        finally:
            gate.open()
            assert unload.result().status == 200
