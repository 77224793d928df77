"""Reads GPU memory from Triton's metrics endpoint."""

import re
from collections.abc import Callable, Mapping

import aiohttp

from adapter.core.memory import Device, DeviceReading, MemoryReading
from adapter.errors import BackendUnavailable
from adapter.triton.memory.checks import Totals, number_devices

# The pattern begins with a literal: the page may hold megabytes of lines about models, and a search
# for it takes 0.3 ms for 1 MB.
_SERIES = re.compile(rb'\nnv_gpu_memory_(used|total)_bytes\{.*?gpu_uuid="([^"\n]+)".*?\} (\S+)')
_LAG_SECONDS = 3.0
_OK = 200


class TritonMetrics:
    """Reads the memory of GPUs from the metrics of a Triton anywhere.

    The figures lag: Triton polls DCGM (docs/memory.md), which counts in MiB.
    """

    def __init__(
        self,
        address: str | Callable[[], str],  # `host:port`; empty while there is none
        *,
        timeout_seconds: float = 2.0,
    ) -> None:
        self.why = "it was not asked yet"  # why the last reading was None
        self.uuids: tuple[str, ...] = ()  # the GPUs of the last page that named any
        self._address = address
        self._timeout = timeout_seconds
        self._totals = Totals()
        self._session: aiohttp.ClientSession | None = None
        self._known: set[str] = set()

    async def read(self) -> MemoryReading | None:
        """Return a reading; None if the endpoint, or a GPU that it named before, has no figures."""
        try:
            devices = self._devices(_find_series(await self._fetch()))
        except BackendUnavailable as error:
            self.why = str(error)
            return None
        self.why = ""
        return MemoryReading(devices, source="triton", lag_seconds=_LAG_SECONDS)

    async def close(self) -> None:
        """Close the connection."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    async def _fetch(self) -> bytes:
        """Return the page of metrics. Raises BackendUnavailable."""
        address = self._address if isinstance(self._address, str) else self._address()
        if not address:
            raise _unreachable("Triton is not up yet")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout)
            )
        try:
            async with self._session.get(
                f"http://{address}/metrics", allow_redirects=False
            ) as response:
                if response.status != _OK:
                    raise _unreachable(f"it answered {response.status}")
                return await response.read()
        except TimeoutError as error:
            raise _unreachable(f"no answer within {self._timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise _unreachable(str(error)) from error

    def _devices(self, series: Mapping[str, Mapping[bytes, int]]) -> Mapping[Device, DeviceReading]:
        """Return the devices with figures.

        On an error of DCGM Triton publishes 0 for both: a GPU that never had figures is ignored;
        one that had makes the whole reading invalid. Raises BackendUnavailable.
        """
        if not series:
            raise BackendUnavailable("Triton reports no GPU", delivered=True)
        self.uuids = tuple(series)
        devices = {
            Device(uuid): self._totals.check(
                Device(uuid), DeviceReading(figures[b"total"], figures[b"used"])
            )
            for uuid, figures in series.items()
            if figures.get(b"total") and b"used" in figures
        }
        if not devices or (self._known & series.keys()) - devices.keys():
            raise BackendUnavailable("total is 0 (a DCGM error)", delivered=True)
        self._known |= devices.keys()
        return number_devices(devices)


def _unreachable(reason: str) -> BackendUnavailable:
    """Return the error of a page that could not be fetched."""
    return BackendUnavailable(f"the metrics endpoint cannot be reached: {reason}", delivered=False)


def _find_series(page: bytes) -> Mapping[str, Mapping[bytes, int]]:
    """Return `used` and `total` in bytes by UUID, as far as the page has them as numbers."""
    series: dict[str, dict[bytes, int]] = {}
    for name, uuid, value in _SERIES.findall(b"\n" + page):
        figures = series.setdefault(uuid.decode(errors="replace"), {})
        try:
            figures[name] = int(float(value))
        except (ValueError, OverflowError):  # NaN, Inf
            continue
    return series
