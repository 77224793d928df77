"""/resident of admin: which models are in memory, and which of them are idle for how long."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from tests.journeys.endpoint.folder_store import Caller, Store
from tests.processes import suspend, tritonserver
from tests.running import wait_until

pytestmark = pytest.mark.triton

MIB = 2**20


def resident(caller: Caller) -> list[dict[str, Any]]:
    with closing(Caller(caller.adapter)) as own:
        models: list[dict[str, Any]] = own.admin.get("/resident").json()["models"]
    return models


def test_a_model_with_a_request_in_flight_is_not_idle(start: Callable[..., Caller], store: Store):
    for number, name in enumerate(("a.tar.gz", "b.tar.gz")):
        store.put(name, number)
    caller = start()
    for name in ("a.tar.gz", "b.tar.gz"):
        caller.invoke(name)
    with ThreadPoolExecutor(1) as pool:
        suspend(pid := tritonserver(caller.adapter))
        answer = pool.submit(caller.invoke, "a.tar.gz")
        wait_until(
            lambda: answer.done() or resident(caller)[-1]["in_flight"] == 1, 30, "it is in flight"
        )
        assert not answer.done(), answer.result()
        busy = resident(caller)[-1]
        os.kill(pid, signal.SIGCONT)
        assert answer.result(60) == (0, "hit")
    assert (busy["name"], busy["idle_seconds"]) == ("a.tar.gz", 0)
