"""A gauge that shows changes late measures nothing that it cannot know."""

import asyncio

import pytest

from adapter.core.memory import HOST
from adapter.errors import (
    LoadFailed,
)
from tests.control.memory.steps import (
    MIB,
    M,
    N,
    begin_load,
    declare,
    learned,
    measured,
)
from tests.fakes.house import House


async def test_with_a_gauge_that_lags_a_load_is_answered_at_once_and_measured_later(house):
    house.memory.lag = 0.2
    house.packages.declared["/m"] = 111 * MIB
    await house.load("m")
    assert house.held("m") == 111 * MIB
    assert not house.control.memory.accounts.is_measured(M)
    reading = house.steps.hold("read")
    await asyncio.wait_for(reading.reached.wait(), 5)
    reading.open()
    await house.turns()
    assert house.control.memory.accounts.is_measured(M)
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
    assert not house.control.memory.accounts.is_measured(M)
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


async def read_by_the_watch(house: House) -> None:
    gate = house.steps.hold("read")
    await gate.reached.wait()
    gate.open()
    await house.turns()


async def test_growth_that_a_gauge_shows_late_is_not_charged_to_who_has_requests_by_then(house):
    for name in "mn":
        await house.load(name)
    freeze(house, at=500, lag=0.5)
    house.begin(house.control.run_housekeeping())
    await read_by_the_watch(house)
    for name in (M, N):
        with house.control.lease(name):
            house.sizes["m"] = 340 * MIB
        await read_by_the_watch(house)
        house.memory.frozen = None
    assert house.control.memory.readings.last.used == {HOST: 540 * MIB}
    assert (house.held("m"), house.held("n")) == (300 * MIB, 200 * MIB)
