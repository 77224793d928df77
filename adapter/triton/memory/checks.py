"""Refuses readings of GPUs that cannot be true, and numbers the GPUs."""

from collections.abc import Mapping
from dataclasses import replace

from adapter.core.byte_sizes import format_size
from adapter.core.memory import Device, DeviceReading
from adapter.errors import BackendUnavailable


class Totals:
    """Checks the readings of one reader: virtual GPUs are known to report more used than there is,
    and a total that changes.
    """

    def __init__(self) -> None:
        self._first: dict[Device, int] = {}

    def checked(self, device: Device, read: DeviceReading) -> DeviceReading:
        """Return the reading. Raises BackendUnavailable if more is used than there is, or if the
        total is not that of the first reading.
        """
        total, used = format_size(read.limit_bytes), format_size(read.used_bytes)
        why = None
        if not 0 <= read.used_bytes <= read.limit_bytes:
            why = f"{device} cannot have {used} of {total} in use"
        elif (first := self._first.setdefault(device, read.limit_bytes)) != read.limit_bytes:
            why = f"the total of {device} was {format_size(first)} and is {total}"
        if why is not None:
            raise BackendUnavailable(why, delivered=True)
        return read


def numbered(devices: Mapping[Device, DeviceReading]) -> Mapping[Device, DeviceReading]:
    """Return a lone GPU with CUDA's number 0; CUDA's numbers of several are unknown."""
    if len(devices) != 1:
        return devices
    return {device: replace(read, index=0) for device, read in devices.items()}
