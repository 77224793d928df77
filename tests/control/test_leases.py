"""What holds a model in place: calls, also those that nobody waits for any more."""

import asyncio
import logging

import pytest

from adapter.control import lease as leasing
from adapter.control.lease import LeaseState
from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import InferenceFailed, ModelNotFound, StubDied
from adapter.telemetry.traffic import WAITED, Waited, add_waited
from tests.fakes.house import House

M = ModelId("m")


@pytest.fixture
async def house():
    house = await House().open()
    record = await house.load("m")
    yield house
    assert (record.usage.in_flight, record.usage.abandoned) == (0, 0)
    assert house.control.leases.abandoned == 0
    await house.close()


def counts(house: House) -> tuple[int, int]:
    record = house.control.registry.get(M)
    return record.usage.in_flight, record.usage.abandoned


async def waited_for(caplog, event: str) -> logging.LogRecord:
    async with asyncio.timeout(30):
        while not (found := [one for one in caplog.records if one.message == event]):  # noqa: ASYNC110 - the log tells nobody
            await asyncio.sleep(0.01)
    return found[0]


async def test_a_block_that_is_left_ends_the_lease_whatever_it_is_left_by(house):
    for error in (None, InferenceFailed("no"), KeyboardInterrupt()):
        lease = house.control.lease(M)
        try:
            with lease as record:
                assert (record.usage.in_flight, lease.state) == (1, LeaseState.HELD)
                if error is not None:
                    raise error
        except (InferenceFailed, KeyboardInterrupt):
            pass
        assert (counts(house), lease.state) == ((0, 0), LeaseState.ENDED)


async def test_a_call_that_waits_for_a_load_says_nothing_of_the_adapters_own_time(house):
    async def served() -> float | None:
        WAITED.set(waited := Waited())
        with await house.control.wait_for_lease(ModelId("n"), 30):
            add_waited(0.5)  # for Triton
        return waited.seconds

    gate = house.steps.hold("load n")
    loading = house.begin(house.load("n"))
    await gate.reached.wait()
    waiting = asyncio.create_task(served())
    await asyncio.sleep(0)
    gate.open()
    await loading
    assert await waiting is None
    assert await asyncio.create_task(served()) == 0.5


async def test_a_lease_ends_once(house):
    first, second = house.control.lease(M), house.control.lease(M)
    first.begin()
    second.begin()
    for _ in range(3):
        first.end()
        assert counts(house) == (1, 0)
    second.abandon()
    for _ in range(3):
        second.end()
        first.abandon()
        assert counts(house) == (0, 0)


async def test_who_was_left_by_its_caller_is_in_flight_until_it_ends(house):
    lease = house.control.lease(M)
    lease.begin()
    lease.abandon()
    lease.abandon()
    lease.__exit__(TimeoutError, TimeoutError(), None)
    assert counts(house) == (1, 1)
    assert house.control.leases.abandoned == 1
    lease.end()
    assert counts(house) == (0, 0)


async def test_an_unload_waits_for_what_nobody_else_waits_for(house):
    lease = house.control.lease(M)
    with lease:
        lease.abandon()
    unload = house.begin(house.unload("m"))
    await house.until_state("m", ModelState.UNLOADING)
    await house.turns()
    assert not unload.done()
    assert house.triton.models == {"m"}
    lease.end()
    await unload
    house.check()


async def test_an_unload_that_waits_for_requests_says_for_how_many_and_how_long(
    house, caplog, monkeypatch
):
    monkeypatch.setattr(leasing, "_SILENT_SECONDS", 0.01)
    caplog.set_level(logging.INFO)
    calls = [house.control.lease(M) for _ in range(3)]
    for call in calls:
        call.begin()
    calls[0].abandon()
    unload = house.begin(house.unload("m"))
    told = await waited_for(caplog, "model.unload_waits")
    assert (told.model_id, told.in_flight, told.abandoned, told.seconds) == ("m", 3, 1, 4.99)
    for call in calls:
        call.end()
    await unload
    house.check()
    assert "model.drain_timed_out" not in [record.message for record in caplog.records]


async def test_an_unload_of_a_model_without_requests_waits_for_none(house, caplog):
    caplog.set_level(logging.INFO)
    await house.unload("m")
    assert [record.message for record in caplog.records] == [
        "model.unloading",
        "model.unloaded",
    ]


async def test_the_end_of_an_abandoned_call_still_tells_that_its_process_died(house):
    lease = house.control.lease(M)
    with lease:
        lease.abandon()
    house.server.live["m"] = False
    lease.end(StubDied("gone", model_id="m"))
    await house.until_state("m", ModelState.DEAD)
    with pytest.raises(ModelNotFound, match="lost its process"):
        house.control.lease(M)


async def test_a_call_of_an_earlier_model_of_that_name_ends_no_wait_of_the_later_one(house):
    """Triton lost the first one; that its calls are over as well is seen a little later."""
    old = house.control.lease(M)
    old.begin()
    house.triton.models.clear()
    await house.control.reconcile()
    await house.load("m")
    new = house.control.lease(M)
    new.begin()
    unload = house.begin(house.unload("m"))
    await house.until_state("m", ModelState.UNLOADING)
    old.end()
    await house.turns()
    assert not unload.done()
    new.end()
    await unload


async def test_who_still_sends_a_request_is_refused_and_not_waited_for(house):
    lease = house.control.lease(M)
    lease.begin()
    lease.arrives(lambda: lease.end() and None)
    await asyncio.wait_for(house.unload("m"), 3)  # a drain may take five seconds


async def test_a_lease_that_has_ended_waits_for_its_caller_no_more(house):
    lease = house.control.lease(M)
    lease.begin()
    lease.arrives(lambda: None)
    lease.end()
    lease.arrives(lambda: None)
    assert house.control.leases.arriving == {}
