"""The memory limit of NVIDIA's MPS, which holds for each process that uses CUDA."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.gpu.models import MIB, why_not, write_cuda_model
from tests.running import Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body

_CONTROL = "nvidia-cuda-mps-control"
_MISSING = why_not() or (None if shutil.which(_CONTROL) else f"{_CONTROL} is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.triton,
    pytest.mark.skipif(_MISSING is not None, reason=_MISSING or "there is one"),
    pytest.mark.timeout(120),
]

_LIMIT_MIB = 4096


@pytest.fixture(scope="module")
def mps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """The environment of a daemon of our own."""
    folder = tmp_path_factory.mktemp("mps")
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    own = {**os.environ, **environ}
    subprocess.run([_CONTROL, "-d"], env=own, check=True, timeout=20)
    yield environ
    subprocess.run([_CONTROL], input=b"quit -t 5\n", env=own, check=True, timeout=30)


@pytest.fixture
def adapter(mps: Mapping[str, str], root: Path) -> Iterator[RunningAdapter]:
    environ = {**mps, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={_LIMIT_MIB}M"}
    flags = ("--memory-source=nvml", "--memory-reserve=0", f"--model-roots={root}")
    with embedded_adapter(*flags, environ=environ) as adapter:
        yield adapter


def test_model_over_process_limit_is_too_large(client: Client, root: Path) -> None:
    """Others serve beside it."""
    below = write_cuda_model(root / "below", 1024)
    above = write_cuda_model(root / "above", 6144, declares="6GiB")
    untold = write_cuda_model(root / "untold", 6144)
    assert client.load("below", below).status == 200

    refused = client.load("above", above)
    tried = client.load("untold", untold)

    assert (refused.status, refused.json()["code"]) == (400, "ModelTooLarge"), refused.body
    assert refused.json()["limit_bytes"] == _LIMIT_MIB * MIB
    assert (tried.status, tried.json()["code"]) == (507, "OutOfMemory"), tried.body
    again = client.load("untold", untold)
    # what it needs is a guess as long as it has not been loaded, and others could be unloaded
    assert (again.status, again.json()["code"]) == (507, "OutOfMemory"), again.body
    assert client.post("/models/below/invoke", infer_body(16.0)).status == 200
