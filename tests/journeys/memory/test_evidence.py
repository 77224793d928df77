"""The decision table of failures, over REST and a real Triton, as memory is low, well or unknown.

Memory is a scripted GPU that NVML shows at once. Somebody else on it has all of it, or nothing.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.metrics_endpoint import MIB
from tests.fakes.scripted_gpus import ScriptedGpus, adapter_beside
from tests.journeys.memory.failing_models import failing, write_failing_answers, write_failing_load
from tests.little_disk import adapter_with_little
from tests.running import (
    Client,
    Reply,
    RunningAdapter,
    unload_all,
)
from tests.trees import CONFIG, write_python_model

pytestmark = pytest.mark.triton

_TOTAL = 1000 * MIB
_VIEWS = ("low", "ok", pytest.param("unknown", marks=pytest.mark.nightly))
# With little free, what says nothing of its size is refused before it is tried.
_SMALL = CONFIG + 'parameters { key: "memory_bytes" value { string_value: "1KiB" } }\n'
_SHM = "'--shm-size' flag to control the shared memory region size. Error:"

WEAK = [
    "Stub process 'other_0_0' is not healthy; it has gone",
    "unable to enqueue for inference yolo_0_0",
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "RuntimeError: Engine core initialization failed. See root cause above.",
    "RuntimeError: worker 0 failed with exit code 137",
]
STRONG = [
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB",
    "MemoryError: Unable to allocate 3.0 MiB for an array",
    "memory limit set for GPU 0 has exceeded. Model loading is rejected.",
    f"Failed to increase the shared memory pool size, use {_SHM} No space left on device",
    f"Unable to initialize shared memory key, use {_SHM} Cannot allocate memory",
]
DISK = [
    "OSError: [Errno 28] No space left on device: '/models/cache'",
    "Failed to create directory '/opt/env/0', errno:No space left on device",
]


@dataclass(frozen=True)
class Seen:
    """An adapter with one failing model, and how its memory looks."""

    view: str
    adapter: RunningAdapter
    client: Client
    root: Path

    @property
    def is_low(self) -> bool:
        return self.view == "low"

    def failed_loads(self, name: str, texts: Sequence[str]) -> list[tuple[int, str]]:
        """Several at a time, each over a connection of its own."""

        def load(number: int) -> tuple[int, str]:
            package = self.root / f"{name}-{number}"
            write_failing_load(package, "RuntimeError", texts[number])
            with self.adapter.client() as client:
                return outcome(client.load(package.name, package))

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(load, range(len(texts))))

    def infer(self, how: str | int, text: str) -> Reply:
        return self.client.post("/models/raiser/invoke", failing(how, text))


@pytest.fixture(scope="module", params=_VIEWS)
def seen(request, triton, tmp_path_factory) -> Iterator[Seen]:
    root = tmp_path_factory.mktemp("models")
    gpus = ScriptedGpus(tmp_path_factory.mktemp("gpus"))
    gpus.add("GPU-a", _TOTAL)
    gpus.others_take("GPU-a", _TOTAL - 10 * MIB if request.param == "low" else 0)
    source = "off" if request.param == "unknown" else "nvml"
    with ExitStack() as stack:
        adapter = stack.enter_context(
            adapter_beside(triton, gpus, root, f"--memory-source={source}")
        )
        client = stack.enter_context(adapter.client())
        stack.callback(unload_all, adapter)
        client.load_model("raiser", write_failing_answers(root / "raiser"))
        yield Seen(request.param, adapter, client, root)


def outcome(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.code


OOM = (507, "OutOfMemory")


@pytest.mark.parametrize("text", WEAK)
def test_weak_inference_text_is_507_when_memory_low(seen, text):
    expected = OOM if seen.is_low else (500, "InferenceFailed")

    assert outcome(seen.infer(500, text)) == expected
    if ": " in text:
        assert outcome(seen.infer(*text.split(": ", 1))) == expected


def test_weak_load_text_is_507_when_memory_low(seen):
    expected = OOM if seen.is_low else (400, "InvalidModel")

    texts = WEAK[1::3]  # all of them: tests/unit/core/test_oom.py
    assert seen.failed_loads("weak", texts) == [expected] * len(texts)


def test_what_memory_said_is_in_the_answer(seen):
    body = seen.infer(500, WEAK[1]).json()

    if seen.is_low:
        assert body["matched"] == "unable to enqueue for inference"
        assert (body["free_bytes"], body["limit_bytes"]) == (10 * MIB, _TOTAL)
        assert body["device"] == "GPU-a"
    else:
        assert "matched" not in body


@pytest.mark.parametrize("how", ["RuntimeError", 500])
def test_size_below_free_memory_is_507_once(seen, how):
    name = f"echo-{how}"
    seen.client.load_model(name, write_failing_answers(seen.root / name))
    body = failing(how, "CUDA out of memory. Tried to allocate 20.00 MiB")
    first, second = (outcome(seen.client.post(f"/models/{name}/invoke", body)) for _ in range(2))
    assert first == OOM
    assert second == (OOM if seen.is_low else (500, "InferenceFailed"))
    seen.client.unload_model(name)


def test_strong_load_text_is_507_whatever_memory_says(seen):
    """A load cannot repeat what a caller wrote, so its text is believed each time."""
    texts = [STRONG[0], STRONG[3], STRONG[0].replace("20.00 MiB", "20.00 GiB")]
    for number in range(2):  # all texts: tests/unit/core/test_oom.py
        assert seen.failed_loads(f"strong-{number}", texts) == [OOM] * len(texts)


@pytest.mark.parametrize("status", [400, 404, 501])
def test_refused_requests_words_are_passed_through(seen, status):
    reply = seen.infer(status, "the prompt is: CUDA out of memory")

    assert reply.status in {400, 500}  # a model's own 404 would say 'load me again'


def test_a_full_disk_is_passed_through(seen):
    assert [outcome(seen.infer(500, text)) for text in DISK] == [(500, "InferenceFailed")] * 2
    assert seen.failed_loads("disk", DISK) == [(400, "InvalidModel")] * 2


@pytest.mark.parametrize(
    "text", ["[request id: x] Exceeds maximum queue size", "Request timeout expired"]
)
def test_an_overload_is_503(seen, text):
    assert outcome(seen.infer(503, text)) == (503, "BackendUnavailable")


def test_load_killed_at_little_memory_is_507(seen):
    package = seen.root / "killed-in-load"
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    write_python_model(package, initialize=kill, config=_SMALL)

    expected = OOM if seen.is_low else (400, "InvalidModel")
    assert outcome(seen.client.load(package.name, package)) == expected
    assert seen.client.get(f"/models/{package.name}").status == 404


def test_inference_killed_at_little_memory_is_507(seen):
    """As the kernel does it when memory runs out. The model is dead either way: 404 after it."""
    package, pid = seen.root / "killed", seen.root / "killed.pid"
    note = f"import os, pathlib; pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))"
    write_python_model(package, initialize=note, config=_SMALL)
    seen.client.load_model("killed", package)
    os.kill(int(pid.read_text()), signal.SIGKILL)

    first, second = (seen.client.invoke("killed") for _ in range(2))

    assert outcome(first) == (OOM if seen.is_low else (500, "InferenceFailed"))
    assert outcome(second) == (404, "ModelNotFound")
    seen.client.unload_model("killed")


@pytest.fixture
def little_shm(tmp_path) -> Iterator[RunningAdapter]:
    with adapter_with_little("/dev/shm", "4m", f"--model-roots={tmp_path}") as adapter:
        yield adapter


def test_filled_shared_memory_is_507_until_freed(little_shm, tmp_path):
    """One model has filled it, for all others."""
    answer = "import numpy; values = numpy.ones(int(values[0]), values.dtype)"
    grower = write_python_model(tmp_path / "grower", answer=answer)
    with little_shm.client() as client:

        def grow(name: str, mebibytes: float) -> Reply:
            return client.invoke(name, mebibytes * MIB / 4)

        client.load_model("one", grower)
        assert grow("one", 2).status == 200
        assert outcome(client.load("two", grower)) == OOM
        client.unload_model("one")
        client.load_model("two", grower)
        # last, as Triton 2.51 never lets go of a model that this has happened to
        assert outcome(grow("two", 8)) == OOM
        assert grow("two", 0.1).status == 200
