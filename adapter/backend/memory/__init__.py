"""Memory readers: used and total memory of Triton's GPUs, or host memory of its processes."""

from adapter.backend.embedded import EmbeddedTriton
from adapter.backend.memory.choice import ChosenMemory, Wanted
from adapter.backend.memory.host import HostMemory, host_limit_bytes, models_limit_bytes
from adapter.backend.memory.nvml import NvmlMemory
from adapter.backend.memory.triton_metrics import TritonMetrics

__all__ = [
    "ChosenMemory",
    "HostMemory",
    "NvmlMemory",
    "TritonMetrics",
    "Wanted",
    "build_memory",
    "host_limit_bytes",
    "models_limit_bytes",
]


def build_memory(
    wanted: Wanted, embedded: EmbeddedTriton | None, limit_bytes: int | None, metrics_page: str
) -> ChosenMemory:
    """Build the readers that there are here, and their choice. `metrics_page` is the address of
    Triton's metrics where it is not embedded.
    """
    host = None
    if embedded is not None:
        host = HostMemory(embedded.owners, limit_bytes or models_limit_bytes())
    page = TritonMetrics(lambda: embedded.metrics_address if embedded else metrics_page)
    return ChosenMemory(wanted, host, page, NvmlMemory(lambda: page.uuids))
