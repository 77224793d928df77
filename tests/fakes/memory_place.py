"""Where Triton runs: GPUs, metrics on a real port, and processes, all of the test's making."""

from pathlib import Path
from typing import Literal

import pynvml
import pytest

from adapter.triton.memory.host import HostMemory
from adapter.triton.memory.metrics_page import TritonMetrics
from adapter.triton.memory.nvml import NvmlMemory
from adapter.triton.memory.sources import ChosenMemory
from tests.fakes.metrics_endpoint import MIB, MetricsEndpoint
from tests.fakes.nvml import FakeGpu, FakeNvml

Source = Literal["auto", "nvml", "triton", "host", "off"]
RETRY = 5.0
GONE = pynvml.NVMLError_DriverNotLoaded()


class Place:
    """`now` is what the clock says. It starts with one process, without GPUs, and closed."""

    def __init__(self, root: Path) -> None:
        self.now = 1000.0
        self.endpoint = MetricsEndpoint()
        self.nvml = FakeNvml()
        self.pids = [7]
        for path, text in {
            "proc/7/statm": "9 3 1 0 0 0 0",
            "proc/7/smaps_rollup": "Pss: 100 kB",
            "sys/fs/cgroup/memory.events": "oom_kill 2",
            "dev/shm/region": "",
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        self.host = HostMemory(lambda: self.pids, 1000, root=root)
        self.metrics = TritonMetrics(lambda: self.endpoint.address)

    def add_gpu(
        self, uuid: str = "GPU-a", *, is_labelled: bool = True, is_visible: bool = True
    ) -> None:
        """In the driver with 1 MiB used, and in the metrics with 2."""
        if is_visible:
            self.nvml.gpus.append(FakeGpu(uuid, total=100 * MIB, free=99 * MIB))
        if is_labelled:
            self.endpoint.total[uuid], self.endpoint.used[uuid] = 100 * MIB, 2 * MIB

    def lose_nvml(self) -> None:
        self.nvml.reload()
        self.nvml.missing = GONE

    async def close(self) -> None:
        self.endpoint.opened.set()
        await self.metrics.close()
        await self.endpoint.stop()

    def choose(self, wanted: Source, *, is_embedded: bool = True) -> ChosenMemory:
        return ChosenMemory(
            wanted,
            self.host if is_embedded else None,
            self.metrics,
            NvmlMemory(lambda: self.metrics.uuids, library=self.nvml),
            clock=lambda: self.now,
        )


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    """The changes of source that were logged: from, to, and why."""
    return [
        (given["was"], given["source"], given["reason"])
        for given in map(vars, caplog.records)
        if given["message"] == "memory.source"
    ]
