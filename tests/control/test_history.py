"""What /debug/state says of what happened lately, of latencies, and of one page of many models."""

import itertools

import pytest

from adapter.control.residency import Options
from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import (
    ArtifactNotFound,
    BackendError,
    InsufficientMemory,
    InvalidModel,
    NoRoom,
    OutOfMemory,
    StoreUnavailable,
)
from adapter.telemetry.history import History
from tests.control.admin import admin_of, adopt
from tests.fakes.house import House
from tests.fakes.residence import Residence

MIB = 2**20


async def state_of(house: House, query: str = "") -> dict:
    async with admin_of(house) as client:
        answer = await client.get(f"/debug/state{query}")
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def events_of(house: House) -> list[dict]:
    return (await state_of(house))["events"]


@pytest.fixture
async def house():
    house = await House(limit=1000 * MIB).open()
    house.sizes |= {"m": 600 * MIB, "n": 600 * MIB}
    yield house
    await house.close()


async def test_loads_and_unloads_are_told_newest_first_with_their_bytes(house):
    await house.load("m")
    await house.unload("m")
    unload, load = await events_of(house)
    assert (load["operation"], load["outcome"], load["model_id"]) == ("load", "done", "m")
    assert (unload["operation"], unload["bytes"], unload["evicted"]) == ("unload", 600 * MIB, None)


async def test_a_refusal_has_its_figures_its_status_and_the_reason(house):
    house.packages.declared |= {"/n": 600 * MIB}
    await house.load("m")
    with pytest.raises(InsufficientMemory):
        await house.load("n")
    refusal, _ = await events_of(house)
    assert (refusal["outcome"], refusal["status"]) == ("refused", 507)
    assert refusal["code"] == "InsufficientMemory"
    assert refusal["figures"]["needed_bytes"] == 600 * MIB
    assert refusal["figures"]["free_bytes"] < 600 * MIB
    assert refusal["figures"]["limit_bytes"] == 1000 * MIB
    assert "600.0 MiB" in refusal["reason"]


async def test_the_same_refusal_again_is_counted_and_not_listed_again(house):
    house.packages.declared |= {"/n": 600 * MIB}
    await house.load("m")
    for _ in range(3):
        with pytest.raises(InsufficientMemory):
            await house.load("n")
    refusal, load = await events_of(house)
    assert (refusal["count"], load["count"]) == (3, 1)


async def test_want_of_room_on_disk_is_counted_and_is_over_once_anything_was_fetched():
    history = History()
    for left in 3, 2:
        history.failed("fetch", ModelId("large"), NoRoom(f"{left} MiB are left"))
    history.failed("fetch", ModelId("away"), StoreUnavailable("no route"))
    history.done("fetch", ModelId("other"), 0.1, 5)
    away, large = history.failures({"fetch"})
    assert (large.count, large.is_mended, away.is_mended) == (2, True, False)
    history.failed("fetch", ModelId("large"), NoRoom("1 MiB is left"))
    worst = history.worst(are_lost=False, answered_at=lambda _: 0.0)
    assert (worst.reason, worst.count) == ("1 MiB is left", 3)
    history.disk_has_room()
    assert history.worst(are_lost=False, answered_at=lambda _: 0.0).model_id == "away"


async def test_a_refusal_for_another_reason_is_listed_by_itself():
    history = History()
    for reason in ("no such folder", "outside the roots", "no such folder"):
        history.failed("load", ModelId("n"), InvalidModel(reason))
    found = [(each.reason, each.count) for each in history.latest()]
    assert found == [("no such folder", 2), ("outside the roots", 1)]


async def test_mistakes_of_callers_do_not_push_out_a_lack_of_memory():
    history = History()
    history.failed("load", ModelId("n"), InsufficientMemory("no room"))
    for number in range(100):
        history.failed("fetch", ModelId(f"m{number}"), ArtifactNotFound("no such key"))
    assert history.latest()[-1].reason == "no room"
    assert len(history.failures({"load", "fetch"})) == 21


async def test_what_triton_has_lost_is_told_with_what_becomes_of_it():
    residence = await Residence(3).open("a", "b")
    await residence.call("a")
    await residence.load("own")
    residence.house.triton.models.clear()
    await residence.control.reconcile()
    lost = (await events_of(residence.house))[0]
    await residence.close()
    assert (lost["operation"], lost["outcome"], lost["status"]) == ("lost", "failed", None)
    assert lost["reason"] == (
        "Triton has lost 2 models. loaded again by the next call: a; "
        "not found (404) until loaded again: own."
    )


async def test_a_fetch_is_told_with_its_time_and_size_and_so_is_a_key_that_no_store_has():
    residence = await Residence(3).open("a")
    await residence.call("a")
    with pytest.raises(ArtifactNotFound):
        await residence.call("mistyped/a")
    state = await state_of(residence.house)
    await residence.close()
    refusal, _, fetch = state["events"]
    assert (fetch["operation"], fetch["outcome"], fetch["model_id"]) == ("fetch", "done", "a")
    assert fetch["bytes"] > 0
    assert (refusal["model_id"], refusal["outcome"]) == ("mistyped/a", "refused")
    assert state["failures"] == [refusal]


async def test_loads_that_go_well_do_not_push_out_the_last_refusal():
    history = History()
    history.failed("load", ModelId("n"), InsufficientMemory("no room"))
    for number in range(100):
        history.done("load", ModelId(f"m{number}"), 0.1, 5)
    assert history.latest()[-1].reason == "no room"
    assert len(history.latest()) == 41


async def test_what_is_remembered_of_failures_has_a_bound_in_number_and_length():
    history = History()
    for number in range(1000):
        history.failed("load", ModelId(f"m{number}"), InvalidModel("x" * 5000))
    assert len(history.latest()) == 20
    for number in range(1000):
        history.failed("load", ModelId(f"m{number}"), BackendError("x" * 5000))
    assert len(history.latest()) == 60
    assert {len(each.reason) for each in history.latest()} == {1000}


async def test_an_inference_that_ran_out_of_memory_is_told_and_is_no_failure_of_a_load(house):
    await house.load("m")
    error = OutOfMemory("CUDA out of memory", model_id="m", was_tried=True)
    await house.control.lease(ModelId("m")).judge(error)
    state = await state_of(house)
    assert (state["events"][0]["operation"], state["events"][0]["status"]) == ("infer", 507)
    assert state["failures"] == []


NEVER = {"are_lost": False, "answered_at": lambda _: 0.0}


async def test_a_failure_is_mended_once_the_same_model_succeeds():
    history = History()
    history.failed("fetch", ModelId("m"), StoreUnavailable("no answer"))
    history.failed("load", ModelId("n"), InsufficientMemory("no room"))
    assert history.worst(**NEVER).reason == "no room"
    history.done("load", ModelId("n"), 0.1, 5)
    assert history.worst(**NEVER).reason == "no answer"
    history.done("unload", ModelId("m"), 0.1, 5)
    assert history.worst(**NEVER) is not None
    history.done("fetch", ModelId("m"), 0.1, 5)
    assert history.worst(**NEVER) is None
    assert [each.is_mended for each in history.failures({"load", "fetch"})] == [True, True]
    history.failed("load", ModelId("n"), InsufficientMemory("no room"))
    assert history.worst(**NEVER).count == 2


async def test_what_became_of_triton_is_worse_than_what_failed_later_and_is_over_when_it_is_back():
    history = History()
    history.triton_ended("signal 9")
    history.lost("Triton has lost 3 models.")
    history.failed("load", ModelId("n"), InsufficientMemory("no room"))
    assert history.worst(are_lost=True, answered_at=lambda _: 0.0).operation == "lost"
    assert history.worst(**NEVER).reason == "signal 9"
    history.triton_back()
    assert history.worst(**NEVER).reason == "no room"


async def test_an_inference_that_lacked_memory_is_over_once_the_model_answers(house):
    await house.load("m")
    error = OutOfMemory("CUDA out of memory", model_id="m", was_tried=True)
    await house.control.lease(ModelId("m")).judge(error)
    assert (await state_of(house))["worst"]["status"] == 507
    with house.control.leases.of(house.control.registry.get(ModelId("m"))):
        pass
    assert (await state_of(house))["worst"] is None


async def test_triton_is_told_to_be_down_once_and_back_with_the_time_between():
    history = History()
    history.triton_back()
    history.triton_silent()
    history.triton_ended("signal 9")
    history.triton_silent()
    history.triton_back()
    back, down = history.latest()
    assert (down.outcome.value, down.reason) == ("failed", "signal 9")
    assert back.seconds == back.at - down.at


async def test_an_eviction_says_for_whom_what_it_was_worth_and_what_its_return_takes(caplog):
    caplog.set_level("INFO")
    residence = await Residence(1, Options(pin=("b",))).open("a", "b")
    await residence.call("a")
    await residence.call("b")
    events = await events_of(residence.house)
    async with admin_of(residence.house) as client:
        (model,) = (await (await client.get("/debug/state")).json())["models"]
    await residence.close()
    (eviction,) = [each for each in events if each["operation"] == "unload"]
    assert (eviction["model_id"], eviction["evicted"]) == ("a", "room")
    [begun] = [each for each in caplog.records if each.message == "model.unloading"]
    assert (begun.evicted, begun.evicted_for, begun.return_seconds) == ("room", "b", "0.0")
    assert begun.worth.startswith("1 call x 0.1 s / 0.10 GiB, last called ")
    assert eviction["reason"] == f"for 'b': {begun.worth}; it comes back in 0.0 s"
    assert (model["model_id"], model["is_pinned"]) == ("b", True)


# -- latencies --------------------------------------------------------------------------------


async def test_latencies_are_of_the_latest_inferences_that_went_well(house, monkeypatch):
    record = await house.load("m")
    assert (await state_of(house))["models"][0]["latency_seconds"] is None
    # each takes a millisecond longer than the one before: the first 100 are forgotten
    clock = itertools.chain.from_iterable((0.0, n / 1000) for n in range(1, 301))
    monkeypatch.setattr("adapter.runtime.clock.monotonic", lambda: next(clock))
    for _ in range(300):
        with house.control.lease(ModelId("m")):
            pass
    monkeypatch.undo()
    with pytest.raises(ValueError, match="no"), house.control.lease(ModelId("m")):
        raise ValueError("no")
    assert (len(record.usage.latencies), min(record.usage.latencies)) == (200, 0.101)
    (model,) = (await state_of(house))["models"]
    assert model["latency_seconds"] == {"p50": 0.2, "p99": 0.298, "of": 200}


# -- one page of many models ------------------------------------------------------------------


@pytest.fixture
async def many():
    """1000 models, of which the later ones are the larger, on a device of 10^6 MiB."""
    house = await House(limit=10**6 * MIB).open()
    ledger = house.control.memory.ledger
    for number, name in enumerate(adopt(house, 1000)):
        ledger.reserve(ModelId(name), {"host": number * MIB})
        ledger.settle(ModelId(name), None)
    yield house
    await house.close()


def names(state: dict) -> list[str]:
    return [model["model_id"] for model in state["models"]]


async def test_one_page_has_the_largest_models_and_the_totals_of_all(many):
    state = await state_of(many, "?models=3&sort=bytes")
    assert names(state) == ["m999", "m998", "m997"]
    totals = state["totals"]
    assert (totals["models"], totals["matching"], totals["shown"]) == (1000, 1000, 3)
    assert totals["states"] == {"READY": 1000}


async def test_the_filter_finds_a_part_of_a_name_whatever_its_case(many):
    state = await state_of(many, "?models=100&filter=M99&sort=name")
    assert names(state) == [f"m99{digit}" for digit in range(10)]
    assert (state["totals"]["matching"], state["totals"]["models"]) == (10, 1000)


async def test_the_holders_of_a_device_are_its_largest_whatever_the_filter(many):
    state = await state_of(many, "?models=0&filter=nothing")
    (device,) = state["memory"]["devices"].values()
    assert [each["model_id"] for each in device["holders"][:2]] == ["m999", "m998"]
    assert len(device["holders"]) == 12


async def test_the_state_that_the_page_asks_for_is_bounded_with_1000_models(many):
    async with admin_of(many) as client:
        page = await (await client.get("/debug/state?models=100&sort=bytes")).read()
        whole = await (await client.get("/debug/state")).read()
    assert len(page) < 64 * 1024 < len(whole)


FIRST = {
    "in_flight": "m500",
    "idle": "m007",
    "served": "m500",
    "p99": "m500",
    "-name": "m999",
    "-bytes": "m000",
}


async def test_a_page_can_be_sorted_by_what_is_looked_for(many):
    registry = many.control.registry
    for record in registry.records():
        record.usage.used_at = 100.0
    registry.get(ModelId("m007")).usage.used_at = 50.0
    registry.get(ModelId("m500")).usage.latencies.append(1.0)
    with many.control.lease(ModelId("m500")):
        found = {sort: names(await state_of(many, f"?models=1&sort={sort}")) for sort in FIRST}
    assert found == {sort: [first] for sort, first in FIRST.items()}


async def test_a_query_that_is_not_understood_is_refused_with_what_is(house):
    async with admin_of(house) as client:
        for query in ("models=-1", "models=x", "models=1000000", "sort=size"):
            answer = await client.get(f"/debug/state?{query}")
            assert answer.status == 400, query
            assert "is accepted" in (await answer.json())["error"], query


async def test_on_demand_one_page_has_what_is_coming_and_the_residents_that_it_lists():
    residence = await Residence(3).open("a", "b", "c")
    await residence.call("a")
    await residence.call("b")
    gate = residence.steps.hold("fetch c")
    call = residence.house.begin(residence.call("c"))
    await gate.reached.wait()
    async with admin_of(residence.house) as client:
        found = await (await client.get("/debug/state?models=1&sort=name")).json()
    gate.open()
    await call
    await residence.close()
    assert names(found) == ["a"]
    assert [each["model_id"] for each in found["on_demand"]["models"]] == ["c", "a"]
    assert found["models"][0]["state"] == ModelState.READY.value
