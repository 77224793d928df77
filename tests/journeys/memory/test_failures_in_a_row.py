"""Inferences of one model that run out of memory again and again, on a GPU that is nearly full.

The GPU is a scripted one: NVML shows what is used, and the python model raises CUDA's words.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakes.metrics_endpoint import MIB
from tests.fakes.scripted_gpus import ScriptedGpus, adapter_beside
from tests.journeys.memory.failing_models import failing, write_failing_answers
from tests.running import Client, unload_all

pytestmark = pytest.mark.triton

_TOTAL_MIB = 1000
_FREE_MIB = 170
OOM = (507, "OutOfMemory")
FAILED = (500, "InferenceFailed")


@pytest.fixture(scope="module")
def client(triton, tmp_path_factory) -> Iterator[tuple[Client, Path]]:
    """A client, and where packages are. 17 % of the GPU are free, and another model is loaded."""
    root = tmp_path_factory.mktemp("models")
    gpus = ScriptedGpus(tmp_path_factory.mktemp("gpus"))
    gpus.add("GPU-a", _TOTAL_MIB * MIB)
    gpus.others_take("GPU-a", (_TOTAL_MIB - _FREE_MIB) * MIB)
    with ExitStack() as stack:
        adapter = stack.enter_context(adapter_beside(triton, gpus, root, "--memory-source=nvml"))
        client = stack.enter_context(adapter.client())
        stack.callback(unload_all, adapter)
        client.load_model("other", write_failing_answers(root / "other"))
        yield client, root


@pytest.mark.parametrize(
    ("asked", "outcomes"),
    [
        ("200.00 MiB", [OOM] * 5),  # more than is free
        ("100.00 MiB", [OOM] * 5),  # less, but in pieces maybe
        ("18.00 MiB", [OOM] * 5),  # above a tenth of what is free
        ("16.00 MiB", [OOM] + [FAILED] * 4),  # below: an allocator finds that
        ("1001.00 MiB", [FAILED] * 5),  # more than there is: no unload can help
        ("20.00 GiB", [FAILED] * 5),
    ],
)
def test_oom_of_inferences_is_507_while_plausible(client, asked, outcomes):
    own, root = client
    name = f"asks-{asked.partition('.')[0]}"
    own.load_model(name, write_failing_answers(root / name))
    text = f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 1.00 GiB"
    replies = [
        own.post(f"/models/{name}/invoke", failing("OutOfMemoryError", text)) for _ in outcomes
    ]
    assert [(reply.status, reply.code) for reply in replies] == outcomes
    own.unload_model(name)
