"""The real command, a real Triton, a folder of models as the store, and room for two models."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from grpc import RpcError
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from tests.asking import refusal
from tests.constants import STAY
from tests.grpc_calls import calls_to
from tests.journeys.endpoint.folder_store import Caller, Store
from tests.journeys.memory.models import MIB, counted
from tests.processes import suspend, tritonserver
from tests.running import wait_until
from tests.trees import CONFIG, infer_body

pytestmark = pytest.mark.triton

SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 600000000 }\n"
ROOM_FOR_TWO = ("--memory-source=off", "--memory-limit=250MiB")


def resident(caller: Caller) -> list[dict[str, Any]]:
    with closing(Caller(caller.adapter)) as own:
        models: list[dict[str, Any]] = own.admin.get("/resident").json()["models"]
    return models


def test_model_with_request_in_flight_is_not_idle(start, store):
    store.put_all("a.tar.gz", "b.tar.gz")
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


def test_least_called_model_is_evicted_and_returns(start, store):
    store.put_all("a.tar.gz", "team/b.tar.gz", "c.tar.gz")
    caller = start(*ROOM_FOR_TWO, constants={STAY: 0})
    assert caller.invoke("a.tar.gz") == (0, "miss")
    assert caller.invoke("team/b.tar.gz") == (1, "miss")
    for _ in range(10):
        assert caller.invoke("a.tar.gz") == (0, "hit")
    found = resident(caller)
    assert [each["name"] for each in found] == ["team/b.tar.gz", "a.tar.gz"]
    assert [each["bytes"] for each in found] == [100 * MIB] * 2
    assert [each["in_flight"] for each in found] == [0, 0]
    assert found[0]["idle_seconds"] > found[1]["idle_seconds"] >= 0
    assert caller.invoke("c.tar.gz") == (2, "miss")
    assert caller.loaded() == ["a.tar.gz", "c.tar.gz"]
    assert [each["name"] for each in resident(caller)] == ["a.tar.gz", "c.tar.gz"]
    assert caller.invoke("team/b.tar.gz") == (1, "disk")
    assert caller.loaded() == ["a.tar.gz", "team/b.tar.gz"]
    assert caller.ledger() == {"a.tar.gz", "team/b.tar.gz"}
    evicted = 'triton_adapter_endpoint_evictions_total{from="memory",reason="room"}'
    assert caller.count(evicted) == 2


def test_callers_cannot_name_cached_files(start, store, tmp_path):
    store.put("a.tar.gz", 1)
    caller = start(f"--model-roots={tmp_path}")
    caller.invoke("a.tar.gz")
    (record,) = caller.admin.get("/debug/state").json()["models"]
    reply = caller.http.load("stolen", record["url"])
    assert reply.status == 400
    assert "the cache of the adapter" in reply.error


def test_preload_models_are_loaded_before_readiness(start, store):
    store.put("a.tar.gz", 1)
    (store.path / "broken.tar.gz").write_bytes(b"no archive")
    flags = [f"--preload={name}" for name in ("a.tar.gz", "broken.tar.gz", "missing.tar.gz")]
    caller = start(*flags)
    caller.wait_ready()
    assert caller.loaded() == ["a.tar.gz"]
    notes = caller.admin.get("/readyz").json()["notes"]
    assert [note.split("'")[1] for note in notes] == ["broken.tar.gz", "missing.tar.gz"]
    assert caller.invoke("a.tar.gz") == (1, "hit")


def _ask(caller: Caller, way: str, name: str) -> tuple[bool, str]:
    """Return whether there is an answer, and what was said."""
    if way == "grpc":
        try:
            with calls_to(caller.adapter.grpc) as calls:
                return True, str(calls.infer(name, 0.0))
        except RpcError as error:
            return False, f"{error.code()}: {error.details()}"
    reply = caller.call(name) if way == "endpoint" else v2_infer(caller, name)
    return reply.status == 200, reply.body.decode()


def test_ready_means_triton_has_the_model(start, store):
    """No call reaches a Triton without it."""
    store.put_all("a.tar.gz", "b.tar.gz")
    caller = start(*ROOM_FOR_TWO, "--on-demand", "--on-triton-restart=reload")
    is_over, told = threading.Event(), list[tuple[float, bool, str]]()

    def ask_on(way: str, name: str) -> None:
        with closing(Caller(caller.adapter)) as own:
            while not is_over.is_set():
                begun = time.monotonic()
                told.append((begun, *_ask(own, way, name)))

    ways = [(way, name) for way in ("endpoint", "v2", "grpc") for name in ("a.tar.gz", "b.tar.gz")]
    with ThreadPoolExecutor(len(ways)) as pool:
        asking = [pool.submit(ask_on, *each) for each in ways]
        try:
            for name in "a.tar.gz", "b.tar.gz":
                wait_until(lambda name=name: caller.call(name).status == 200, 60, f"{name} answers")
            caller.end_triton()
            caller.adapter.wait_for("triton.restarted")
            caller.wait_ready()
            ready = time.monotonic()
            for name in "a.tar.gz", "b.tar.gz":
                wait_until(lambda name=name: caller.call(name).status == 200, 60, f"{name} answers")
        finally:
            is_over.set()
    for each in asking:
        each.result()
    assert [text for _, _, text in told if "does not have the model" in text] == []
    assert [each for each in told if each[0] > ready and not each[1]] == []


# -- V2 --------------------------------------------------------------------------------------------


def v2_infer(caller: Caller, name: str) -> Any:
    return caller.http.post(f"/v2/models/{name}/infer", infer_body(0.0))


def test_v2_calls_load_named_models_on_demand(start, store):
    store.put_all("a.tar.gz", "b.tar.gz", "c.tar.gz")
    caller = start(*ROOM_FOR_TWO, "--on-demand", "--grpc=127.0.0.1:0")
    answer = v2_infer(caller, "a").json()  # the archive of that name
    assert (answer["model_name"], answer["outputs"][0]["data"]) == ("a", [0])
    with closing(grpc.InferenceServerClient(caller.adapter.grpc)) as client:
        value = grpc.InferInput("IN", [1], "FP32")
        value.set_data_from_numpy(np.zeros(1, np.float32))
        for _ in range(10):
            found = client.infer("b.tar.gz", [value])
            assert (found.get_response().model_name, found.as_numpy("OUT")[0]) == ("b.tar.gz", 1)
        assert client.infer("c", [value]).as_numpy("OUT")[0] == 2
        with pytest.raises(InferenceServerException, match="no such key: nothing") as raised:
            client.infer("nothing", [value])
        assert raised.value.status() == "StatusCode.NOT_FOUND"
    assert caller.loaded() == ["b.tar.gz", "c"]
    assert refusal(v2_infer(caller, "nothing")) == (404, "ArtifactNotFound", "nothing")
    assert "there is no such key: nothing" in v2_infer(caller, "nothing").error
    reply = caller.http.post("/v2/repository/models/nothing/load")
    assert reply.status == 404
    assert "and the store has no such key" in reply.error
    assert caller.http.get("/v2/models/a.tar.gz").json()["name"] == "a.tar.gz"


@pytest.mark.parametrize("more", ["", SEQUENCES], ids=["beside", "in_place"])
def test_failed_forced_load_leaves_the_version_before(start, store, more):
    """A model that keeps the state of sequences is never there twice: it is updated in place."""
    store.put("a.tar.gz", 1, config=CONFIG + more)
    caller = start("--on-demand")
    path = "/v2/repository/models/a.tar.gz/load"
    forced = {"parameters": {"force_reload": True}}
    sequence = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
    asked = {**infer_body(0.0), "parameters": sequence if more else {}}

    def infer() -> Any:
        reply = caller.http.post("/v2/models/a.tar.gz/infer", asked)
        return reply.data if reply.status == 200 else reply.body

    assert caller.http.post(path).status == 200
    store.put("a.tar.gz", 2, config=CONFIG + more, initialize="raise ValueError('no such luck')")
    for _ in range(2):
        reply = caller.http.post(path, forced)
        assert refusal(reply) == (400, "InvalidModel", "a.tar.gz")
        assert "no such luck" in reply.error
        assert ("the model that was there was loaded again" in reply.error) == bool(more)
        assert infer() == [1]
    store.put("a.tar.gz", 3, config=CONFIG + more)
    assert caller.http.post(path, forced).status == 200
    assert infer() == [3]


def test_without_on_demand_v2_loads_nothing(start, store):
    store.put("a.tar.gz", 1)
    caller = start()
    assert v2_infer(caller, "a.tar.gz").status == 404
    for name in ("a.tar.gz", "team%2Fa.tar.gz"):
        reply = caller.http.post(f"/v2/repository/models/{name}/load")
        assert "set on_demand to load models of a store by name" in reply.error
    assert caller.invoke("a.tar.gz") == (1, "miss")
    assert v2_infer(caller, "a.tar.gz").status == 200


def test_waiting_call_tells_no_overhead(start, store):
    for name in ("a.tar.gz", "b.tar.gz", "c.tar.gz"):
        store.put(name, 1)
    caller = start("--on-demand")

    def noted(frontend: str, method: str, code: str) -> tuple[float, float]:
        """How many calls were answered, and of how many it was noted what the adapter took."""
        names = f'frontend="{frontend}",method="{method}"'
        answered = f'triton_adapter_requests_total{{code="{code}",{names}}}'
        own = f"triton_adapter_overhead_seconds_count{{{names}}}"
        return counted(caller.adapter, answered), counted(caller.adapter, own)

    for calls in (1, 2):
        assert v2_infer(caller, "a").status == 200
        assert noted("v2", "infer", "200") == (calls, calls - 1)
        assert caller.invoke("c.tar.gz")[0] == 1
        assert noted("endpoint", "invocations", "200") == (calls, calls - 1)
    with calls_to(caller.adapter.grpc) as rpc:
        assert rpc.infer("b", 0.0) == [1.0]
    assert noted("grpc", "ModelInfer", "OK") == (1, 0)


# -- room on disk: 5 MiB, for models of 1.5 MiB and of 3 while they are unpacked -------------------


def fill(store: Store, count: int) -> list[str]:
    names = [f"m{number}.tar.gz" for number in range(count)]
    for number, name in enumerate(names):
        store.put(name, number, weights=os.urandom(3 * 2**19))
    return names


def test_full_disk_unloads_least_recently_used(start, store):
    first, second, third = fill(store, 3)
    caller = start("--cache-limit=4MiB")
    assert [caller.invoke(name)[1] for name in (first, second, first)] == ["miss", "miss", "hit"]
    assert caller.invoke(third) == (2, "miss")
    assert caller.loaded() == [first, third]
    assert caller.invoke(second) == (1, "miss"), "its files have left the disk"
    assert caller.loaded() == [second, third]
    evictions = "triton_adapter_endpoint_evictions_total"
    assert caller.count(evictions + '{from="memory",reason="disk"}') == 2
    assert caller.count(evictions + '{from="disk",reason="limit"}') == 2
