"""Another version in the store takes the place of the one that is loaded."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from adapter.control.residency import Options
from adapter.core.artifacts import CacheUse
from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.core.state import ModelEvent, ModelState
from adapter.errors import AlreadyLoaded, BackendTimeout, LoadFailed, StoreUnavailable
from tests.control.admin import admin_of
from tests.fakes.residence import MIB, Residence
from tests.fakes.steps import Gate

OPTIONS = Options(model_wait_seconds=5, revalidate_seconds=0.001)


@pytest.fixture
async def residence():
    residence = await Residence(2, OPTIONS).open("a", "b")
    yield residence
    await residence.close()


def change(residence: Residence, name: str, etag: str, size_bytes: int = 100 * MIB) -> None:
    residence.artifacts.versions[name] = etag
    residence.house.packages.declared[f"/{name}@{etag}"] = size_bytes
    residence.house.sizes[f"ta.u.{name}_23{etag}"] = size_bytes


async def renewed(residence: Residence) -> None:
    await asyncio.sleep(0.002)
    await residence.residency.sweep()


def url_of(residence: Residence, name: str) -> str:
    return residence.control.registry.get(ModelId(name)).source.url


async def test_another_version_is_loaded_beside_the_old_one_and_takes_its_place(residence):
    await residence.call("a")
    change(residence, "a", "2", 70 * MIB)
    lease = await residence.hold("a")
    renewing = residence.house.begin(renewed(residence))
    async with asyncio.timeout(10):
        while url_of(residence, "a") == "/a":  # noqa: ASYNC110 - the switch tells nobody
            await asyncio.sleep(0.001)
    assert lease.record.asked_for == "a"  # by which its answer still names the model
    new = await residence.hold("a")
    assert (new.record.source.url, new.record.asked_for) == ("/a@2", "a")
    assert not renewing.done()  # the old one has a request
    assert lease.record.state in {ModelState.READY, ModelState.UNLOADING}
    lease.end()
    await renewing
    new.end()
    assert residence.house.listed() == ["a"]
    assert +residence.artifacts.pins == {"/a@2": 1}
    assert residence.house.held("a") == 70 * MIB
    assert residence.control.memory.ledger.snapshot().models == 1
    assert residence.control.memory.sizes.of_model(ModelId("a")) == 70 * MIB


async def test_a_version_whose_load_hangs_holds_up_no_other_model():
    residence = await Residence(4, OPTIONS).open("a", "b")
    for name in "ab":
        await residence.call(name)
    hanging = residence.steps.hold("load ta.u.a_232")
    change(residence, "a", "2")
    residence.house.begin(residence.residency.run_housekeeping())
    await asyncio.wait_for(hanging.reached.wait(), 5)
    change(residence, "b", "2")
    async with asyncio.timeout(10):
        while url_of(residence, "b") == "/b":  # noqa: ASYNC110 - the switch tells nobody
            await asyncio.sleep(0.001)
    assert url_of(residence, "a") == "/a"
    hanging.open()
    await residence.close()


async def test_of_two_versions_the_one_that_gets_the_calls_is_told_as_resident(residence):
    registry = residence.control.registry
    old = registry.adopt(ModelId("a"), TritonName("a"), ModelSource("/a"))
    newer = ModelId("a#2"), TritonName("a#2"), ModelSource("/a@2"), ModelId("a")
    new = registry.begin_load(*newer)
    registry.apply(new, ModelEvent.LOADED)
    async with admin_of(residence.house) as admin:
        for count, calls_it_gets in enumerate((old, new)):
            calls_it_gets.usage.in_flight = count
            found = await (await admin.get("/resident")).json()
            assert [(each["name"], each["in_flight"]) for each in found["models"]] == [("a", count)]
            registry.exchange(new, old)


async def test_the_third_version_has_the_model_s_own_name_in_triton_again(residence):
    await residence.call("a")
    for etag in ("2", "3"):
        change(residence, "a", etag)
        await renewed(residence)
    record = residence.control.registry.get(ModelId("a"))
    assert (record.name, record.source.url) == ("a", "/a@3")
    assert residence.house.triton.models == {"a"}


async def test_nothing_is_evicted_for_another_version_it_waits_until_the_model_is_idle(residence):
    for name in "ba":
        await residence.call(name)
    change(residence, "a", "2")
    lease = await residence.hold("a")
    await renewed(residence)
    assert (url_of(residence, "a"), residence.house.listed()) == ("/a", ["a", "b"])
    lease.end()
    await renewed(residence)
    assert (url_of(residence, "a"), residence.house.listed()) == ("/a@2", ["a", "b"])
    assert +residence.artifacts.pins == {"/a@2": 1, "/b": 1}
    assert residence.count("endpoint_evictions_total", **{"from": "memory", "reason": "room"}) == 0


async def test_a_package_of_several_models_is_renewed_when_it_is_idle(residence):
    residence.house.packages.placements["/a"] = Placement(
        (TritonName("a"),), (TritonName("a.step"),)
    )
    await residence.call("a")
    residence.control.registry.get(ModelId("a")).can_be_doubled = False
    change(residence, "a", "2")
    lease = await residence.hold("a")
    await renewed(residence)
    assert url_of(residence, "a") == "/a"
    lease.end()
    await renewed(residence)
    assert url_of(residence, "a") == "/a@2"


async def test_a_call_during_the_renewal_of_a_model_gets_its_answer(residence):
    for name in "ba":
        await residence.call(name)
    change(residence, "a", "2")
    gate = residence.steps.hold("load a")
    renewing = residence.house.begin(renewed(residence))
    await gate.reached.wait()
    call = residence.house.begin(residence.call("a"))
    await residence.house.turns()
    gate.open()
    assert await call is CacheUse.DISK
    await renewing


@pytest.mark.parametrize(("others", "stay"), [("b", "ac"), ("", "c")])
async def test_an_old_version_is_evicted_while_the_new_one_loads_only_if_no_other_can_go(
    others, stay
):
    options = replace(OPTIONS, min_residency_seconds=0)
    residence = await Residence(2 + len(others), options).open("a", "b", "c")
    for name in ("a", *others):
        await residence.call(name)
    change(residence, "a", "2")
    gate, renewing = await held(residence, "load ta.u.a_232")
    await residence.call("c")
    gate.open()
    await renewing
    assert residence.house.listed() == [*stay]
    assert "a" not in stay or url_of(residence, "a") == "/a@2"
    await residence.close()


async def test_a_version_that_cannot_be_loaded_leaves_the_old_one_where_it_is(residence):
    await residence.call("a")
    change(residence, "a", "2")
    residence.steps.fail("load", LoadFailed("no weights"))
    await renewed(residence)
    assert (url_of(residence, "a"), residence.house.listed()) == ("/a", ["a"])
    assert +residence.artifacts.pins == {"/a": 1}


async def test_a_store_that_cannot_be_asked_changes_nothing(residence):
    await residence.call("a")
    change(residence, "a", "2")
    residence.steps.fail("is_current a", StoreUnavailable("timed out"))
    await renewed(residence)
    assert url_of(residence, "a") == "/a"
    await renewed(residence)
    assert url_of(residence, "a") == "/a@2"


async def test_without_revalidation_the_store_is_not_asked():
    residence = await Residence(2, Options()).open("a")
    await residence.call("a")
    await renewed(residence)
    assert not [step for step in residence.steps.seen if step.startswith("is_current")]
    await residence.close()


# -- what others do amid a renewal -----------------------------------------------------------------


async def held(residence: Residence, step: str) -> tuple[Gate, asyncio.Task[None]]:
    """A renewal that stands before a step."""
    gate = residence.steps.hold(step)
    renewing = residence.house.begin(renewed(residence))
    await gate.reached.wait()
    return gate, renewing


def check_served(residence: Residence, url: str, name: str) -> None:
    """Model a is served from there, under this name in Triton; and nothing else is anywhere."""
    record = residence.control.registry.get(ModelId("a"))
    assert (record.source.url, record.name) == (url, name)
    residence.house.check_registry("a")
    assert residence.house.triton.models == {name}
    assert {*residence.house.packages.folders} == {name}
    assert residence.control.memory.ledger.snapshot().models == 1


async def test_what_a_platform_loads_amid_a_renewal_is_served_until_the_platform_unloads_it(
    residence,
):
    await residence.call("a")
    change(residence, "a", "2")
    gate, renewing = await held(residence, "load ta.u.a_232")
    await residence.house.unload("a")
    await residence.load("a")
    gate.open()
    await renewing
    await renewed(residence)
    check_served(residence, "/own/a", "a")
    assert +residence.artifacts.pins == {}
    await residence.call("a")
    await residence.house.unload("a")
    await residence.call("a")
    check_served(residence, "/a@2", "a")


async def test_a_platform_s_load_amid_a_renewal_never_gets_the_name_that_is_being_loaded(residence):
    await residence.call("a")
    change(residence, "a", "2")
    await renewed(residence)
    change(residence, "a", "3")
    gate, renewing = await held(residence, "load a")
    await residence.house.unload("a")
    own = await residence.load("a")
    assert own.name != "a"
    gate.open()
    await renewing
    await renewed(residence)
    check_served(residence, "/own/a", own.name)


async def _post(residence: Residence) -> None:
    with pytest.raises(AlreadyLoaded):
        await residence.load("a")


async def _load_by_name(residence: Residence) -> None:
    assert await residence.residency.load(ModelId("a"))


@pytest.mark.parametrize("keep", [_post, _load_by_name])
async def test_what_a_platform_keeps_amid_a_renewal_stays_as_it_is(
    residence, keep: Callable[[Residence], object]
):
    await residence.call("a")
    change(residence, "a", "2")
    gate, renewing = await held(residence, "load ta.u.a_232")
    await keep(residence)
    kept = residence.control.registry.get(ModelId("a"))
    gate.open()
    await renewing
    assert residence.control.registry.get(ModelId("a")) is kept
    assert not kept.is_on_demand
    await renewed(residence)
    check_served(residence, "/a", "a")
    assert +residence.artifacts.pins == {"/a": 1}


async def test_the_store_is_not_asked_about_what_a_platform_keeps(residence):
    await residence.call("a")
    await _post(residence)
    change(residence, "a", "2")
    residence.steps.seen.clear()
    await renewed(residence)
    assert residence.steps.seen == []
    assert url_of(residence, "a") == "/a"


async def test_what_was_found_outdated_is_not_renewed_once_a_platform_keeps_it(residence):
    await residence.call("a")
    change(residence, "a", "2")
    lease = await residence.hold("a")
    residence.control.registry.get(ModelId("a")).can_be_doubled = False
    await renewed(residence)
    await _post(residence)
    lease.end()
    residence.steps.seen.clear()
    await renewed(residence)
    assert residence.steps.seen == []
    assert url_of(residence, "a") == "/a"
    assert +residence.artifacts.pins == {"/a": 1}


async def test_an_unload_amid_a_renewal_leaves_nothing_of_it(residence):
    await residence.call("a")
    change(residence, "a", "2")
    gate, renewing = await held(residence, "load ta.u.a_232")
    await residence.house.unload("a")
    gate.open()
    await renewing
    await renewed(residence)
    residence.check()


async def test_the_renewal_of_a_model_that_was_evicted_leaves_its_next_load_alone(residence):
    await residence.call("a")
    change(residence, "a", "2")
    fetching = residence.steps.hold("fetch a")
    renewing = residence.house.begin(renewed(residence))
    await fetching.reached.wait()
    assert await residence.residency.eviction.evict(ModelId("a"), "room")
    calling = residence.house.begin(residence.call("a"))
    await asyncio.sleep(0)  # it waits for the fetch of the renewal
    fetching.open()
    await asyncio.gather(renewing, calling)
    await residence.residency.sweep()
    residence.check("a")


async def test_a_version_on_its_way_is_known_by_plain_characters(residence):
    await residence.call("a")
    change(residence, "a", 'W/"ce6e5db-12"')
    gate = residence.steps.hold("prepare")
    renewing = residence.house.begin(renewed(residence))
    await gate.reached.wait()
    assert {r.id for r in residence.control.registry.records()} == {"a", "a#Wce6e5db"}
    gate.open()
    await renewing


async def test_a_platform_s_load_that_has_waited_for_an_unload_that_failed_keeps_the_model(
    residence,
):
    await residence.call("a")
    gate = residence.steps.hold("unload a")
    residence.steps.fail("unload a", BackendTimeout("late"))
    unloading = residence.house.begin(residence.house.unload("a"))
    await gate.reached.wait()
    platform = residence.house.begin(_post(residence))
    await residence.house.turns()
    gate.open()
    with pytest.raises(BackendTimeout):
        await unloading
    await platform
    assert not residence.control.registry.get(ModelId("a")).is_on_demand
