"""Loads and unloads against memory: who is let in and when, and what each is found to take."""

import asyncio
import time

import pytest
import pytest_asyncio

from adapter.control.ports import TimeLimits
from adapter.core.memory import HOST
from adapter.core.model import ModelId
from adapter.errors import InsufficientMemory, LoadFailed, MemoryFigures, ModelTooLarge, OutOfMemory
from tests.fakes.house import House

MIB = 2**20
M, N = ModelId("m"), ModelId("n")


def room(limits: TimeLimits | None = None) -> House:
    """1000 MiB, and a reader that sees who takes them."""
    house = House(1000 * MIB, limits) if limits else House(1000 * MIB)
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB}
    return house


@pytest_asyncio.fixture
async def house():
    house = await room().open()
    yield house
    await house.close()


@pytest_asyncio.fixture
async def hasty():
    """Nobody waits for long."""
    house = await room(TimeLimits(load=10, unload=10, stall=5, recovery=0.4, alone=0.4)).open()
    yield house
    await house.close()


def declare(house: House, **mib: int) -> None:
    """What the packages say and what the models then take."""
    house.packages.declared |= {f"/{name}": count * MIB for name, count in mib.items()}
    house.sizes |= {name: count * MIB for name, count in mib.items()}


async def begin_load(house: House, name: str):
    """A load that has got as far as Triton."""
    gate = house.steps.hold(f"load {name}")
    task = house.begin(house.load(name))
    await asyncio.wait_for(gate.reached.wait(), 5)
    return gate, task


async def begin_unload(house: House, name: str):
    gate = house.steps.hold(f"unload {name}")
    task = house.begin(house.unload(name))
    await asyncio.wait_for(gate.reached.wait(), 5)
    return gate, task


async def measured(house: House, *names: str) -> None:
    """All loads have been measured that were answered before."""
    await asyncio.wait_for(asyncio.gather(*house.control.memory._measurements), 5)
    assert all(house.control.memory.is_measured(ModelId(name)) for name in names)


def sample(house: House, name: str, **labels: str) -> float | None:
    return house.metrics.registry.get_sample_value(name, labels)


def learned(house: House, name: str) -> int | None:
    return house.control.memory.sizes.of_url(f"/{name}")


# -- one after the other, or side by side -------------------------------------------------------


async def test_a_load_of_unknown_footprint_waits_until_no_other_is_under_way(house):
    gate, first = await begin_load(house, "m")
    second = house.begin(house.load("n"))
    await house.turns()
    assert "place n" not in house.steps.seen
    gate.open()
    await asyncio.gather(first, second)
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_a_known_load_waits_for_an_unknown_one(house):
    declare(house, a=100)
    gate, first = await begin_load(house, "m")
    second = house.begin(house.load("a"))
    await house.turns()
    assert "place a" not in house.steps.seen
    gate.open()
    await asyncio.gather(first, second)


async def test_known_loads_go_side_by_side(house):
    declare(house, a=400, b=400)
    begun = [await begin_load(house, name) for name in "ab"]
    assert house.control.memory.ledger.snapshot().reserved_bytes == 800 * MIB
    for gate, _ in begun:
        gate.open()
    await asyncio.gather(*(task for _, task in begun))
    house.check("a", "b")


async def test_known_loads_go_side_by_side_only_up_to_their_sum(house):
    declare(house, a=400, b=400, c=400)
    (gate_a, load_a), (gate_b, load_b) = [await begin_load(house, name) for name in "ab"]
    third = house.begin(house.load("c"))
    await house.turns()
    assert "place c" not in house.steps.seen
    house.steps.fail("load b", LoadFailed("no weights"))
    gate_b.open()
    with pytest.raises(LoadFailed):
        await load_b
    await third
    gate_a.open()
    await load_a
    house.check("a", "c")


async def test_who_waits_is_not_overtaken_by_who_would_fit(house):
    declare(house, a=500, b=700, c=100)
    gate, first = await begin_load(house, "a")
    second = house.begin(house.load("b"))
    await house.turns()
    third = house.begin(house.load("c"))
    await house.turns()
    assert "prepare /c" in house.steps.seen
    assert "place c" not in house.steps.seen
    house.steps.fail("load a", LoadFailed("no weights"))
    gate.open()
    await asyncio.gather(first, second, third, return_exceptions=True)
    seen = house.steps.seen
    assert seen.index("place b") < seen.index("place c")
    house.check("b", "c")


async def test_nobody_waits_for_long_to_run_alone_not_even_behind_another(hasty):
    hasty.sizes |= {"k": 10 * MIB}
    begun = time.monotonic()
    gate, first = await begin_load(hasty, "m")
    await asyncio.wait_for(asyncio.gather(hasty.load("n"), hasty.load("k")), 5)
    assert time.monotonic() - begun < 3
    assert not first.done()
    gate.open()
    await first
    hasty.check("k", "m", "n")


async def test_nobody_waits_for_long_behind_one_who_waits_for_memory():
    limits = TimeLimits(load=10, unload=10, stall=5, recovery=5, alone=0.2)
    house = await room(limits).open()
    await house.load("m")
    declare(house, big=900, small=10)
    gate, unload = await begin_unload(house, "m")
    big = house.begin(house.load("big"))
    await house.turns()
    await asyncio.wait_for(house.load("small"), 3)
    assert not big.done()
    gate.open()
    await asyncio.gather(unload, big)
    house.check("big", "small")
    await house.close()


async def test_without_a_reader_unknown_loads_do_not_wait():
    house = await House().open()
    gate, first = await begin_load(house, "m")
    await asyncio.wait_for(house.load("n"), 1)
    gate.open()
    await first
    await house.close()


async def test_loads_side_by_side_do_not_share_the_same_free_bytes(hasty):
    await hasty.load("m")
    declare(hasty, a=400, b=400)
    both = (hasty.begin(hasty.load("a")), hasty.begin(hasty.load("b")))
    done = await asyncio.gather(*both, return_exceptions=True)
    assert [type(d).__name__ for d in done] == ["ModelRecord", "InsufficientMemory"]


# -- what does not fit --------------------------------------------------------------------------


async def test_what_does_not_fit_is_refused_before_anything_is_touched(house):
    await house.load("m")
    declare(house, big=701)
    house.steps.seen.clear()
    with pytest.raises(InsufficientMemory) as caught:
        await house.load("big")
    assert caught.value.figures == MemoryFigures(701 * MIB, 700 * MIB, 1000 * MIB, HOST)
    assert house.steps.seen == ["prepare /big", "read", "remove big"]
    house.check("m")
    await house.unload("m")
    await house.load("big")


async def test_a_refusal_is_counted_apart(house):
    await house.load("m")
    declare(house, big=900)
    with pytest.raises(InsufficientMemory):
        await house.load("big")
    assert sample(house, "adapter_oom_total", phase="refused", pattern="") == 1
    assert sample(house, "adapter_oom_total", phase="load", pattern="") is None
    labels = {"operation": "load", "outcome": "InsufficientMemory"}
    assert sample(house, "adapter_operations_total", **labels) == 1


async def test_where_nothing_else_is_loaded_what_does_not_fit_is_tried(house):
    declare(house, big=900)
    house.others, house.sizes["big"] = 500 * MIB, 400 * MIB
    await house.load("big")
    house.check("big")


async def test_what_is_larger_than_all_memory_is_too_large_and_no_refusal(house):
    declare(house, big=1001)
    with pytest.raises(ModelTooLarge) as caught:
        await house.load("big")
    assert caught.value.figures == MemoryFigures(1001 * MIB, None, 1000 * MIB, HOST)
    house.check()


async def test_a_load_that_does_not_fit_waits_for_the_unload_that_makes_room(house):
    await house.load("m")
    declare(house, big=900)
    gate, unload = await begin_unload(house, "m")
    load = house.begin(house.load("big"))
    await house.turns()
    assert not load.done()
    assert "place big" not in house.steps.seen
    gate.open()
    await asyncio.gather(unload, load)
    house.check("big")


async def test_an_unload_that_makes_too_little_room_ends_in_a_refusal(house):
    await house.load("m")
    await house.load("n")
    declare(house, big=900)
    gate, unload = await begin_unload(house, "n")
    load = house.begin(house.load("big"))
    await house.turns()
    gate.open()
    await unload
    with pytest.raises(InsufficientMemory):
        await asyncio.wait_for(load, 5)
    house.check("m")


async def test_an_unload_that_takes_its_time_is_not_waited_for_longer_than_the_limit(hasty):
    await hasty.load("m")
    declare(hasty, big=900)
    gate, unload = await begin_unload(hasty, "m")
    with pytest.raises(InsufficientMemory):
        await asyncio.wait_for(hasty.load("big"), 5)
    assert not unload.done()
    gate.open()
    await unload


# -- measured -----------------------------------------------------------------------------------


async def test_a_load_alone_is_measured_and_held(house):
    await house.load("m")
    assert house.held("m") == 300 * MIB
    assert house.control.memory.is_measured(M)
    assert house.control.memory.sizes.is_exact("/m")
    await house.unload("m")
    house.check()


async def test_what_was_learned_is_reserved_the_next_time(house):
    await house.load("m")
    await house.unload("m")
    gate, load = await begin_load(house, "m")
    assert house.control.memory.ledger.snapshot().reserved_bytes == 300 * MIB
    gate.open()
    await load


async def test_loads_side_by_side_get_their_shares_of_what_both_took(house):
    declare(house, a=100, b=300)
    house.sizes |= {"a": 120 * MIB, "b": 480 * MIB}
    begun = [await begin_load(house, name) for name in "ab"]
    for gate, task in begun:
        gate.open()
        await task
    assert (house.held("a"), house.held("b")) == (150 * MIB, 450 * MIB)
    assert not house.control.memory.sizes.is_exact("/a")


async def test_a_share_is_no_figure_to_reckon_another_share_with(house):
    declare(house, a=100, b=300, c=100)
    house.sizes |= {"a": 120 * MIB, "b": 480 * MIB}
    for names in ("ab", "ac"):
        begun = [await begin_load(house, name) for name in names]
        for gate, task in begun:
            gate.open()
            await task
        if names == "ab":
            await house.unload("a")
            await house.unload("b")
    assert (house.held("a"), house.held("c")) == (132 * MIB, 88 * MIB)  # 220, as 150 to 100


async def test_an_exact_figure_replaces_a_share_and_no_share_an_exact_figure(house):
    declare(house, a=100, b=300)
    house.sizes |= {"a": 120 * MIB, "b": 480 * MIB}
    for side_by_side in (True, False, True):
        begun = [await begin_load(house, "a")]
        if not side_by_side:
            begun[0][0].open()
            await begun[0][1]
        begun.append(await begin_load(house, "b"))
        for gate, task in begun:
            gate.open()
            await task
        known = learned(house, "a")
        await house.unload("a")
        await house.unload("b")
    assert known == 120 * MIB
    assert learned(house, "b") == 480 * MIB


@pytest.mark.parametrize("ends_first", ["load", "unload"])
@pytest.mark.slow
async def test_a_load_beside_an_unload_is_measured_when_both_have_ended(house, ends_first):
    await house.load("n")
    house.packages.declared["/m"] = 111 * MIB
    load_gate, load = await begin_load(house, "m")
    unload_gate, unload = await begin_unload(house, "n")
    ends = [(load_gate, load), (unload_gate, unload)]
    for gate, task in ends if ends_first == "load" else reversed(ends):
        gate.open()
        await task
    assert house.held("m") == 300 * MIB
    assert not house.control.memory.sizes.is_exact("/m")


async def test_a_load_beside_one_that_fails_is_measured_when_that_has_ended(house):
    declare(house, a=100, b=100)
    house.sizes["a"] = 150 * MIB
    (gate_a, load_a), (gate_b, load_b) = [await begin_load(house, name) for name in "ab"]
    gate_a.open()
    await load_a
    assert house.held("a") == 100 * MIB
    house.steps.fail("load b", LoadFailed("no weights"))
    gate_b.open()
    with pytest.raises(LoadFailed):
        await load_b
    assert house.held("a") == 150 * MIB
    assert not house.control.memory.sizes.is_exact("/a")
    house.check("a")


async def test_memory_that_was_back_before_the_load_began_is_not_the_loads(house):
    """Triton has let go, and the unload has still to clear away: no quiet moment to start at."""
    await house.load("n")
    house.packages.declared["/m"] = 111 * MIB
    clearing = house.steps.hold("remove n")
    unload = house.begin(house.unload("n"))
    await clearing.reached.wait()
    gate, load = await begin_load(house, "m")
    clearing.open()
    await unload
    gate.open()
    await load
    assert house.held("m") == 300 * MIB


async def test_an_operation_that_begins_while_memory_is_read_puts_the_measuring_off(house):
    declare(house, a=100)
    house.packages.declared["/m"] = 111 * MIB
    gate, load = await begin_load(house, "m")
    reading = house.steps.hold("read")
    gate.open()
    await reading.reached.wait()
    other_gate, other = await begin_load(house, "a")
    reading.open()
    await load
    assert house.held("m") == 111 * MIB
    other_gate.open()
    await other
    assert house.held("m") + house.held("a") == 400 * MIB


async def test_memory_that_shrank_during_a_load_is_no_negative_size(house):
    house.others = 400 * MIB
    gate, load = await begin_load(house, "m")
    house.others = 0
    gate.open()
    await load
    assert house.held("m") == 0


async def test_what_others_take_before_the_first_load_is_nobodys(house):
    house.others = 50 * MIB
    await house.load("m")
    assert house.held("m") == 300 * MIB
    assert house.control.memory.ledger.snapshot().baseline_bytes == 50 * MIB


async def test_how_wrong_a_prediction_was_is_counted_by_what_it_stood_on(house):
    house.packages.declared["/m"] = 600 * MIB
    await house.load("m")
    await house.unload("m")
    await house.load("m")
    await house.load("n")  # predicted by nobody
    name = "adapter_memory_prediction_ratio"
    assert sample(house, f"{name}_sum", basis="declared") == 2
    assert sample(house, f"{name}_sum", basis="learned") == 1
    assert sample(house, f"{name}_count", basis="default") is None


async def test_the_reader_is_told_of_changes_that_it_must_show(house):
    declare(house, tiny=9, large=11)
    await house.load("tiny")
    assert house.memory.changes == []
    await house.load("large")
    assert len(house.memory.changes) == 1
    await house.unload("large")
    assert len(house.memory.changes) == 2
    await house.unload("tiny")
    await house.load("m")
    assert len(house.memory.changes) == 2  # no size was known
    await house.unload("m")
    await house.load("m")
    assert len(house.memory.changes) == 4


async def test_the_reader_is_told_since_when_triton_was_at_it(house):
    declare(house, a=100)
    for begin in (begin_load, begin_unload):
        before = time.monotonic()
        gate, task = await begin(house, "a")
        asked = time.monotonic()
        gate.open()
        await task
        assert before < house.memory.changes[-1] <= asked


async def test_requests_that_an_unload_waits_for_are_no_part_of_it(house):
    declare(house, a=100)
    await house.load("a")
    with house.control.lease(ModelId("a")):
        unload = house.begin(house.unload("a"))
        await house.turns()
        answered = time.monotonic()
    await unload
    assert house.memory.changes[-1] >= answered


async def test_nobody_knows_since_when_a_model_has_been_gone_that_vanished(house):
    declare(house, a=100)
    await house.load("a")
    house.triton.models.clear()
    await house.control.reconcile()
    assert len(house.memory.changes) == 1


# -- a gauge that lags --------------------------------------------------------------------------


async def test_with_a_gauge_that_lags_a_load_is_answered_at_once_and_measured_later(house):
    house.memory.lag = 0.2
    house.packages.declared["/m"] = 111 * MIB
    await house.load("m")
    assert house.held("m") == 111 * MIB
    assert not house.control.memory.is_measured(M)
    reading = house.steps.hold("read")
    await asyncio.wait_for(reading.reached.wait(), 5)
    reading.open()
    await house.turns()
    assert house.control.memory.is_measured(M)
    assert house.held("m") == 300 * MIB
    house.check("m")


async def test_a_model_that_is_not_measured_yet_can_be_unloaded_and_loaded_again(house):
    house.memory.lag = 0.2
    house.packages.declared["/m"] = 111 * MIB
    before = asyncio.all_tasks()
    await house.load("m")
    (measuring,) = asyncio.all_tasks() - before
    await house.unload("m")
    gate, load = await begin_load(house, "m")
    await measuring
    assert not house.control.memory.is_measured(M)
    gate.open()
    await load
    await measured(house, "m")
    assert house.held("m") == 111 * MIB  # too soon after the unload to tell
    house.check("m")


async def test_a_figure_that_may_be_older_than_the_last_unload_refuses_nothing(house):
    await house.load("m")
    await house.load("n")
    house.memory.lag = 0.3
    declare(house, big=700)
    house.others = 300 * MIB  # the gauge goes on showing m
    await house.unload("m")
    load = house.begin(house.load("big"))
    await house.turns()
    assert not load.done()
    house.others = 0
    await load
    house.check("big", "n")


def freeze(house: House, *, at: int, lag: float = 60) -> None:
    """The gauge goes on showing `at` MiB, and by its own account may be as late as `lag`."""
    house.memory.frozen, house.memory.lag = at * MIB, lag


async def test_a_load_is_not_measured_from_figures_older_than_the_change_before(house):
    """Of the one before nothing is shown yet, so its memory would seem to be this one's."""
    declare(house, a=100)
    house.sizes["a"] = 150 * MIB
    await house.load("m")
    freeze(house, at=0, lag=0.4)
    gate, load = await begin_load(house, "a")
    house.memory.frozen = None
    gate.open()
    await load
    await measured(house, "a")
    assert house.held("a") == 100 * MIB
    assert learned(house, "a") is None


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.slow
async def test_figures_of_before_an_unload_or_a_failure_measure_nothing(house, fails):
    declare(house, a=100)
    house.sizes["a"] = 150 * MIB
    if fails:
        house.steps.fail("load m", LoadFailed("no weights"))
        with pytest.raises(LoadFailed):
            await house.load("m")
    else:
        house.memory.lag = 0.4
        await house.load("m")
        await measured(house, "m")  # the load is long ago
        await house.unload("m")
    freeze(house, at=30, lag=0.4)
    gate, load = await begin_load(house, "a")
    house.memory.frozen = None
    gate.open()
    await load
    await measured(house, "a")
    assert (house.held("a"), learned(house, "a")) == (100 * MIB, None)
    assert house.control.memory.ledger.snapshot().baseline_bytes == 0


async def test_a_load_in_due_time_after_the_change_before_is_measured(house):
    house.memory.lag = 0.1
    await house.load("m")
    await measured(house, "m")
    await house.load("n")
    await measured(house, "n")
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_a_gauge_in_doubt_measures_nothing_and_is_no_baseline(house):
    declare(house, a=100)
    house.sizes["a"] = 150 * MIB
    house.memory.is_in_doubt = True
    house.others = 50 * MIB
    await house.load("a")
    assert (house.held("a"), learned(house, "a")) == (100 * MIB, None)
    await house.control.memory.rebase()
    assert house.control.memory.ledger.snapshot().baseline_bytes == 0


async def test_a_gauge_that_comes_into_doubt_with_the_load_measures_nothing(house):
    declare(house, a=100)
    house.sizes["a"] = 150 * MIB
    gate, load = await begin_load(house, "a")
    house.memory.is_in_doubt = True
    gate.open()
    await load
    assert (house.held("a"), learned(house, "a")) == (100 * MIB, None)


async def test_what_a_gauge_in_doubt_has_no_room_for_waits(house):
    declare(house, a=400, b=400)
    await house.load("a")
    house.memory.frozen, house.memory.is_in_doubt = 800 * MIB, True
    load = house.begin(house.load("b"))
    await house.turns()
    assert not load.done()
    house.memory.limit_bytes = None  # the reader finds that it is frozen
    await load
    house.check("a", "b")


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_nothing_at_all_is_not_believed_of_a_load_by_a_gauge_that_lags(house, names):
    declare(house, a=100, b=100)
    house.memory.lag, house.memory.frozen = 0.1, 0
    begun = [await begin_load(house, name) for name in names]
    for gate, task in begun:
        gate.open()
        await task
    await measured(house, *names)
    assert [(house.held(name), learned(house, name)) for name in names] == [
        (100 * MIB, None) for _ in names
    ]


async def test_little_is_believed_by_a_gauge_that_lags_and_nothing_where_little_was_expected(house):
    declare(house, a=100, tiny=9)
    house.sizes |= {"a": MIB, "tiny": 0}
    house.memory.lag = 0.1
    for name in ("a", "tiny"):
        await house.load(name)
        await measured(house, name)
    assert (learned(house, "a"), learned(house, "tiny")) == (MIB, 0)


async def test_that_nothing_was_taken_is_believed_by_a_reader_that_does_not_lag(house):
    declare(house, a=100)
    house.sizes["a"] = 0
    await house.load("a")
    assert learned(house, "a") == 0


@pytest.mark.slow
async def test_a_model_whose_size_was_only_supposed_need_not_be_seen_to_go(house):
    house.control.memory.sizes.default_bytes = 100 * MIB
    house.memory.lag, house.memory.frozen = 0.1, 0
    await house.load("a")
    await measured(house, "a")
    assert house.held("a") == 100 * MIB
    await house.unload("a")
    assert house.memory.changes == []


async def test_what_a_gauge_shows_too_late_is_no_growth(house):
    await house.load("m")
    freeze(house, at=300)
    await house.load("n")
    await house.unload("n")
    await house.control.memory.tick({M})
    house.memory.frozen = 340 * MIB
    await house.control.memory.tick({M})
    assert house.held("m") == 300 * MIB


# -- growth under traffic -----------------------------------------------------------------------


async def test_a_model_that_grows_under_traffic_of_its_own_is_held_to_its_peak(house):
    await house.load("m")
    await house.load("n")
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB
    assert learned(house, "m") == 340 * MIB
    house.sizes["m"] -= 40 * MIB
    await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB


async def test_to_grow_again_to_what_it_was_before_is_no_new_peak(house):
    await house.load("m")
    await house.control.memory.tick({M})
    for change in (40, -40, 40, -40, 40):
        house.sizes["m"] += change * MIB
        await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB


async def test_a_model_loaded_anew_grows_from_what_it_takes_and_not_from_its_peak(house):
    await house.load("m")
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    await house.unload("m")
    house.sizes["m"] -= 40 * MIB
    await house.load("m")
    assert house.held("m") == 340 * MIB  # it may grow to that again
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    assert house.held("m") == 340 * MIB


@pytest.mark.parametrize("active", [set(), {M, N}])
async def test_growth_that_nobody_can_be_told_of_is_nobodys(house, active):
    await house.load("m")
    await house.load("n")
    await house.control.memory.tick({M})
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick(active)
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_growth_beside_an_operation_is_nobodys(house):
    await house.load("m")
    await house.control.memory.tick({M})
    gate, load = await begin_load(house, "n")
    house.sizes["m"] += 40 * MIB
    await house.control.memory.tick({M})
    gate.open()
    await load
    await house.control.memory.tick({M})
    assert house.held("m") == 300 * MIB


async def test_what_a_load_between_two_looks_took_is_no_growth(house):
    await house.load("m")
    await house.control.memory.tick({M})
    await house.load("n")
    await house.control.memory.tick({M})
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


async def test_what_a_load_during_a_look_took_is_no_growth(house):
    await house.load("m")
    await house.control.memory.tick({M})
    reading = house.steps.hold("read")
    look = house.begin(house.control.memory.tick({M}))
    await reading.reached.wait()
    await house.load("n")
    reading.open()
    await look
    await house.control.memory.tick({M})
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)


# -- what is said of a failure ------------------------------------------------------------------


async def test_out_of_memory_is_told_with_what_ledger_and_reader_know(house):
    await house.load("n")
    house.packages.declared["/m"] = 500 * MIB
    cause = ValueError("grpc")
    text = "CUDA out of memory"
    failure = OutOfMemory(text, model_id="m", matched=text, pattern="torch")
    failure.__cause__ = cause
    house.steps.fail("load m", failure)
    with pytest.raises(OutOfMemory) as caught:
        await house.load("m")
    assert caught.value.figures == MemoryFigures(500 * MIB, 300 * MIB, 1000 * MIB, HOST)
    assert caught.value.matched == text
    assert caught.value.__cause__ is cause
    assert sample(house, "adapter_oom_total", phase="load", pattern="torch") == 1
    house.check("n")


async def test_figures_that_the_failure_itself_named_are_kept(house):
    failure = OutOfMemory("full", figures=MemoryFigures(7, 8, 9, "GPU-1"))
    found = await house.control.diagnosis.judged(failure, M)
    assert found.figures == MemoryFigures(7, 8, 9, "GPU-1")


async def test_a_failure_that_says_zero_bytes_are_free_is_believed(house):
    failure = OutOfMemory("full", figures=MemoryFigures(free_bytes=0))
    found = await house.control.diagnosis.judged(failure, M)
    assert found.figures == MemoryFigures(None, 0, 1000 * MIB, HOST)


async def test_where_nothing_is_known_the_figures_say_so():
    house = await House().open()
    found = await house.control.diagnosis.judged(OutOfMemory("full"), M)
    assert found.figures == MemoryFigures()
    assert await house.control.memory.read() is None
    await house.close()


async def test_a_model_of_before_memory_could_be_read_is_unloaded_once_it_can():
    house = House(memory_limit=1000 * MIB)
    declare(house, m=300, n=200)
    await house.open()
    await house.load("m")
    assert house.held("m") == 300 * MIB
    house.memory.limit_bytes = 2000 * MIB
    await house.unload("m")
    await house.load("n")
    house.check("n")
    await house.close()
