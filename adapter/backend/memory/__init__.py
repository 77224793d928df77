"""Memory readers: used and total memory of Triton's GPUs, or host memory of its processes."""

from adapter.backend.memory.choice import ChosenMemory, Wanted
from adapter.backend.memory.host import HostMemory, host_limit_bytes
from adapter.backend.memory.nvml import NvmlMemory
from adapter.backend.memory.triton_metrics import TritonMetrics

__all__ = [
    "ChosenMemory",
    "HostMemory",
    "NvmlMemory",
    "TritonMetrics",
    "Wanted",
    "host_limit_bytes",
]
