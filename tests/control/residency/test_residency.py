"""Calls load what they ask for: once for all who ask, and for the rest room is made."""

import asyncio
from dataclasses import replace

import pytest

from adapter.control import load_limit
from adapter.control.residency import Options
from adapter.core.artifacts import ArtifactKey, CacheUse
from adapter.core.model import ModelId
from adapter.core.residency.waiting import WaitLimits
from adapter.core.state import ModelState, WaitsFor
from adapter.errors import (
    AlreadyLoaded,
    ArtifactNotFound,
    BackendUnavailable,
    InsufficientMemory,
    LoadFailed,
    MemoryFigures,
    ModelNotFound,
    ModelNotReady,
    NoRoom,
    OutOfMemory,
    TooManyWaiting,
    was_not_started,
)
from adapter.runtime import clock
from tests.control.test_progress import until_waits
from tests.fakes.residence import Residence, at_once

pytestmark = pytest.mark.filterwarnings("error")


# -- one load for all who ask --------------------------------------------------------------------


async def test_a_call_fetches_and_loads_what_it_asks_for_and_the_next_finds_it_there(residence):
    assert await residence.call("a") is CacheUse.MISS
    assert await residence.call("a") is CacheUse.HIT
    residence.check("a")


async def test_all_who_ask_for_a_model_await_one_fetch_and_one_load(residence):
    assert await at_once(residence, *["a"] * 20) == [CacheUse.MISS] * 20
    assert (residence.artifacts.asked, residence.steps.seen.count("load a")) == (["a"], 1)
    assert residence.count("endpoint_requests_total", cache="miss") == 20


async def test_a_caller_who_leaves_stops_nothing(residence):
    gate = residence.steps.hold("load a")
    first, second = (residence.house.begin(residence.call("a")) for _ in range(2))
    await gate.reached.wait()
    first.cancel()
    gate.open()
    assert await second is CacheUse.MISS
    residence.check("a")


async def test_a_load_goes_on_when_its_last_caller_has_left(residence):
    gate = residence.steps.hold("fetch")
    caller = residence.house.begin(residence.call("a"))
    await gate.reached.wait()
    caller.cancel()
    gate.open()
    await residence.house.until_state("a", ModelState.READY)
    assert await residence.call("a") is CacheUse.HIT


async def test_a_model_that_takes_too_long_is_not_ready_and_its_load_goes_on(residence):
    residence.residency.options = Options(model_wait_seconds=0.01)
    gate = residence.steps.hold("load a")
    with pytest.raises(ModelNotReady, match=r"\(loading\): its load goes on, so try again"):
        await residence.call("a")
    gate.open()
    await residence.house.until_state("a", ModelState.READY)
    assert residence.residency.waits.count == 0


async def test_a_caller_too_many_is_refused_at_once(residence):
    limits = WaitLimits(in_all=3, for_one=2)
    other = await Residence(2, Options(limits=limits)).open("a", "b")
    gate, more = other.steps.hold("fetch a"), other.steps.hold("fetch b")
    calls = [other.house.begin(other.call(name)) for name in "aab"]
    await asyncio.gather(gate.reached.wait(), more.reached.wait())
    with pytest.raises(TooManyWaiting, match="2 callers wait for model 'a'") as caught:
        await other.call("a")
    assert caught.value.retry_after_ms == 1000
    with pytest.raises(TooManyWaiting, match="3 callers wait for models"):
        await other.call("b")
    gate.open()
    more.open()
    await asyncio.gather(*calls)
    await other.close()


async def test_no_more_loads_run_at_once_than_may(residence):
    gates = [residence.steps.hold(f"prepare /{name}") for name in "abc"]
    calls = [residence.house.begin(residence.call(name)) for name in "abc"]
    await asyncio.gather(gates[0].reached.wait(), gates[1].reached.wait())
    await residence.house.turns()
    assert not gates[2].reached.is_set()
    for gate in gates:
        gate.open()
    await asyncio.gather(*calls)


# -- room ------------------------------------------------------------------------------------------


async def test_the_least_recently_used_model_goes_when_there_is_no_room(residence):
    for name in "aba":
        await residence.call(name)
    assert await residence.call("c") is CacheUse.MISS
    residence.check("a", "c")
    assert residence.count("endpoint_evictions_total", **{"from": "memory", "reason": "room"}) == 1
    assert residence.steps.seen.count("prepare /c") == 1  # its files are looked at once


async def test_an_evicted_model_comes_back_from_disk(residence):
    for name in "abc":
        await residence.call(name)
    assert await residence.call("a") is CacheUse.DISK


async def test_a_model_with_a_request_in_flight_stays(residence):
    lease = await residence.hold("a")
    for name in "bc":
        await residence.call(name)
    residence.check("a", "c")
    lease.end()


async def test_a_caller_whose_time_is_up_while_all_is_busy_is_told_that_there_is_no_room(residence):
    leases = [await residence.hold(name) for name in "ab"]
    first = residence.house.begin(residence.call("c"))
    await residence.waits_for_room.wait()
    residence.residency.options = Options(model_wait_seconds=0.01)  # the load waits for longer
    with pytest.raises(NoRoom, match="all other models are in use"):
        await residence.call("c")
    for lease in leases:
        lease.end()
    await first


async def test_oom_alone_is_the_failure_of_the_model(residence):
    """A caller who tries again gets the same answer, as no other model holds memory."""
    residence.steps.fail("load a", OutOfMemory("MemoryError", model_id="a"))
    with pytest.raises(OutOfMemory, match="MemoryError; no other model is loaded"):
        await residence.call("a")
    assert residence.count("endpoint_no_room_total") == 0


async def test_callers_return_late_while_all_models_are_explicit(residence):
    for name in "xy":
        await residence.load(name)
    with pytest.raises(NoRoom, match="all other models are in use") as refused:
        await residence.call("c")
    assert refused.value.retry_after_ms == 60_000


async def test_a_load_that_got_room_and_waits_for_a_thread_of_triton_lacks_no_room():
    residence = await Residence(4).open(*"abc")
    house, leases = residence.house, [await residence.hold(name) for name in "ab"]
    gates = [residence.steps.hold(f"load {name}") for name in "xy"]
    loads = [house.begin(residence.load(name)) for name in "xy"]  # on every load thread
    await asyncio.gather(*(gate.reached.wait() for gate in gates))
    first = house.begin(residence.call("c"))
    await residence.waits_for_room.wait()
    leases.pop().end()
    await until_waits(house, "c", WaitsFor.THREAD)
    residence.residency.options = Options(model_wait_seconds=0.01)
    with pytest.raises(ModelNotReady, match="its load goes on"):
        await residence.call("c")
    for gate in gates:
        gate.open()
    await asyncio.gather(first, *loads)
    leases.pop().end()
    await residence.close()


async def test_a_load_that_is_tried_again_as_room_came_lacks_no_room(residence):
    leases = [await residence.hold(name) for name in "ab"]
    first = residence.house.begin(residence.call("c"))
    await residence.waits_for_room.wait()
    gate = residence.steps.hold("prepare /c")
    leases.pop().end()
    await gate.reached.wait()
    residence.residency.options = Options(model_wait_seconds=0.01)
    with pytest.raises(ModelNotReady, match="its load goes on"):
        await residence.call("c")
    gate.open()
    await first
    leases.pop().end()


async def test_the_memory_that_was_short_in_a_triton_that_has_ended_is_no_lack_of_room(residence):
    leases = [await residence.hold(name) for name in "ab"]
    first = residence.house.begin(residence.call("c"))
    await residence.waits_for_room.wait()
    residence.house.triton.models.clear()
    residence.house.triton.lives += 1
    residence.house.server.pid = 2
    residence.residency.options = Options(model_wait_seconds=0.01)
    with pytest.raises(ModelNotReady, match="its load goes on"):
        await residence.call("c")
    for lease in leases:
        lease.end()
    await residence.control.triton_restarted()
    await first
    residence.check("c")


async def test_a_call_whose_model_a_platform_fails_to_load_for_lack_of_memory_has_others_evicted(
    residence,
):
    """The platform is told 507, which no call of an endpoint is."""
    leases = [await residence.hold(name) for name in "ab"]
    gate = residence.steps.hold("prepare /own/c")
    platform = residence.house.begin(residence.load("c"))
    await gate.reached.wait()
    call = residence.house.begin(residence.call("c"))
    await residence.house.turns()
    gate.open()
    with pytest.raises(InsufficientMemory):
        await platform
    for lease in leases:
        lease.end()
    assert await call is CacheUse.MISS


async def test_amid_a_drain_nothing_is_fetched_for_a_model_that_would_not_be_loaded(residence):
    await residence.call("a")
    residence.control.close()
    assert await residence.call("a") is CacheUse.HIT
    with pytest.raises(BackendUnavailable) as raised:
        await residence.call("b")
    assert (was_not_started(raised.value), residence.artifacts.asked) == (True, ["a"])


async def test_a_load_waits_for_a_model_that_is_busy_only_now(residence):
    leases = [await residence.hold(name) for name in "ab"]
    call = residence.house.begin(residence.call("c"))
    await residence.waits_for_room.wait()
    leases[1].end()
    assert await call is CacheUse.MISS
    residence.check("a", "c")
    leases[0].end()


async def test_without_anything_that_could_go_there_is_no_room(residence):
    for name in "xy":
        await residence.load(name)
    with pytest.raises(NoRoom, match=r"needs 100\.0 MiB"):
        await residence.call("a")
    assert residence.count("endpoint_no_room_total") == 1
    residence.check("x", "y")


async def test_what_is_busy_for_long_is_no_room(residence):
    residence.residency._on_demand._room_seconds = 0.05
    leases = [await residence.hold(name) for name in "ab"]
    with pytest.raises(NoRoom):
        await residence.call("c")
    for lease in leases:
        lease.end()


async def test_what_loads_and_unloads_of_others_take_is_no_wait_for_room(monkeypatch):
    """Room for one, and each load takes longer than the wait for room, on a clock that a slow
    machine does not move.
    """
    now = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    residence = await Residence(1).open("a", "b", "c")
    residence.residency._on_demand._room_seconds = 0.05
    calls = []
    for name in "abc":
        gate = residence.steps.hold(f"load {name}")
        calls.append((residence.house.begin(residence.call(name)), gate))
    for _ in calls:
        gate = await first_reached(residence, [gate for _, gate in calls])
        now += 0.2
        gate.open()
    assert [await call for call, _ in calls] == [CacheUse.MISS] * 3
    await residence.close()


async def first_reached(residence, gates):
    """The gate that a step stands before, which is opened once."""
    async with asyncio.timeout(10):
        while True:
            for gate in gates:
                if gate.reached.is_set() and not gate.opened.is_set():
                    return gate
            await residence.house.turns()


async def test_calls_of_other_models_do_not_wait_for_loads_that_hang(monkeypatch):
    monkeypatch.setattr(load_limit, "_HANGS_SECONDS", 0.1)
    options = Options(model_wait_seconds=10, load_concurrency=1)
    residence = await Residence(2, options).open("a", "b")
    hanging = residence.steps.hold("load a")
    first = residence.house.begin(residence.call("a"))
    await asyncio.wait_for(hanging.reached.wait(), 5)
    residence.house.begin(residence.control.run_housekeeping())  # which reads memory
    assert await residence.call("b") is CacheUse.MISS
    hanging.open()
    assert await first is CacheUse.MISS
    residence.check("a", "b")
    await residence.close()


async def test_a_pinned_model_stays():
    residence = await Residence(2, Options(pin=("team/*", "a"))).open("a", "b", "c")
    for name in "abc":
        await residence.call(name)
    residence.check("a", "c")
    await residence.close()


async def test_triton_s_out_of_memory_evicts_one_model_after_the_other():
    residence = await Residence(9).open("a", "b", "c")
    for name in "ab":
        await residence.call(name)
    for _ in range(2):  # the load is tried a second time when memory has come back
        residence.steps.fail("load c", OutOfMemory("CUDA out of memory"))
    assert await residence.call("c") is CacheUse.MISS
    residence.check("b", "c")
    await residence.close()


async def test_for_more_than_the_device_has_nothing_goes():
    residence = await Residence(9).open("a", "b")
    for name in "ab":
        await residence.call(name)
    figures = MemoryFigures(needed_bytes=2**40, limit_bytes=2**30)
    error = OutOfMemory("cannot allocate 1 TiB", model_id="a", figures=figures)
    assert not await residence.residency.make_room(error)
    residence.check("a", "b")
    await residence.close()


async def test_for_a_load_that_runs_out_of_memory_and_nobody_waits_for_nothing_goes():
    residence = await Residence(9).open("a", "b", "c")
    for name in "ab":
        await residence.call(name)
    for _ in range(2):
        residence.steps.fail("load c", OutOfMemory("CUDA out of memory", model_id="c"))
    gate = residence.steps.hold("prepare /c")
    call = residence.house.begin(residence.call("c"))
    await gate.reached.wait()
    call.cancel()
    await asyncio.wait({call})
    gate.open()
    for _ in range(1000):
        if residence.state("c") is None and residence.residency.waits.get(ModelId("c")) is None:
            break
        await asyncio.sleep(0)
    residence.check("a", "b")
    await residence.close()


async def test_a_large_model_evicts_as_many_as_it_needs():
    residence = await Residence(3).open("a", "b", "c", "d")
    residence.have("d", 200 * 2**20)
    for name in "abcd":
        await residence.call(name)
    residence.check("c", "d")
    await residence.close()


async def test_a_model_that_was_loaded_for_callers_stays_until_they_have_their_leases():
    residence = await Residence(1).open("a", "b")
    await residence.call("a")
    waits = residence.residency.waits
    caller = waits.begin(ModelId("a"), ArtifactKey("", "a"))  # its turn has not come yet
    call = residence.house.begin(residence.call("b"))
    await residence.waits_for_room.wait()
    assert residence.house.listed() == ["a"]
    waits.end(caller)
    assert await call is CacheUse.MISS
    residence.check("b")
    await residence.close()


async def test_sixteen_callers_of_sixteen_models_get_through_room_for_one():
    names = [f"m{number}" for number in range(16)]
    residence = await Residence(1, Options(model_wait_seconds=20)).open(*names)
    assert await at_once(residence, *names) == [CacheUse.MISS] * 16
    assert sum(step.startswith("load ") for step in residence.steps.seen) == 16
    await residence.close()


# -- platforms beside it -------------------------------------------------------------------------


async def test_a_platform_s_load_evicts_before_it_is_refused(residence):
    for name in "ab":
        await residence.call(name)
    await residence.load("x")
    residence.check("b", "x")


async def test_what_a_platform_has_loaded_is_never_evicted(residence):
    await residence.load("x")
    for name in "abc":
        await residence.call(name)
    residence.check("c", "x")


async def test_a_model_that_a_platform_has_loaded_is_served_as_it_is(residence):
    await residence.load("a")
    assert await residence.call("a") is CacheUse.HIT
    assert residence.artifacts.asked == []


async def test_a_platform_that_loads_a_resident_model_keeps_it(residence):
    await residence.call("a")
    with pytest.raises(Exception, match="loaded already"):
        await residence.load("a")
    for name in "bc":
        await residence.call(name)
    assert residence.house.listed() == ["a", "c"]


async def test_a_call_waits_for_a_platform_s_load_of_its_model(residence):
    gate = residence.steps.hold("load a")
    load = residence.house.begin(residence.load("a"))
    await gate.reached.wait()
    call = residence.house.begin(residence.call("a"))
    await residence.house.turns()
    gate.open()
    assert await call is CacheUse.HIT
    await load


async def test_a_caller_may_unload_a_model_and_the_next_call_finds_it_on_disk(residence):
    await residence.call("a")
    await residence.house.unload("a")
    residence.house.check()
    assert await residence.call("a") is CacheUse.DISK


async def test_a_call_amid_somebody_s_unload_waits_for_its_end_without_turning_round(
    residence, monkeypatch
):
    await residence.call("a")
    gate = residence.steps.hold("unload a")
    unload = residence.house.begin(residence.house.unload("a"))
    await gate.reached.wait()
    tasks, begin = [], residence.residency._begin
    monkeypatch.setattr(
        residence.residency, "_begin", lambda e: tasks.append(begin(e)) or tasks[-1]
    )
    call = residence.house.begin(residence.call("a"))
    await residence.house.turns()
    assert len(tasks) == 1
    gate.open()
    assert await call is CacheUse.DISK
    await unload


async def test_the_files_of_a_model_that_somebody_unloaded_may_leave_the_disk(residence):
    await residence.call("a")
    await residence.house.unload("a")
    residence.check()
    assert residence.state("a") is None


# -- idle ----------------------------------------------------------------------------------------


async def test_a_model_that_nobody_calls_is_unloaded_and_stays_on_disk():
    options = Options(idle_unload_seconds=0.01, pin=("b",))
    residence = await Residence(3, options).open("a", "b", "c")
    for name in "ab":
        await residence.call(name)
    lease = await residence.hold("c")
    await asyncio.sleep(0.02)
    await residence.residency.eviction.unload_idle()
    residence.check("b", "c")
    lease.end()
    assert await residence.call("a") is CacheUse.DISK
    await residence.close()


async def test_idle_models_are_unloaded_one_after_the_other():
    """Triton 2.51 was seen to abort while two were unloaded at once beside a load."""
    residence = await Residence(3, Options(idle_unload_seconds=0.01)).open("a", "b")
    for name in "ab":
        await residence.call(name)
    gate = residence.steps.hold("unload a")
    await asyncio.sleep(0.02)
    unloading = asyncio.create_task(residence.residency.eviction.unload_idle())
    await gate.reached.wait()
    await residence.house.turns()
    assert "unload b" not in residence.steps.seen
    gate.open()
    await unloading
    residence.check()
    await residence.close()


async def test_a_model_that_is_called_while_another_idle_one_is_unloaded_stays():
    residence = await Residence(3, Options(idle_unload_seconds=0.01)).open("a", "b")
    for name in "ab":
        await residence.call(name)
    gate = residence.steps.hold("unload a")
    await asyncio.sleep(0.02)
    unloading = asyncio.create_task(residence.residency.eviction.unload_idle())
    await gate.reached.wait()
    await residence.call("b")
    gate.open()
    await unloading
    residence.check("b")
    await residence.close()


# -- explicit loads ---------------------------------------------------------------------------


async def test_a_model_of_the_store_that_is_loaded_by_name_is_not_evicted(residence):
    assert await residence.residency.load(ModelId("a"))
    for name in "bc":
        await residence.call(name)
    residence.check("a", "c")


async def test_a_forced_load_of_a_model_of_the_store_takes_the_version_that_is_there_now(residence):
    await residence.call("a")
    residence.artifacts.versions["a"] = "2"
    residence.house.packages.declared["/a@2"] = 100 * 2**20
    assert await residence.residency.load(ModelId("a"))
    assert residence.control.registry.get(ModelId("a")).source.url == "/a"
    assert await residence.residency.load(ModelId("a"), is_forced=True)
    assert residence.control.registry.get(ModelId("a")).source.url == "/a@2"
    assert len(residence.house.triton.models) == 1
    assert +residence.artifacts.pins == {"/a@2": 1}


@pytest.mark.parametrize("is_beside", [True, False])
async def test_failed_forced_load_leaves_the_old_version(is_beside):
    residence = await Residence(2).open("a")
    await residence.call("a")
    residence.control.registry.get(ModelId("a")).can_be_doubled = is_beside
    residence.artifacts.versions["a"] = "2"
    residence.house.packages.declared["/a@2"] = 100 * 2**20
    residence.steps.fail("load", LoadFailed("no such luck", model_id="a"))
    with pytest.raises(LoadFailed, match="no such luck"):
        await residence.residency.load(ModelId("a"), is_forced=True)
    assert residence.control.registry.get(ModelId("a")).source.url == "/a"
    residence.check("a")
    assert await residence.call("a") is CacheUse.HIT
    assert await residence.residency.load(ModelId("a"), is_forced=True)
    assert residence.control.registry.get(ModelId("a")).source.url == "/a@2"
    assert len(residence.house.triton.models) == 1
    assert +residence.artifacts.pins == {"/a@2": 1}
    await residence.close()


async def test_a_load_by_a_name_that_no_store_has_is_nobody_s(residence):
    assert not await residence.residency.load(ModelId("nothing"))


# -- by name alone -----------------------------------------------------------------------------


async def test_a_name_is_looked_for_in_the_store_with_the_suffixes_of_archives(residence):
    residence.have("digits.tar.gz")
    lease = await residence.residency.wait_for_named(ModelId("digits"), 1)
    assert lease.record.id == "digits"
    assert residence.artifacts.asked == ["digits.tar.gz"]


async def test_of_a_name_that_no_store_has_it_is_said_that_the_store_was_asked(residence):
    with pytest.raises(ArtifactNotFound, match=r"'nothing' is not loaded.* no such key: nothing"):
        await residence.residency.wait_for_named(ModelId("nothing"), 1)


async def test_a_name_that_cannot_be_a_key_is_not_loaded(residence):
    with pytest.raises(ModelNotFound):
        await residence.residency.wait_for_named(ModelId("../secrets"), 1)
    assert not [step for step in residence.steps.seen if step.startswith("find")]


async def test_a_named_endpoint_has_its_own_store(residence):
    residence.residency._stores = ("", "blue")
    residence.artifacts.have("blue/a")
    assert await residence.residency.find(ModelId("blue/a")) == ArtifactKey("blue", "a")
    assert await residence.residency.find(ModelId("a")) == ArtifactKey("", "a")


# -- room on disk, which the cache asks for ------------------------------------------------------


async def test_the_model_that_goes_for_room_on_disk_is_the_least_recently_used(residence):
    for name in "aba":
        await residence.call(name)
    disk = residence.residency.eviction
    assert await disk.unload_one(1)
    residence.check("a")
    assert await disk.unload_one(1)
    assert not await disk.unload_one(1)
    assert not disk.can_unload
    assert residence.count("endpoint_evictions_total", **{"from": "memory", "reason": "disk"}) == 2


@pytest.mark.parametrize(
    ("missing", "who"), [(1, "a"), (10, "a"), (11, "c"), (80, "c"), (81, "a"), (500, "a")]
)
async def test_for_room_on_disk_a_small_model_stays_where_a_large_one_is_enough(
    residence, missing, who
):
    for name in "ac":
        await residence.call(name)
    files = residence.control.registry.get(ModelId("c")).files
    files.artifact = replace(files.artifact, size_bytes=80)
    assert await residence.residency.eviction.unload_one(missing)
    assert residence.house.listed() == [name for name in "ac" if name != who]


async def test_a_model_in_flight_does_not_go_for_room_on_disk_but_may_later(residence):
    lease = await residence.hold("a")
    disk = residence.residency.eviction
    assert not await disk.unload_one(1)
    assert (disk.can_unload, disk.bytes_that_stay()) == (True, 0)
    lease.end()
    assert await disk.unload_one(1)


async def test_a_model_that_waits_for_its_load_may_give_room_on_disk_later(residence):
    gate = residence.steps.hold("load a")
    call = residence.house.begin(residence.call("a"))
    await gate.reached.wait()
    assert residence.residency.eviction.can_unload
    gate.open()
    await call


@pytest.mark.parametrize("is_waited_for", [False, True])
async def test_what_a_platform_asks_for_amid_a_first_load_it_keeps_however_often_that_is_tried(
    residence, is_waited_for
):
    """The load runs out of memory and is tried again: at once, or when there is room."""
    leases = [await residence.hold(name) for name in "ab"] if is_waited_for else []
    gate = residence.steps.hold("load c" if not is_waited_for else "prepare /c")
    call = residence.house.begin(residence.call("c"))
    await gate.reached.wait()
    with pytest.raises(AlreadyLoaded):
        await residence.load("c")
    if not is_waited_for:
        await residence.call("a")  # what can go
        residence.steps.fail("load c", OutOfMemory("CUDA out of memory"))
    gate.open()
    if is_waited_for:
        await residence.waits_for_room.wait()
    for lease in leases:
        lease.end()
    assert await call is CacheUse.MISS
    assert residence.steps.seen.count("prepare /c") == 2
    assert not residence.control.registry.get(ModelId("c")).is_on_demand


async def test_pinned_models_and_those_of_platforms_never_go_for_room_on_disk():
    residence = await Residence(3, Options(pin=("a",))).open("a", "b")
    for name in "ab":
        await residence.call(name)
    residence.control.registry.get(ModelId("b")).is_on_demand = False
    disk = residence.residency.eviction
    assert not await disk.unload_one(1)
    assert (disk.can_unload, disk.bytes_that_stay()) == (False, 20)
    await residence.close()
