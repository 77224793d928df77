"""Which source is believed when the choice is ours: GPUs over the host, and NVML first."""

import pynvml
import pytest

from adapter.core.memory import HOST
from tests.fakes.memory_place import GONE, RETRY, told
from tests.fakes.metrics_endpoint import MIB
from tests.fakes.nvml import FakeGpu


async def test_nvml_goes_first(place, caplog):
    place.add_gpu()
    memory = place.choose("auto")
    assert memory.source == "none"
    reading = await memory.read()
    assert (reading.used, reading.source, memory.source) == ({"GPU-a": MIB}, "nvml", "nvml")
    assert memory.last is reading
    await memory.read()
    assert told(caplog) == [("none", "nvml", "NVML answers")]
    assert place.endpoint.asked == 1


async def test_nvml_is_tried_every_5_seconds(place):
    place.add_gpu(is_visible=False)
    place.nvml.missing = GONE
    memory = place.choose("auto")
    for _ in range(3):
        assert (await memory.read()).source == "triton"
    assert place.nvml.inits == 1
    place.now += RETRY
    await memory.read()
    assert place.nvml.inits == 2


async def test_gpus_are_never_exchanged_for_the_host(place, caplog):
    place.add_gpu()
    memory = place.choose("auto")
    await memory.read()
    place.lose_nvml()
    await place.endpoint.stop()
    for _ in range(2):
        assert await memory.read() is None
        place.now += RETRY
    assert (memory.source, memory.last) == ("none", None)
    (_, change) = told(caplog)
    assert change[:2] == ("nvml", "none")
    assert change[2].startswith("nvml: NVML says: Uninitialized; triton: the metrics endpoint")


async def test_troubled_driver_does_not_mean_no_gpus(place):
    place.nvml.missing = pynvml.NVMLError_Unknown()
    assert await place.choose("auto").read() is None


async def test_host_is_read_where_no_gpu_is(place, caplog):
    place.nvml.missing = GONE
    memory = place.choose("auto")
    reading = await memory.read()
    assert (reading.used, memory.source) == ({HOST: 100 * 1024}, "host")
    place.nvml.missing = None
    place.add_gpu()
    place.now += RETRY
    assert (await memory.read()).source == "host"
    assert place.endpoint.asked == 1
    place.pids = []
    assert await memory.read() is None
    assert told(caplog) == [
        ("none", "host", "no GPU is seen: NVML says: Driver Not Loaded"),
        ("host", "none", "no process of Triton runs"),
    ]


async def test_while_the_server_is_down_nothing_is_settled(place):
    place.nvml.missing, place.pids = GONE, []
    memory = place.choose("auto")
    assert await memory.read() is None
    place.add_gpu(is_visible=False)
    assert (await memory.read()).source == "triton"


async def test_nothing_is_known_of_foreign_processes_without_gpus(place):
    place.nvml.missing = GONE
    assert await place.choose("auto", is_embedded=False).read() is None


async def test_replacement_source_must_have_the_same_devices(place, caplog):
    """One of them sees an instance (MIG) and the other the whole GPU."""
    place.add_gpu("GPU-a")
    (gpu,) = place.nvml.gpus
    gpu.error = pynvml.NVMLError_NoPermission()
    gpu.slices = [FakeGpu("MIG-1")]
    memory = place.choose("auto")
    assert set((await memory.read()).devices) == {"MIG-1"}
    place.lose_nvml()
    assert await memory.read() is None
    assert told(caplog)[-1][2] == ("nvml: NVML says: Uninitialized; triton: it names other devices")


async def test_nvml_keeps_the_names_of_devices(place, caplog):
    place.add_gpu("GPU-a")
    (gpu,) = place.nvml.gpus
    gpu.slices = [FakeGpu("MIG-1")]
    place.nvml.missing = GONE
    memory = place.choose("auto")
    assert (await memory.read()).source == "triton"
    place.nvml.missing, gpu.error = None, pynvml.NVMLError_NoPermission()
    place.now += RETRY
    assert (await memory.read()).source == "triton"


async def test_returning_source_may_have_other_devices(place):
    place.add_gpu("GPU-a", is_visible=False)
    place.nvml.missing = GONE
    memory = place.choose("auto")
    await memory.read()
    place.endpoint.total, place.endpoint.used = {}, {}
    assert await memory.read() is None
    place.add_gpu("GPU-b", is_visible=False)
    assert set((await memory.read()).devices) == {"GPU-b"}


def warned(caplog):
    return [r.reason for r in caplog.records if r.message == "memory.gpu_unread"]


async def test_unread_gpu_is_warned_of_once(place, caplog):
    place.add_gpu(is_labelled=False)
    (gpu,) = place.nvml.gpus
    gpu.error = pynvml.NVMLError_NoPermission()
    memory = place.choose("auto")
    await memory.read()
    await memory.read()
    assert memory.is_gpu_unread
    (reason,) = warned(caplog)
    assert reason.startswith("nvml: NVML says: Insufficient Permissions; triton: ")
    gpu.error = None
    place.now += RETRY
    await memory.read()
    assert not memory.is_gpu_unread
    gpu.error = pynvml.NVMLError_NoPermission()
    await memory.read()
    assert memory.is_gpu_unread
    assert len(warned(caplog)) == 2


@pytest.mark.parametrize(("source", "has_gpu"), [("auto", False), ("off", True), ("host", True)])
async def test_gpus_are_not_missed_where_unread(place, caplog, source, has_gpu):
    if has_gpu:
        place.add_gpu()
    memory = place.choose(source)
    await memory.read()
    assert not memory.is_gpu_unread
    assert warned(caplog) == []


async def test_impossible_metrics_are_not_believed(place):
    place.nvml.missing = GONE
    place.endpoint.total, place.endpoint.used = {"GPU-a": MIB}, {"GPU-a": 2 * MIB}
    memory = place.choose("auto")
    assert await memory.read() is None
    assert memory.is_gpu_unread
