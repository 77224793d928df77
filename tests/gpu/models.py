"""Models that take real CUDA memory through torch, and what the driver says of the GPU."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pynvml

from tests.trees import write_python_model

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """As the driver sees it now, in bytes."""

    total: int
    free: int

    @property
    def used(self) -> int:
        return self.total - self.free


def gpu() -> Gpu:
    pynvml.nvmlInit()
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
        return Gpu(int(memory.total), int(memory.free))
    finally:
        pynvml.nvmlShutdown()


def why_not() -> str | None:
    """Why these tests cannot run here; None where they can. Torch itself is not imported: it would
    take memory of the GPU for this process.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"no GPU: NVML says {error}"
    if count != 1:
        return f"{count} GPUs are visible, these tests are for one"
    return "torch is not installed" if find_spec("torch") is None else None


def write_cuda_model(package: Path, mebibytes: int, *, declares: str = "") -> Path:
    """Takes so much of the GPU while it is loaded, and more for each request, for its time: the
    first value in MiB.
    """
    parameter = f'parameters {{ key: "memory_bytes" value {{ string_value: "{declares}" }} }}\n'
    write_python_model(
        package,
        imports="""\
            import torch

            def take(mebibytes):
                return torch.empty(mebibytes * 2**20, dtype=torch.uint8, device="cuda")
        """,
        initialize=f"self.held = take({mebibytes})",
        answer="more = take(int(values[0]))\ndel more",
    )
    if declares:
        with (package / "config.pbtxt").open("a") as config:
            config.write(parameter)
    return package
