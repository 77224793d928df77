"""Reads the limits of NVIDIA's MPS, one for each CUDA client (a process)."""

import re
from collections.abc import Mapping

VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_ENTRY = re.compile(r"\s*(\d+)\s*=\s*(\d+)\s*([GM])B?\s*", re.IGNORECASE)
_BYTES = {"G": 2**30, "M": 2**20}


def client_limits(text: str) -> Mapping[int, int]:
    """Return the limits in bytes by CUDA's number of the GPU, from a value such as `0=1G,1=512MB`;
    what is no such entry is left out.
    """
    entries = filter(None, map(_ENTRY.fullmatch, text.split(",")))
    return {int(each[1]): int(each[2]) * _BYTES[each[3].upper()] for each in entries}
