"""The real command and a real Triton, while the store gets other versions of what is loaded."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.asking import Gate
from tests.journeys.endpoint.folder_store import Caller
from tests.running import wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


def test_new_version_replaces_loaded_one_without_gap(start, store):
    store.put("team/a.tar.gz", 1)
    caller = start("--revalidate-seconds=0.2")
    assert caller.invoke("team/a.tar.gz") == (1, "miss")
    store.put("team/a.tar.gz", 2)
    answers = []

    def is_new() -> bool:
        answers.append(caller.invoke("team/a.tar.gz"))
        return answers[-1][0] == 2

    wait_until(is_new, 60, "the new version")
    assert {use for _, use in answers} == {"hit"}
    wait_until(lambda: len(caller.ledger()) == 1, 30, "the old version is gone")
    assert caller.loaded() == ["team/a.tar.gz"]


def test_new_version_without_room_waits_for_idle(start, store):
    store.put("a.tar.gz", 1)
    caller = start("--revalidate-seconds=0.2", "--memory-source=off", "--memory-limit=150MiB")
    caller.invoke("a.tar.gz")
    store.put("a.tar.gz", 2)
    wait_until(lambda: caller.invoke("a.tar.gz")[0] == 2, 60, "the new version")
    changed = 'triton_adapter_endpoint_evictions_total{from="memory",reason="changed"}'
    assert caller.count(changed) == 1


def test_old_version_stays_on_full_disk(start, store):
    """Nothing is unloaded."""
    for number, name in enumerate(("a.tar.gz", "b.tar.gz")):
        store.put(name, number, weights=os.urandom(3 * 2**19))
    caller = start("--revalidate-seconds=0.2", "--cache-limit=4MiB")
    for name in ("a.tar.gz", "b.tar.gz"):
        caller.invoke(name)
    store.put("b.tar.gz", 5, weights=os.urandom(3 * 2**19))
    refused = caller.adapter.wait_for("model.not_renewed", model_id="b.tar.gz")
    assert "no room on disk" in refused["reason"]
    assert caller.invoke("a.tar.gz") == (0, "hit")
    assert caller.invoke("b.tar.gz") == (1, "hit")
    unloaded = 'triton_adapter_endpoint_evictions_total{from="memory",reason="disk"}'
    assert caller.count(unloaded) == 0
    assert caller.count("triton_adapter_endpoint_no_room_total") == 0


# -- what a platform does meanwhile ----------------------------------------------------------------


def loading(caller: Caller) -> list[str]:
    models = caller.admin.get("/debug/state").json()["models"]
    return [each["model_id"] for each in models if each["state"] == "LOADING"]


@pytest.mark.parametrize("renewed_before", [False, True], ids=["own name", "other name"])
def test_platforms_load_amid_renewal_answers_until_unloaded(
    start, store, tmp_path, gate, renewed_before
):
    """A model that was renewed has another name in Triton, and the next version its own again."""
    own = write_python_model(tmp_path / "roots" / "own", answer="values = values + 9")
    store.put("m", 1)
    caller = start("--revalidate-seconds=0.2")
    assert caller.invoke("m") == (1, "miss")
    if renewed_before:
        store.put("m", 2)
        wait_until(lambda: caller.invoke("m")[0] == 2, 60, "the new version")
        wait_until(lambda: len(caller.ledger()) == 1, 30, "the old version is gone")
    store.put("m", 3, initialize=gate.statements)
    wait_until(lambda: loading(caller) != [], 60, "the new version is being loaded")
    caller.http.unload_model("m")
    caller.http.load_model("m", own)
    assert caller.invoke("m") == (9, "hit")
    gate.open()
    wait_until(lambda: caller.ledger() == {"m"}, 60, "the new version is gone")
    assert caller.invoke("m") == (9, "hit")
    caller.http.unload_model("m")
    assert caller.invoke("m")[0] == 3


def test_model_kept_during_renewal_stays_uncalled(start, store, tmp_path, gate):
    answer_gate = Gate(tmp_path / "answer")
    store.put("idle", 1)
    store.put("m", 1, answer=answer_gate.statements)
    caller = start("--revalidate-seconds=0.2", "--idle-unload-seconds=2")
    own = write_python_model(tmp_path / "roots" / "own")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(caller.call, "m")  # it is not idle before it is kept
        try:
            answer_gate.wait_reached()
            store.put("m", 3, initialize=gate.statements)
            wait_until(lambda: loading(caller) != [], 60, "the new version is being loaded")
            with caller.adapter.client() as platform:
                assert platform.load("m", own).status == 409
        finally:
            gate.open()
            answer_gate.open()
        assert held.result().status == 200
    caller.invoke("idle")
    wait_until(lambda: caller.loaded() == ["m"], 60, "the idle model is unloaded")
    wait_until(lambda: caller.ledger() == {"m"}, 60, "the new version is gone")
    assert caller.invoke("m") == (1, "hit")
