"""GPU memory from a driver of the test's making, with the real errors of pynvml."""

import threading

import pynvml
import pytest

from adapter.triton.memory.nvml import NvmlMemory
from tests.fakes.nvml import FakeGpu, FakeNvml

SEVERAL = "several GPUs are visible and Triton's metrics do not say which are its own"


def reader(nvml, *uuids, **options):
    return NvmlMemory(lambda: uuids, library=nvml, **options)


async def test_what_is_not_free_is_used():
    memory = reader(FakeNvml(FakeGpu("GPU-a", total=1000, free=300)), "GPU-a")
    reading = await memory.read()
    assert reading.used == {"GPU-a": 700}
    assert reading.devices["GPU-a"].limit_bytes == 1000
    assert (reading.source, reading.lag_seconds) == ("nvml", 0)
    assert (memory.why, memory.has_gpus) == ("", True)


async def test_without_labels_several_gpus_are_unknown():
    memory = reader(FakeNvml(FakeGpu("GPU-a"), FakeGpu("GPU-b")))
    assert await memory.read() is None
    assert (memory.why, memory.has_gpus) == (SEVERAL, True)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (pynvml.NVMLError_LibraryNotFound(), "NVML says: NVML Shared Library Not Found"),
        (pynvml.NVMLError_DriverNotLoaded(), "NVML says: Driver Not Loaded"),
        (None, "no GPU is visible"),
    ],
    ids=["no library", "no driver", "no GPU"],
)
async def test_without_a_driver_there_are_no_gpus(error, reason):
    nvml = FakeNvml()
    nvml.missing = error
    memory = reader(nvml)
    assert await memory.read() is None
    assert (memory.why, memory.has_gpus) == (reason, False)


async def test_other_failures_leave_gpus_open():
    nvml = FakeNvml()
    nvml.missing = pynvml.NVMLError_LibRmVersionMismatch()
    memory = reader(nvml)
    assert await memory.read() is None
    assert memory.why == "NVML says: RM has detected an NVML/RM version mismatch."
    assert memory.has_gpus is None


async def test_seen_gpus_are_remembered_without_a_driver():
    nvml = FakeNvml(FakeGpu("GPU-a"))
    memory = reader(nvml)
    await memory.read()
    nvml.reload()
    await memory.read()
    nvml.missing = pynvml.NVMLError_DriverNotLoaded()
    assert await memory.read() is None
    assert (memory.why, memory.has_gpus) == ("NVML says: Driver Not Loaded", True)


async def test_invisible_label_makes_all_unknown():
    memory = reader(FakeNvml(FakeGpu("GPU-a")), "GPU-a", "GPU-x")
    assert await memory.read() is None
    assert memory.why == "NVML says: Not Found"


async def test_driver_is_opened_once_per_load():
    nvml = FakeNvml(FakeGpu("GPU-a"))
    memory = reader(nvml)
    await memory.read()
    await memory.read()
    assert nvml.inits == 1
    nvml.reload()
    assert await memory.read() is None
    assert memory.why == "NVML says: Uninitialized"
    assert (await memory.read()).used == {"GPU-a": 0}
    assert nvml.inits == 2


@pytest.mark.parametrize(
    "error", [pynvml.NVMLError_NoPermission(), pynvml.NVMLError_NotSupported()]
)
async def test_denied_gpu_is_read_by_instances(error):
    slices = [None, FakeGpu("MIG-1", total=100, free=60), FakeGpu("MIG-2", total=50, free=50)]
    whole = FakeGpu("GPU-a", error=error, slices=slices)
    reading = await reader(FakeNvml(whole), "GPU-a").read()
    assert reading.used == {"MIG-1": 40, "MIG-2": 0}


def machine(root, limit=None):
    """A machine of 8000 kB, of which 5000 are in use."""
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text("MemTotal: 8000 kB\nMemFree: 9 kB\nMemAvailable: 3000 kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(str(limit * 1024))
    return root


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, (8000, 5000)), (6000, (6000, 5000)), (4000, (4000, 4000))]
)
async def test_unified_memory_is_the_machines(tmp_path, limit, expected):
    whole = FakeGpu("GPU-a", error=pynvml.NVMLError_NotSupported())
    memory = reader(FakeNvml(whole), "GPU-a", root=machine(tmp_path, limit))
    read = (await memory.read()).devices["GPU-a"]
    assert (read.limit_bytes, read.used_bytes) == tuple(count * 1024 for count in expected)


async def test_unified_memory_needs_no_instances(tmp_path):
    whole = FakeGpu("GPU-a", error=pynvml.NVMLError_NotSupported(), has_mig=False)
    reading = await reader(FakeNvml(whole), root=machine(tmp_path)).read()
    assert reading.used == {"GPU-a": 5000 * 1024}


async def test_mig_gpu_without_instance_is_not_unified(tmp_path):
    whole = FakeGpu("GPU-a", error=pynvml.NVMLError_NotSupported(), slices=[None])
    memory = reader(FakeNvml(whole), "GPU-a", root=machine(tmp_path))
    assert await memory.read() is None
    assert memory.why == "NVML says: Not Supported"


async def test_more_used_than_there_is_is_not_believed():
    gpu = FakeGpu("GPU-a", total=4096, free=8192)
    memory = reader(FakeNvml(gpu), "GPU-a")
    assert await memory.read() is None
    assert memory.why == "GPU-a cannot have -4.0 KiB of 4.0 KiB in use"
    gpu.free = 1024
    assert (await memory.read()).used == {"GPU-a": 3072}


async def test_changed_total_is_not_believed():
    gpu = FakeGpu("GPU-a", total=4096, free=4096)
    memory = reader(FakeNvml(gpu), "GPU-a")
    await memory.read()
    gpu.total = 8192
    assert await memory.read() is None
    assert memory.why == "the total of GPU-a was 4.0 KiB and is 8.0 KiB"
    gpu.total = 4096
    assert await memory.read() is not None


async def test_hanging_driver_costs_its_limit_once():
    nvml = FakeNvml(FakeGpu("GPU-a"))
    nvml.runs.clear()
    memory = reader(nvml, timeout_seconds=0.05)
    assert await memory.read() is None
    assert memory.why == "the driver has not answered within 0.05 s"
    patient = memory.read()
    with pytest.raises(StopIteration) as ended:  # it does not wait at all
        patient.send(None)
    assert ended.value.value is None
    assert nvml.inits == 1
    nvml.runs.set()
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join(10)
    memory._timeout = 60
    assert (await memory.read()).used == {"GPU-a": 0}
    assert (memory.why, nvml.inits) == ("", 1)


async def test_bug_is_no_unknown_figure():
    nvml = FakeNvml(FakeGpu("GPU-a", total=None))
    with pytest.raises(TypeError):
        await reader(nvml).read()
