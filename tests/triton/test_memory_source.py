"""A source that is set, and what every source has in common."""

import asyncio

import pytest

from adapter.control.ports import MemorySettings
from adapter.control.readings import Readings
from adapter.core.ledger import Ledger
from adapter.telemetry.metrics import Metrics
from tests.fakes.memory_place import GONE, RETRY, told
from tests.fakes.metrics_endpoint import MIB


@pytest.mark.parametrize(
    ("wanted", "source"), [("nvml", "nvml"), ("triton", "triton"), ("host", "host")]
)
async def test_a_source_that_is_set_is_taken(place, caplog, wanted, source):
    place.add_gpu()
    memory = place.choose(wanted)
    assert (await memory.read()).source == source
    assert told(caplog) == [("none", source, f"memory_source is {source}")]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("nvml", "NVML says: Driver Not Loaded"),
        ("triton", "Triton reports no GPU"),
        ("host", "no process of Triton runs"),
    ],
)
async def test_a_source_that_is_set_never_changes_over(place, caplog, wanted, reason):
    place.nvml.missing, place.pids = GONE, []
    memory = place.choose(wanted)
    for _ in range(2):
        assert await memory.read() is None
    assert told(caplog) == [("none", "none", reason)]


async def test_host_is_unknown_with_foreign_processes(place, caplog):
    assert await place.choose("host", is_embedded=False).read() is None
    assert told(caplog) == [("none", "none", "Triton's processes are not ours")]


async def test_off_reads_nothing_and_says_nothing(place, caplog):
    memory = place.choose("off")
    assert await memory.read() is None
    assert (memory.source, told(caplog), place.endpoint.asked) == ("none", [], 0)


async def test_nvml_alone_asks_for_labels_at_intervals(place):
    place.add_gpu("GPU-a", is_labelled=False)
    place.add_gpu("GPU-b", is_labelled=False)
    memory = place.choose("nvml")
    for _ in range(3):
        assert await memory.read() is None
    assert place.endpoint.asked == 1
    place.add_gpu("GPU-b", is_visible=False)
    place.now += RETRY
    for _ in range(2):
        assert set((await memory.read()).devices) == {"GPU-b"}
        place.now += RETRY
    assert place.endpoint.asked == 2


@pytest.mark.parametrize(("is_embedded", "kills"), [(True, 2), (False, None)])
async def test_embedded_servers_surroundings_are_reported_with_gpus(place, is_embedded, kills):
    place.add_gpu()
    reading = await place.choose("auto", is_embedded=is_embedded).read()
    assert reading.oom_kills == kills
    assert (reading.shm_free_bytes is None) == (kills is None)


async def test_callers_share_only_readings_begun_later(place):
    place.add_gpu()
    memory = place.choose("triton")
    place.endpoint.hold()
    early = asyncio.create_task(memory.read())
    await place.endpoint.reached.wait()
    late = [asyncio.create_task(memory.read()) for _ in range(10)]
    place.endpoint.opened.set()
    first = await early
    assert len({id(reading) for reading in await asyncio.gather(*late)}) == 1
    assert memory.last is not first
    assert place.endpoint.asked == 2


async def test_shared_reading_is_kept_once(place):
    """Otherwise loads that wait would soon push out what was read before one of them began: by that
    a failure is judged.
    """
    place.add_gpu()
    readings = Readings(place.choose("triton"), Ledger({}), MemorySettings(), Metrics())
    first = await readings.read()
    await asyncio.gather(*(readings.read() for _ in range(1000)))
    kept = readings.list_since(None)
    assert kept[0] is first
    assert len(kept) == 2


async def test_a_caller_that_is_cancelled_takes_nobody_along(place):
    place.add_gpu()
    memory = place.choose("triton")
    place.endpoint.hold()
    callers = [asyncio.create_task(memory.read()) for _ in range(2)]
    await place.endpoint.reached.wait()
    callers[0].cancel()
    place.endpoint.opened.set()
    assert (await callers[1]).used == {"GPU-a": 2 * MIB}
    assert callers[0].cancelled()
