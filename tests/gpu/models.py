"""Models that take real CUDA memory through torch, and what the driver says of the GPU."""

import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pynvml

from tests.running import RunningAdapter
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


def book(adapter: RunningAdapter) -> dict[str, int]:
    """Return what the adapter has booked of the only GPU, in bytes."""
    (device,) = adapter.state()["memory"]["devices"].values()
    return device


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


def write_model_in_triton(package: Path, mebibytes: int, *, reports: bool = False) -> Path:
    """Bring along a backend that holds so much of the GPU in Triton's own process."""
    (package / "1").mkdir(parents=True)
    backend = package.name
    (package / "config.pbtxt").write_text(
        f'backend: "{backend}"\n'
        'input { name: "IN" data_type: TYPE_FP32 dims: 1 }\n'
        'output { name: "OUT" data_type: TYPE_FP32 dims: 1 }\n'
        "instance_group { kind: KIND_GPU gpus: 0 }\n"
    )
    macros = {"HELD_MIB": mebibytes, "REPORTS": int(reports)}
    source, library = Path(__file__).with_name("in_triton.c"), f"libtriton_{backend}.so"
    flags = ["-shared", "-fPIC", "-O1", *(f"-D{name}={value}" for name, value in macros.items())]
    subprocess.run(["gcc", *flags, "-o", package / library, source, "-ldl"], check=True)
    return package
