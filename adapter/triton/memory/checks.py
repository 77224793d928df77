"""Refuses readings of GPUs that cannot be true, and numbers the GPUs."""

from collections.abc import Mapping
from dataclasses import replace

from adapter.core.byte_sizes import format_size
from adapter.core.memory import Device, DeviceReading
from adapter.errors import BackendUnavailable


class Totals:
    """Checks the readings of one reader.

    Virtual GPUs are known to report more used than there is, and a total that changes.
    """

    def __init__(self) -> None:
        self._first_totals: dict[Device, int] = {}

    def check(self, device: Device, reading: DeviceReading) -> DeviceReading:
        """Return the reading.

        Raises BackendUnavailable if more is used than there is, or if the total is not that of the
        first reading.
        """
        limit_bytes = reading.limit_bytes
        total = format_size(limit_bytes)
        first = self._first_totals.setdefault(device, limit_bytes)
        if not 0 <= reading.used_bytes <= limit_bytes:
            used = format_size(reading.used_bytes)
            reason = f"{device} cannot have {used} of {total} in use"
            raise BackendUnavailable(reason, delivered=True)
        if first != limit_bytes:
            reason = f"the total of {device} was {format_size(first)} and is {total}"
            raise BackendUnavailable(reason, delivered=True)
        return reading


def number_devices(devices: Mapping[Device, DeviceReading]) -> Mapping[Device, DeviceReading]:
    """Give a lone GPU CUDA's number 0; CUDA's numbers of several are unknown."""
    if len(devices) != 1:
        return devices
    return {device: replace(reading, index=0) for device, reading in devices.items()}
