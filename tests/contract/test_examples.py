"""The example models do on a real Triton what examples/README.md says of them."""

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"
MIB = 2**20
PATIENCE_SECONDS = 30
TYPES = {"float32": "FP32", "int64": "INT64"}


def until(met: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not met():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.02)


class ExampleModels:
    """Puts example models into the repository of a Triton, and takes them away again."""

    def __init__(self, triton) -> None:
        self.repository = Path(triton.repository)
        self.client = grpcclient.InferenceServerClient(triton.grpc_address)
        self.names: set[str] = set()

    def load(self, name: str, example: str | None = None) -> None:
        self.names.add(name)
        link = self.repository / name
        if not link.is_symlink():
            link.symlink_to(EXAMPLES / (example or name), target_is_directory=True)
        self.client.load_model(name)

    def unload(self, name: str) -> None:
        self.client.unload_model(name)
        until(lambda: self.state(name) in {"UNAVAILABLE", ""}, f"{name} is unloaded")
        until(lambda: not self.processes(name), f"the process of {name} has ended")

    def state(self, name: str) -> str:
        """Empty for a model that was never tried: the index lists it without a state."""
        models = self.client.get_model_repository_index().models
        return next((model.state for model in models if model.name == name), "")

    def infer(self, name: str, **tensors: np.ndarray) -> grpcclient.InferResult:
        inputs = []
        for key, value in tensors.items():
            tensor = grpcclient.InferInput(key, list(value.shape), TYPES[str(value.dtype)])
            inputs.append(tensor.set_data_from_numpy(value))
        return self.client.infer(name, inputs)

    def processes(self, name: str) -> list[Path]:
        """The folders in /proc of the processes that run the model."""
        model = f"{self.repository}/{name}/".encode()
        return [
            line.parent
            for line in Path("/proc").glob("[0-9]*/cmdline")
            if model in contents(line) and b"triton_python_backend_stub" in contents(line)
        ]

    def resident_bytes(self, name: str) -> int:
        pages = [int(contents(process / "statm").split()[1]) for process in self.processes(name)]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def clear(self) -> None:
        for name in self.names:
            self.unload(name)
            (self.repository / name).unlink()
        self.client.close()


def contents(path: Path) -> bytes:
    """Empty when the process has gone meanwhile."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def settings(model: Path) -> set[str]:
    """The lines of config.pbtxt without the comments."""
    lines = (model / "config.pbtxt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


@pytest.fixture
def examples(triton) -> Iterator[ExampleModels]:
    examples = ExampleModels(triton)
    yield examples
    examples.clear()


@pytest.fixture
def device():
    """The module that the hungry models allocate with, outside Triton."""
    spec = importlib.util.spec_from_file_location("device", EXAMPLES / "hungry/1/device.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.triton
def test_sample_file_is_a_whole_request(examples, triton):
    body = (EXAMPLES / "digits/sample.json").read_bytes()
    examples.load("digits")
    connection = HTTPConnection(triton.http_address, timeout=PATIENCE_SECONDS)
    with closing(connection):
        connection.request("POST", "/v2/models/digits/infer", body)
        answer = connection.getresponse()
        outputs = {output["name"]: output for output in json.loads(answer.read())["outputs"]}
    assert answer.status == 200
    assert outputs["LABEL"]["data"] == json.loads(body)["labels"]


@pytest.mark.triton
def test_two_of_three_hungry_models_fit(examples):
    def failure_of_load(name: str) -> str:
        try:
            examples.load(name, "hungry")
        except InferenceServerException as failure:
            return failure.message()
        return ""

    with ThreadPoolExecutor(3) as pool:
        failures = sorted(pool.map(failure_of_load, ["first", "second", "third"]))
    assert failures[:2] == ["", ""]
    assert "MemoryError: Unable to allocate 700 MiB" in failures[2]


@pytest.mark.triton
def test_what_a_request_took_is_free_after_it(examples):
    examples.load("hungry_infer")
    before = examples.resident_bytes("hungry_infer")
    examples.infer("hungry_infer", MIB=np.array([500]))
    assert examples.resident_bytes("hungry_infer") - before < 50 * MIB


@pytest.mark.triton
def test_request_below_a_mib_is_callers_mistake(examples):
    examples.load("hungry_infer")
    with pytest.raises(
        InferenceServerException, match="MIB is 0; it must be at least 1"
    ) as failure:
        examples.infer("hungry_infer", MIB=np.array([0]))
    assert failure.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.triton
def test_hungry_model_holds_memory_until_unloaded(examples):
    examples.load("hungry")
    assert examples.resident_bytes("hungry") > 700 * MIB
    examples.unload("hungry")
    assert examples.resident_bytes("hungry") == 0


def test_every_hungry_model_has_the_same_device():
    copies = [path.read_bytes() for path in EXAMPLES.glob("*/1/device.py")]
    assert len(copies) == 3
    assert len(set(copies)) == 1


def test_hungry_declared_is_hungry_with_its_need_declared():
    undeclared, declared = EXAMPLES / "hungry", EXAMPLES / "hungry_declared"
    assert (undeclared / "1/model.py").read_text() == (declared / "1/model.py").read_text()
    more = settings(declared) - settings(undeclared)
    assert more == {'parameters { key: "memory_bytes" value { string_value: "700MiB" } }'}
    assert settings(undeclared) <= settings(declared)


def test_allocating_leaves_no_lock_file_behind(device):
    with pytest.raises(MemoryError):
        device.allocate(size=MIB, limit=0)
    device.allocate(size=MIB, limit=2**60).close()
    assert not Path(tempfile.gettempdir(), f"triton-device-{os.getppid()}.lock").exists()
