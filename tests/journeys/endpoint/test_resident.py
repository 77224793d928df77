"""/resident of admin: which models are in memory, and which of them are idle for how long."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.endpoint.folder_store import Caller, Store
from tests.processes import suspend, tritonserver
from tests.running import wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

MIB = 2**20


def resident(caller: Caller) -> list[dict[str, Any]]:
    with closing(Caller(caller.adapter)) as own:
        models: list[dict[str, Any]] = own.admin.get("/resident").json()["models"]
    return models


def test_models_in_memory_are_told_with_bytes_and_the_longest_idle_first(
    start: Callable[..., Caller], store: Store, tmp_path: Path
):
    for number, name in enumerate(("a.tar.gz", "team/b.tar.gz", "c.tar.gz")):
        store.put(name, number)
    caller = start(
        "--memory-source=off",
        "--memory-limit=250MiB",
        "--eviction=lru",
        "--min-residency-seconds=0",
    )
    assert resident(caller) == []

    for name in ("a.tar.gz", "team/b.tar.gz", "a.tar.gz"):
        caller.invoke(name)
    found = resident(caller)
    assert [each["name"] for each in found] == ["team/b.tar.gz", "a.tar.gz"]
    assert [each["bytes"] for each in found] == [100 * MIB] * 2
    assert [each["in_flight"] for each in found] == [0, 0]
    assert found[0]["idle_seconds"] > found[1]["idle_seconds"] >= 0

    caller.invoke("c.tar.gz")  # evicts the first
    assert [each["name"] for each in resident(caller)] == ["a.tar.gz", "c.tar.gz"]

    own = write_python_model(tmp_path / "roots" / "own")
    assert caller.http.load("own", own).status == 200  # a platform's is in memory as well
    assert [each["name"] for each in resident(caller)][-1] == "own"


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
