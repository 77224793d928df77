"""Chooses by which reader memory is read: of Triton's GPUs, or of its processes on the host."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from adapter.core.memory import HOST, MemoryReading
from adapter.runtime import clock
from adapter.triton.memory.host import HostMemory, models_limit_bytes
from adapter.triton.memory.metrics_page import TritonMetrics
from adapter.triton.memory.nvml import NvmlMemory
from adapter.triton.server.server import EmbeddedTriton

log = logging.getLogger(__name__)

Wanted = Literal["auto", "nvml", "triton", "host", "off"]

_NONE = "none"
_RETRY_SECONDS = 5.0


class ChosenMemory:
    """Chooses among the memory readers, and switches over when one fails or appears.

    With auto, NVML and Triton's metrics are two views of the same GPUs, and NVML, which never lags,
    takes precedence. Host memory is read only if there is no GPU, and that is decided once: the
    ledger of one kind of device is wrong for the other.
    """

    def __init__(
        self,
        wanted: Wanted,
        host: HostMemory | None,  # None without an embedded Triton
        metrics: TritonMetrics,
        nvml: NvmlMemory,
        *,
        clock: Callable[[], float] = clock.now,
    ) -> None:
        self.last: MemoryReading | None = None
        self.source = _NONE  # or nvml, triton, host
        self._wanted = wanted
        self._host = host
        self._metrics = metrics
        self._nvml = nvml
        self._clock = clock
        self._lock = asyncio.Lock()
        self._current: asyncio.Task[MemoryReading | None] | None = None
        self._next: asyncio.Task[MemoryReading | None] | None = None
        self._logged: str | None = None
        self._last_of_gpus: MemoryReading | None = None
        self._is_host = False  # whether auto has decided for host memory
        self._has_warned = False
        self._nvml_due = clock()  # when NVML, which has failed, is asked again
        self._page_due = self._nvml_due  # when the metrics are asked again for UUIDs

    async def read(self) -> MemoryReading | None:
        """Return a reading that begins after this call; None if nothing can be read.

        Waiting callers share the next reading, not the one in progress: that may be older than a
        caller's last change.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._take(), name="memory-reading")
        return await asyncio.shield(self._next)

    @property
    def is_gpu_unread(self) -> bool:
        """Return whether a GPU is visible and nothing is read, though it should be."""
        is_seen = bool(self._nvml.has_gpus or self._metrics.uuids)
        return is_seen and self._wanted != "off" and self.source == _NONE

    async def close(self) -> None:
        """Close the connection to Triton's metrics."""
        await self._metrics.close()

    async def _take(self) -> MemoryReading | None:
        """Take a reading for all that wait for it, once the earlier one is there."""
        async with self._lock:
            self._current = self._next
            self._next = None
            reading = await self._poll()
            if reading is not None and reading.source != HOST and self._host is not None:
                container = self._host.container_stats()
                reading = replace(
                    reading,
                    shm_free_bytes=container.shm_free_bytes,
                    oom_kills=container.oom_kills,
                )
            self.last = reading
            self._log_source(_NONE if reading is None else reading.source)
            return reading

    async def _poll(self) -> MemoryReading | None:
        """Read by the source of the setting."""
        match self._wanted:
            case "auto":
                return await self._choose()
            case "nvml":
                await self._learn_uuids()
                return await self._nvml.read()
            case "triton":
                return await self._metrics.read()
            case "host":
                await self._poll_gpus()
                return await self._host.read() if self._host else None
            case "off":
                return None

    async def _learn_uuids(self) -> None:
        """Read the UUIDs of Triton's GPUs, which NVML alone does not know, from its metrics."""
        if not self._metrics.uuids and self._clock() >= self._page_due:
            await self._metrics.read()
            self._page_due = self._clock() + _RETRY_SECONDS

    async def _poll_gpus(self) -> None:
        """Read NVML, at most every so often, until it says whether there are GPUs.

        core/evidence.py judges failure texts by that.
        """
        if self._nvml.has_gpus is None and self._clock() >= self._nvml_due:
            self._nvml_due = self._clock() + _RETRY_SECONDS
            await self._nvml.read()

    async def _choose(self) -> MemoryReading | None:
        """Read GPUs if there are any, otherwise the host."""
        if self._host is not None and self._is_host:
            return await self._host.read()
        if (reading := await self._read_gpus()) is not None:
            self._last_of_gpus = reading
            return reading
        if self._host is None or self._metrics.uuids or self._nvml.has_gpus is not False:
            return None
        reading = await self._host.read()
        self._is_host = reading is not None
        return reading

    async def _read_gpus(self) -> MemoryReading | None:
        """Read GPU memory. Triton's metrics go first, for the UUIDs, unless NVML is in use."""
        if self.source != "nvml":
            page = await self._metrics.read()
            return await self._read_nvml() or self._check_devices(page)
        return await self._read_nvml() or self._check_devices(await self._metrics.read())

    async def _read_nvml(self) -> MemoryReading | None:
        """Read GPU memory by NVML; after a failure not for some seconds."""
        if self._clock() < self._nvml_due:
            return None
        reading = self._check_devices(await self._nvml.read())
        if reading is None:
            self._nvml_due = self._clock() + _RETRY_SECONDS
        return reading

    def _check_devices(self, reading: MemoryReading | None) -> MemoryReading | None:
        """Return the reading, but None if a new source lacks a device of the ledger.

        So it is when one source shows a whole GPU and the other an instance of it (MIG).
        """
        before = self._last_of_gpus
        if reading is None or before is None or reading.source == before.source:
            return reading
        return reading if reading.devices.keys() >= before.devices.keys() else None

    def _log_source(self, source: str) -> None:
        """Record the source, and log a change and a GPU that is not read."""
        previous = self.source
        self.source = source
        if source != self._logged and self._wanted != "off":
            self._logged = source
            fields = {"source": source, "was": previous, "reason": self._explain(source)}
            log.info("memory.source", extra=fields)
        if self.is_gpu_unread and not self._has_warned:
            log.warning("memory.gpu_unread", extra={"reason": self._explain(source)})
        self._has_warned = self.is_gpu_unread

    def _explain(self, source: str) -> str:
        """Return why memory is read from this source."""
        if source == _NONE:
            return self._explain_none()
        if self._wanted != "auto":
            return f"memory_source is {source}"
        if source == "triton":
            return self._nvml.why or "NVML names other devices"
        return "NVML answers" if source == "nvml" else f"no GPU is seen: {self._nvml.why}"

    def _explain_none(self) -> str:
        """Return why no source can be read."""
        if self._wanted == HOST or self._is_host:
            return self._host.why if self._host else "Triton's processes are not ours"
        if self._wanted == "nvml":
            return self._nvml.why
        if self._wanted == "triton":
            return self._metrics.why
        other = "it names other devices"
        return f"nvml: {self._nvml.why or other}; triton: {self._metrics.why or other}"


def build_memory(
    wanted: Wanted,
    embedded: EmbeddedTriton | None,
    metrics_page: str,  # the address of an external Triton's metrics
) -> ChosenMemory:
    """Build the readers of this place, and the choice among them."""
    host = None
    if embedded is not None:
        host = HostMemory(embedded.pids, models_limit_bytes())
    page = TritonMetrics(lambda: embedded.metrics_address if embedded else metrics_page)
    return ChosenMemory(wanted, host, page, NvmlMemory(lambda: page.uuids))
