"""What calls get of models that cannot be had: by their own fault, the store's, or Triton's end."""

import pytest

from adapter.core.artifacts import ArtifactKey, CacheUse
from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import (
    ArtifactNotFound,
    BackendUnavailable,
    InvalidModel,
    LoadFailed,
    StoreUnavailable,
    was_not_started,
)
from tests.fakes.residence import Residence, at_once

pytestmark = pytest.mark.filterwarnings("error")


async def test_a_key_that_the_store_lacks_is_not_found(residence):
    with pytest.raises(ArtifactNotFound):
        await residence.call("z")
    residence.check()


@pytest.mark.parametrize("error", [InvalidModel("no config"), LoadFailed("no weights")])
async def test_a_model_that_cannot_be_served_is_not_tried_for_each_caller(residence, error):
    residence.steps.fail("prepare /a" if isinstance(error, InvalidModel) else "load a", error)
    outcomes = await at_once(residence, *["a"] * 10)
    outcomes += await at_once(residence, *["a"] * 10)
    assert {type(outcome) for outcome in outcomes} == {type(error)}
    assert residence.artifacts.asked == ["a"]
    residence.check()


async def test_a_model_that_could_not_be_served_is_tried_again_soon(residence, monkeypatch):
    monkeypatch.setattr("adapter.control.residency.waits._REFUSED_SECONDS", 0.0)
    residence.steps.fail("load a", LoadFailed("no weights"))
    with pytest.raises(LoadFailed):
        await residence.call("a")
    assert await residence.call("a") is CacheUse.DISK


async def test_a_store_that_fails_is_asked_again_by_the_next_call(residence):
    residence.steps.fail("fetch a", StoreUnavailable("timed out"))
    with pytest.raises(StoreUnavailable):
        await residence.call("a")
    assert residence.count("endpoint_store_failures_total", error="StoreUnavailable") == 1
    assert await residence.call("a") is CacheUse.MISS


async def test_a_model_that_died_is_loaded_anew_by_the_next_call(residence):
    await residence.call("a")
    residence.control.registry.died(residence.control.registry.get(ModelId("a")))
    assert await residence.call("a") is CacheUse.DISK
    residence.check("a")


async def test_what_is_left_of_a_model_that_died_is_unloaded(residence):
    await residence.call("a")
    residence.control.registry.died(residence.control.registry.get(ModelId("a")))
    await residence.residency.eviction.unload_left()
    residence.check()


@pytest.mark.parametrize("loads_again", [False, True])
async def test_after_a_restart_of_triton_the_next_call_loads_anew(loads_again):
    residence = await Residence(2, loads_again=loads_again).open("a", "b")
    await residence.call("a")
    triton = residence.house.triton
    triton.models.clear()
    triton.lives += 1
    await residence.control.triton_restarted()
    assert residence.house.listed() == []
    assert await residence.call("a") is CacheUse.DISK
    residence.check("a")
    await residence.close()


async def test_a_failure_of_a_moment_ago_refuses_no_call_while_the_model_is_tried_again(residence):
    residence.steps.fail("load a", LoadFailed("no weights"))
    with pytest.raises(LoadFailed):
        await residence.call("a")
    gate = residence.steps.hold("load a")
    again = residence.house.begin(residence.residency.bring(ModelId("a"), ArtifactKey("", "a")))
    await gate.reached.wait()
    call = residence.house.begin(residence.call("a"))
    await residence.house.turns()
    gate.open()
    await again
    await call
    residence.check("a")


def end_triton(residence: Residence) -> None:
    """The next one runs, and nobody has looked at its models yet."""
    residence.house.triton.models.clear()
    residence.house.triton.lives += 1
    residence.house.server.pid = 2


@pytest.mark.parametrize("loads_again", [False, True])
async def test_no_call_gets_a_model_of_a_triton_that_has_ended(loads_again):
    residence = await Residence(2, loads_again=loads_again).open("a", "b")
    await residence.call("a")
    end_triton(residence)
    assert residence.residency.lease(ModelId("a")) is None
    assert await residence.call("a") is CacheUse.DISK
    residence.check("a")
    await residence.close()


async def test_no_call_by_name_gets_what_others_loaded_into_a_triton_that_has_ended(residence):
    await residence.house.load("a")
    end_triton(residence)
    with await residence.residency.wait_for_named(ModelId("a"), 1) as record:
        assert record.is_on_demand
    residence.check("a")


async def test_a_name_is_free_for_another_key_once_triton_has_ended(residence):
    model_id, other = ModelId("a"), ArtifactKey("", "b")
    await residence.call("a")
    with pytest.raises(ArtifactNotFound, match="was loaded from a"):
        await residence.residency.wait_for_lease(model_id, other)
    end_triton(residence)
    assert residence.residency.lease(model_id, other) is None  # not by what is known from before
    lease, use = await residence.residency.wait_for_lease(model_id, other)
    assert (lease.record.source.url, use) == ("/b", CacheUse.MISS)


async def test_no_key_is_refused_by_what_was_known_before_triton_ended(residence):
    await residence.call("a")
    end_triton(residence)
    residence.steps.fail("ready", BackendUnavailable("no connection", delivered=False))
    with pytest.raises(BackendUnavailable):
        await residence.residency.wait_for_lease(ModelId("a"), ArtifactKey("", "b"))


async def test_while_the_next_triton_does_not_answer_another_machine_may_be_asked(residence):
    await residence.call("a")
    end_triton(residence)
    residence.steps.fail("ready", BackendUnavailable("no connection", delivered=False))
    with pytest.raises(BackendUnavailable) as raised:
        await residence.call("a")
    assert was_not_started(raised.value)
    assert await residence.call("a") is CacheUse.DISK


async def test_a_model_whose_triton_dies_amid_its_fetch_is_loaded_by_the_next_triton(residence):
    fetching = residence.steps.hold("fetch a")
    call = residence.house.begin(residence.call("a"))
    await fetching.reached.wait()
    end_triton(residence)
    assert residence.state("a") is ModelState.FETCHING
    fetching.open()
    await residence.house.turns()
    assert residence.state("a") is ModelState.ON_DISK  # nobody has looked at the next Triton yet
    await residence.control.triton_restarted()
    assert await call is CacheUse.MISS
    assert residence.steps.seen.count("fetch a") == 1
    residence.check("a")


async def test_a_load_that_the_end_of_triton_broke_off_is_tried_once_more(residence):
    residence.steps.fail("load a", BackendUnavailable("broke", delivered=True))
    assert await residence.call("a") is CacheUse.MISS
    residence.check("a")


async def test_a_load_that_ended_triton_is_for_no_other_machine_when_triton_stays_away(residence):
    broke = BackendUnavailable("broke", delivered=True)
    away = BackendUnavailable("Triton did not come back in time", delivered=False)
    gate = residence.steps.hold("load a")
    call = residence.house.begin(residence.call("a"))
    await gate.reached.wait()
    residence.steps.fail("load a", broke)
    gate.open()
    residence.steps.hold("prepare /a").open()
    residence.steps.fail("prepare /a", away)
    with pytest.raises(BackendUnavailable, match="did not come back") as raised:
        await call
    assert not was_not_started(raised.value)
