"""What each load is found to take, and what is learned of it."""

import asyncio

import pytest

from adapter.core.model import ModelId
from adapter.errors import BackendError, BackendUnavailable, LoadFailed
from adapter.runtime import clock
from tests.control.memory.steps import MIB, M, begin_load, begin_unload, declare, learned, sample


async def test_a_load_alone_is_measured_and_held(house):
    await house.load("m")
    assert house.held("m") == 300 * MIB
    assert house.control.memory.accounts.is_measured(M)
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


async def test_a_share_below_what_is_declared_is_held_and_the_next_load_needs_what_is_declared(
    house,
):
    declare(house, a=100, b=300)
    house.sizes |= {"a": 100 * MIB, "b": 100 * MIB}
    begun = [await begin_load(house, name) for name in "ab"]
    for gate, task in begun:
        gate.open()
        await task
    assert (house.held("a"), house.held("b")) == (50 * MIB, 150 * MIB)
    await house.unload("a")
    gate, load = await begin_load(house, "a")
    assert house.control.memory.ledger.snapshot().reserved_bytes == 100 * MIB
    gate.open()
    await load


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


async def test_what_a_load_gives_back_that_fails_at_its_very_end_is_not_missing_from_another(house):
    """Its model was loaded and measured before the other load began."""
    declare(house, a=300, b=400)
    confirming = house.steps.hold("confirm a")
    house.steps.fail("confirm a", BackendError("disk full"))
    load_a = house.begin(house.load("a"))
    await confirming.reached.wait()
    gate_b, load_b = await begin_load(house, "b")
    confirming.open()
    with pytest.raises(BackendError):
        await load_a
    gate_b.open()
    await load_b
    assert house.held("b") == 400 * MIB


async def test_a_model_that_ended_with_triton_before_it_was_measured_does_not_take_nothing(house):
    declare(house, a=150, b=100)
    (gate_a, load_a), (gate_b, load_b) = [await begin_load(house, name) for name in "ab"]
    gate_a.open()
    await load_a
    house.sizes["a"] = 0  # Triton ends
    house.steps.fail("load b", BackendUnavailable("Socket closed", delivered=True))
    gate_b.open()
    with pytest.raises(BackendUnavailable):
        await load_b
    assert learned(house, "a") is None


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
    name = "triton_adapter_memory_prediction_ratio"
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
        before = clock.monotonic()
        await asyncio.sleep(1)
        gate, task = await begin(house, "a")
        asked = clock.monotonic()
        await asyncio.sleep(1)
        gate.open()
        await task
        assert before < house.memory.changes[-1] <= asked


async def test_requests_that_an_unload_waits_for_are_no_part_of_it(house):
    declare(house, a=100)
    await house.load("a")
    with house.control.lease(ModelId("a")):
        unload = house.begin(house.unload("a"))
        await house.turns()
        answered = clock.monotonic()
    await unload
    assert house.memory.changes[-1] >= answered


async def test_nobody_knows_since_when_a_model_has_been_gone_that_vanished(house):
    declare(house, a=100)
    await house.load("a")
    house.triton.models.clear()
    await house.control.reconcile()
    assert len(house.memory.changes) == 1
