"""What /debug/state says of loads and unloads that are under way, and of those that failed."""

import asyncio
import logging
import re

import pytest
import pytest_asyncio

from adapter.control import load_limit
from adapter.control.progress import Admission
from adapter.core.ledger import Ledger
from adapter.core.memory import HOST
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.residency.terms import Terms
from adapter.core.sizing import Basis, Estimate
from adapter.core.state import ModelEvent, ModelState, WaitsFor
from adapter.errors import BackendTimeout, InvalidModel, LoadFailed
from tests.control.admin import admin_of, ps_before
from tests.fakes.house import House

MIB = 2**20


@pytest_asyncio.fixture
async def house():
    """1000 MiB, and models that take 600."""
    house = await House(limit=1000 * MIB).open()
    house.sizes |= {"m": 600 * MIB, "n": 600 * MIB}
    yield house
    await house.close()


async def state_of(house: House, query: str = "") -> dict:
    async with admin_of(house) as client:
        return await (await client.get(f"/debug/state{query}")).json()


async def until_waits(house: House, name: str, what: WaitsFor) -> None:
    for turn in range(2000):
        record = house.control.registry.get(ModelId(name))
        if record is not None and record.waits_for is what:
            return
        await asyncio.sleep(0 if turn < 1000 else 0.01)
    raise AssertionError(f"{name} does not wait for {what}")


async def until_told(caplog, name: str) -> None:
    for _ in range(500):
        if name in {told for told, _ in told_to_wait(caplog)}:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"nothing tells that {name} waits")


@pytest.mark.parametrize(
    ("step", "waits_for"),
    [("prepare /m", "package"), ("place m", "files"), ("load m", "triton")],
)
async def test_a_load_says_what_it_waits_for(house, step, waits_for):
    gate = house.steps.hold(step)
    house.begin(house.load("m"))
    await asyncio.wait_for(gate.reached.wait(), 5)
    (model,) = (await state_of(house))["models"]
    assert (model["state"], model["waits_for"]) == ("LOADING", waits_for)
    gate.open()
    await house.until_state("m", ModelState.READY)
    (model,) = (await state_of(house))["models"]
    assert model["waits_for"] is None


def told_to_wait(caplog) -> list[tuple[str, str]]:
    lines = [record for record in caplog.records if record.message == "model.load_waits"]
    return [(record.model_id, record.waits_for) for record in lines]


def test_each_reason_to_wait_is_told_once_however_often_a_load_looks(caplog):
    caplog.set_level(logging.INFO)
    record = ModelRecord(ModelId("n"), TritonName("n"), ModelSource("/n"))
    figures = (Estimate({HOST: 5}, Basis.DECLARED), Ledger(None, lambda _: 0).snapshot(), None)
    told = Admission(record)
    for what in (WaitsFor.TURN, WaitsFor.TURN, WaitsFor.MEMORY, WaitsFor.MEMORY):
        told.waits(what, *figures)
        assert record.waits_for is what
    assert told_to_wait(caplog) == [("n", "turn"), ("n", "memory")]


async def test_a_load_behind_one_of_unknown_size_waits_for_its_turn(house, caplog):
    caplog.set_level(logging.INFO)
    gate = house.steps.hold("load m")
    house.begin(house.load("m"))
    await asyncio.wait_for(gate.reached.wait(), 5)
    house.begin(house.load("n"))
    await until_waits(house, "n", WaitsFor.TURN)
    await until_told(caplog, "n")
    gate.open()
    await house.until_state("m", ModelState.READY)
    assert told_to_wait(caplog) == [("n", "turn")]


async def test_a_load_that_does_not_fit_until_an_unload_ends_waits_for_memory(house, caplog):
    caplog.set_level(logging.INFO)
    house.packages.declared |= {"/m": 600 * MIB, "/n": 600 * MIB}
    await house.load("m")
    gate = house.steps.hold("unload m")
    unload = house.begin(house.unload("m"))
    await asyncio.wait_for(gate.reached.wait(), 5)
    load = house.begin(house.load("n"))
    await until_waits(house, "n", WaitsFor.MEMORY)
    gate.open()
    await asyncio.gather(unload, load)
    assert told_to_wait(caplog) == [("n", "memory")]
    (line,) = [record for record in caplog.records if record.message == "model.load_waits"]
    assert line.needed_bytes == {HOST: 600 * MIB}
    assert line.free_bytes[HOST] < 600 * MIB


async def test_a_load_that_failed_is_being_undone(house):
    house.steps.fail("load m", LoadFailed("no", model_id="m"))
    gate = house.steps.hold("unload m")
    load = house.begin(house.load("m"))
    await asyncio.wait_for(gate.reached.wait(), 5)
    (model,) = (await state_of(house))["models"]
    assert (model["state"], model["waits_for"]) == ("LOADING", "undoing")
    gate.open()
    with pytest.raises(LoadFailed):
        await load


async def test_an_unload_waits_for_the_requests_in_flight_and_then_for_triton(house):
    await house.load("m")
    gate = house.steps.hold("unload m")
    with house.control.lease(ModelId("m")):
        unload = house.begin(house.unload("m"))
        await until_waits(house, "m", WaitsFor.REQUESTS)
    await asyncio.wait_for(gate.reached.wait(), 5)
    (model,) = (await state_of(house))["models"]
    assert (model["state"], model["waits_for"]) == ("UNLOADING", "triton")
    gate.open()
    await unload


async def test_an_unload_that_failed_waits_for_nothing_any_more(house):
    await house.load("m")
    house.steps.fail("unload m", LoadFailed("no", model_id="m"))
    with pytest.raises(LoadFailed):
        await house.unload("m")
    (model,) = (await state_of(house))["models"]
    assert (model["state"], model["waits_for"]) == ("READY", None)


async def test_loads_that_hang_in_all_threads_are_told_with_those_that_wait(house, monkeypatch):
    monkeypatch.setattr(load_limit, "_HANGS_SECONDS", 0.1)
    gates = {name: house.steps.hold(f"load {name}") for name in "ab"}
    tasks = []
    for name, gate in gates.items():
        house.packages.declared[f"/{name}"] = 10 * MIB
        tasks.append(house.begin(house.load(name)))
        await asyncio.wait_for(gate.reached.wait(), 5)
    house.packages.declared["/c"] = 10 * MIB
    tasks.append(house.begin(house.load("c")))
    await until_waits(house, "c", WaitsFor.THREAD)
    watching = house.begin(house.control.run_housekeeping())  # which reads memory
    for _ in range(500):
        if notes := house.control.load_threads.notes():
            break
        await asyncio.sleep(0.01)
    assert "keep all 2 load threads of Triton" in notes[0]
    assert re.search(r"'a' \(for \d s\), 'b' \(for \d s\)", notes[0])
    a, _, c = (await state_of(house))["models"]
    assert (a["waits_for"], c["waits_for"], c["awaits"]) == ("triton", "thread", ["a", "b"])
    assert a["hanging_seconds"] >= 0.1
    assert c["hanging_seconds"] is None
    rows = {line.split()[0]: line for line in await ps_before(house)}
    assert "LOADING" in rows["b"]
    assert ", hanging for " in rows["b"]
    assert "waiting for one of Triton's load threads (behind a, b)" in rows["c"]
    watching.cancel()
    for gate in gates.values():
        gate.open()
    await asyncio.gather(*tasks)
    assert house.control.load_threads.notes() == []


def test_the_time_in_a_state_counts_from_its_beginning():
    now = 100.0
    registry = Registry(lambda: now)
    record = registry.begin_load(ModelId("m"), "m", None)
    assert record.state_since == 100.0
    now = 130.0
    registry.apply(record, ModelEvent.LOADED)
    assert record.state_since == 130.0
    now = 150.0
    registry.begin_unload(ModelId("m"))
    assert record.state_since == 150.0


async def test_a_model_says_how_long_it_is_loaded_and_idle_and_what_its_bytes_stand_on(house):
    house.packages.declared["/m"] = 600 * MIB
    await house.load("m")
    with house.control.lease(ModelId("m")):
        (busy,) = (await state_of(house))["models"]
    (idle,) = (await state_of(house))["models"]
    assert (busy["in_flight"], busy["idle_seconds"], busy["served"]) == (1, None, 1)
    assert 0 <= idle["idle_seconds"] <= idle["state_seconds"]
    assert (idle["bytes"], idle["basis"]) == ({HOST: 600 * MIB}, "measured")


@pytest.mark.parametrize(("declared", "basis"), [({"/m": 5 * MIB}, "declared"), ({}, "default")])
async def test_bytes_that_were_not_measured_stand_on_what_the_load_was_admitted_by(declared, basis):
    house = await House().open()
    house.packages.declared |= declared
    await house.load("m")
    (model,) = (await state_of(house))["models"]
    assert (model["basis"], model["is_measured"]) == (basis, False)
    await house.close()


async def test_one_model_alone_can_be_asked_for(house):
    await house.load("m")
    await house.load("é/ n")
    (found,) = (await state_of(house, "?model_id=%C3%A9%2F%20n"))["models"]
    assert found["model_id"] == "é/ n"
    assert (await state_of(house, "?model_id=none"))["models"] == []


async def test_the_latest_failures_are_told_newest_first_and_of_so_many_no_more(house):
    for number in range(25):
        house.steps.fail("prepare", InvalidModel(f"no {number}" + "x" * 5000, model_id="m"))
        with pytest.raises(InvalidModel):
            await house.load(f"m{number}")
    failures = (await state_of(house))["failures"]
    assert len(failures) == 20
    assert failures[0]["reason"].startswith("no 24")
    assert failures[-1]["reason"].startswith("no 5")
    assert max(len(failure["reason"]) for failure in failures) == 1000
    assert {failure["code"] for failure in failures} == {"InvalidModel"}
    assert failures[0].keys() >= {"time", "operation", "model_id", "code", "reason", "seconds"}


async def test_of_loads_that_all_hang_one_that_calls_have_begun_ends_for_another(
    house, monkeypatch
):
    """One that a platform has asked for does not, however long it hangs."""
    monkeypatch.setattr(load_limit, "_HANGS_SECONDS", 0.1)
    for name in "abc":
        house.packages.declared[f"/{name}"] = 10 * MIB
    gates = [house.steps.hold(f"load {name}") for name in "ab"]
    begun = [
        house.begin(house.load("a")),
        house.begin(
            house.control.load_on_terms(ModelId("b"), ModelSource("/b"), Terms(is_on_demand=True))
        ),
    ]
    for gate in gates:
        await asyncio.wait_for(gate.reached.wait(), 5)
    third = house.begin(house.load("c"))
    watching = house.begin(house.control.run_housekeeping())  # which reads memory
    with pytest.raises(BackendTimeout, match="was ended for others"):
        await asyncio.wait_for(begun[1], 10)
    gates[1].open()  # Triton has ended it
    await third
    gates[0].open()
    await begun[0]
    watching.cancel()
    house.check("a", "c")
