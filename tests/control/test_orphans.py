"""What still runs though its model is gone: known by pid, ended, and nothing learned beside."""

import asyncio
import logging

import pytest
import pytest_asyncio

from adapter.control.orphans import OrphanProcesses
from adapter.control.ports import TimeLimits
from adapter.core.memory import HOST
from adapter.core.model import ModelId, ProcessId, TritonName
from adapter.core.state import ModelState
from adapter.errors import BackendTimeout, BackendUnavailable, LoadFailed, ModelNotFound
from tests.fakes.house import House

MIB = 2**20
M = ModelId("m")
FIRST, SECOND, STRANGER = ProcessId(11, 1), ProcessId(12, 2), ProcessId(13, 3)
# an unload has a tenth of a second for what computes
HASTY = TimeLimits(load=5, unload=0.2, stall=0, recovery=0.2, alone=5, linger=0, killed=0.02)


@pytest_asyncio.fixture
async def house():
    """1000 MiB, and a reader that sees who takes them."""
    house = House(1000 * MIB, HASTY)
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB}
    await house.open()
    yield house
    house.server.unkillable.clear()
    house.server.processes.clear()
    await house.close()


def metric(house: House, name: str) -> float:
    return house.metrics.registry.get_sample_value(name) or 0


def events(caplog, event: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.message == event]


async def load_with(house: House, *processes: ProcessId) -> None:
    await house.load("m")
    house.server.processes["m"] = set(processes)


async def test_a_process_that_outlives_its_model_is_killed_before_the_unload_ends(house, caplog):
    await load_with(house, FIRST, SECOND)
    await house.unload("m")
    assert set(house.server.killed) == {FIRST, SECOND}
    assert events(caplog, "model.processes_killed")[0].processes == [11, 12]
    assert metric(house, "triton_adapter_processes_killed_total") == 2
    house.check()


async def test_a_process_that_computes_is_killed_before_another_is_started(house):
    await load_with(house, FIRST)
    house.triton.stuck.add("m")
    gate = house.steps.hold("load m")
    unload = house.begin(house.unload("m"))
    await gate.reached.wait()
    assert house.server.killed == [FIRST]
    gate.open()
    await unload
    house.check()


async def test_the_first_process_is_looked_for_though_another_serves_under_its_name(house):
    """It is known by its pid: helping along gives Triton a second one, and says "gone" of that."""
    await load_with(house, FIRST)
    house.server.unkillable.add(FIRST)
    house.triton.stuck.add("m")
    with pytest.raises(BackendTimeout):
        await house.unload("m")
    assert house.triton.models == set()  # Triton says so
    assert house.state("m") is ModelState.UNLOADING


async def test_what_cannot_be_ended_is_504_and_the_model_goes_on_unloading(house, caplog):
    await load_with(house, FIRST)
    house.server.unkillable.add(FIRST)
    with pytest.raises(BackendTimeout, match="its unload goes on"):
        await house.unload("m")
    assert house.state("m") is ModelState.UNLOADING
    with pytest.raises(ModelNotFound):
        house.control.lease(M)
    assert house.held("m") == 300 * MIB
    (line,) = events(caplog, "model.left_running")
    assert (line.model_id, line.processes) == ("m", [11])
    assert metric(house, "triton_adapter_models_left_running") == 1

    house.server.processes["m"].clear()  # the kernel has let go of it
    await house.quiet()
    assert metric(house, "triton_adapter_models_left_running") == 0
    house.check()


async def test_a_failed_load_says_its_own_reason_though_a_process_is_left(house):
    house.server.processes["m"] = {FIRST}
    house.server.unkillable.add(FIRST)
    house.steps.fail("load m", LoadFailed("no weights"))
    with pytest.raises(LoadFailed, match="no weights"):
        await house.load("m")
    assert house.state("m") is None


async def test_where_no_process_can_be_seen_the_requests_in_flight_tell(house):
    """Helped along, Triton says "gone" of a model that has computed nothing."""
    await house.load("m")
    house.triton.stuck.add("m")
    lease = house.control.lease(M)
    lease.begin()
    lease.abandon()
    with pytest.raises(BackendTimeout, match="its unload goes on"):
        await house.unload("m")
    assert house.state("m") is ModelState.UNLOADING
    lease.end()
    await house.quiet()
    house.check()


async def test_requests_are_lost_once_no_process_is_left_that_could_answer_them(house, caplog):
    """Also one whose caller waits still; an answer that comes in spite of all changes nothing."""
    await load_with(house, FIRST)
    record = house.control.registry.get(M)
    house.triton.stuck.add("m")
    house.server.live["m"] = False
    left, waiting = house.control.lease(M), house.control.lease(M)
    left.begin()
    waiting.begin()
    left.abandon()
    await house.unload("m")
    (line,) = events(caplog, "model.requests_lost")
    assert (line.model_id, line.requests) == ("m", 2)
    assert events(caplog, "model.left_running") == []
    assert (left.is_lost(), waiting.is_lost()) == (True, True)
    assert house.held("m") == 0
    assert house.control.leases.begun == house.control.leases.ended == 2
    assert house.control.leases.abandoned == 1  # its connection is still there

    later = await house.load("m")
    waiting.abandon()
    for lease in (left, waiting):
        lease.end()
        assert not lease.is_lost()
    assert (later.usage.in_flight, later.usage.abandoned) == (0, 0)
    assert (record.usage.in_flight, record.usage.abandoned, record.usage.lost) == (0, 0, 0)
    assert house.control.leases.begun == house.control.leases.ended == 2
    assert house.control.leases.abandoned == 0
    house.check("m")


async def test_a_model_that_computes_within_triton_loses_no_request(house):
    """Of a backend without processes nobody can see that it has stopped to compute."""
    await house.load("m")
    house.triton.stuck.add("m")
    house.server.live["m"] = None
    lease = house.control.lease(M)
    lease.begin()
    with pytest.raises(BackendTimeout, match="its unload goes on"):
        await house.unload("m")
    assert (house.state("m"), lease.is_lost()) == (ModelState.UNLOADING, False)
    lease.end()
    await house.quiet()


async def test_what_still_computes_when_its_time_is_over_has_no_more_of_it():
    """The requests in flight were waited for; to stand still as well takes no further time."""
    limits = TimeLimits(load=5, unload=0.2, stall=77, recovery=0.2, alone=5, linger=0, killed=0.02)
    house = await House(limits=limits).open()
    await load_with(house, FIRST)
    house.triton.stuck.add("m")
    lease = house.control.lease(M)
    lease.begin()
    unload = house.begin(house.unload("m"))
    gate = house.steps.hold("load m")
    await gate.reached.wait()
    assert house.triton.waited[:2] == [1.0, 1.0]
    assert house.server.killed == [FIRST]
    lease.end()
    gate.open()
    await unload
    house.check()
    await house.close()


# -- nothing is learned meanwhile ---------------------------------------------------------------


async def test_no_size_is_learned_while_a_process_is_nobodys(house, caplog):
    house.server.processes["gone"] = {STRANGER}
    house.others = 50 * MIB
    await house.load("m")
    assert house.control.memory.sizes.as_dict()["packages"] == []
    assert metric(house, "triton_adapter_models_left_running") == 1
    assert [line.triton_names for line in events(caplog, "model.left_running")] == [["gone"]]

    await house.unload("m")
    house.server.processes.clear()
    await house.load("m")
    assert house.held("m") == 300 * MIB
    assert metric(house, "triton_adapter_models_left_running") == 0


async def test_no_baseline_is_taken_while_a_process_is_nobodys(house):
    await house.load("n")
    await house.unload("n")
    house.server.processes["gone"] = {STRANGER}
    house.others = 500 * MIB
    await house.load("m")
    assert house.control.memory.ledger.snapshot().devices[HOST].baseline_bytes == 0


async def test_no_growth_is_learned_while_a_process_is_nobodys(house):
    await house.load("m")
    await house.control.memory.tick({M})
    house.server.processes["gone"] = {STRANGER}
    house.others = 500 * MIB
    await house.control.memory.tick({M})
    await house.control.memory.tick({M})
    assert house.held("m") == 300 * MIB


async def test_processes_of_loaded_models_keep_nothing_from_being_learned(house):
    await load_with(house, FIRST)
    gate = house.steps.hold("load n")
    load = house.begin(house.load("n"))
    await gate.reached.wait()
    house.server.processes["n"] = {SECOND}
    gate.open()
    await load
    assert house.held("n") == 200 * MIB


async def test_the_process_of_a_model_that_is_unloaded_while_processes_are_listed_is_not_left(
    house,
):
    await load_with(house, FIRST)
    orphans = OrphanProcesses(house.control.registry, house.server, house.metrics)

    async def listed() -> frozenset[TritonName]:
        house.server.models = models
        house.server.processes.clear()
        await house.unload("m")
        return frozenset({TritonName("m")})

    models, house.server.models = house.server.models, listed
    assert not await orphans.are_there()
    assert house.listed() == []


async def test_nothing_is_learned_while_no_process_can_be_seen(house):
    async def unseen() -> frozenset[str]:
        raise BackendUnavailable("too many open files", delivered=False)

    house.server.models = unseen
    await house.load("m")
    assert house.control.memory.sizes.as_dict()["packages"] == []
    await asyncio.sleep(0)


# -- what has lost its model without an unload ----------------------------------------------------


async def test_an_abandoned_process_is_ended_at_the_second_look(house, caplog):
    """Between the two a load may start the next process of its model."""
    house.server.processes["m"] = {FIRST, SECOND}
    house.server.orphans = {FIRST}
    orphans = OrphanProcesses(house.control.registry, house.server, house.metrics)
    await orphans.end_abandoned()
    assert house.server.killed == []
    await orphans.end_abandoned()
    assert house.server.killed == [FIRST]
    assert events(caplog, "model.processes_killed")[0].processes == [11]
    assert metric(house, "triton_adapter_processes_killed_total") == 1


async def test_an_abandoned_process_that_is_a_models_again_is_left_alone(house):
    house.server.processes["m"] = {FIRST}
    orphans = OrphanProcesses(house.control.registry, house.server, house.metrics)
    for seen in ({FIRST}, set(), {FIRST}):
        house.server.orphans = seen
        await orphans.end_abandoned()
    assert house.server.killed == []


async def test_a_process_that_comes_up_while_the_others_are_ended_is_ended_too(house):
    await load_with(house, FIRST)
    killed = house.server.kill

    async def kill(known):
        found = await killed(known)
        if SECOND not in known:
            house.server.processes["m"].add(SECOND)
        return found

    house.server.kill = kill
    await house.unload("m")
    assert house.server.killed == [FIRST, SECOND]
