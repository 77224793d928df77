"""How much memory Triton takes, and how much there is: of its GPUs, or of its processes."""

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
