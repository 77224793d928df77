"""Memory that a backend of a real Triton leaks is reported until the process is another."""

import os
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes import tritonserver
from tests.running import (
    COMPLETE,
    EXAMPLES,
    Client,
    RunningAdapter,
    embedded_adapter,
    unload_all,
    wait_until,
)

pytestmark = pytest.mark.triton

MIB = 2**20
KEPT_MIB = 50
LOADS = 4
CONFIG = """
backend: "leaky"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU }
"""


def write_leaky_model(folder: Path) -> Path:
    """Write a package with a backend of its own, which keeps memory of Triton at each load."""
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    source = Path(__file__).with_name("leaky.c")
    library = folder / "libtriton_leaky.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", f"-DKEPT_MIB={KEPT_MIB}", "-o", library, source]
    subprocess.run(command, check=True)
    return folder


def not_attributed_bytes(adapter: RunningAdapter) -> int:
    return adapter.state()["memory"]["devices"]["host"]["not_attributed_bytes"] or 0


def leak(client: Client, package: Path) -> None:
    """Load and unload the model; every second load fails."""
    for _ in range(LOADS):
        reply = client.load("leaky", package)
        assert reply.status in {200, 400}, reply.body
        if reply.status == 200:
            assert client.delete("/models/leaky").status == 200


def test_leaked_memory_is_not_attributed_until_triton_restarts(tmp_path):
    """The runbook of TritonAdapterMemoryNotAttributed: unloads do not give this memory back, and
    another process does.
    """
    package = write_leaky_model(tmp_path / "leaky")
    flags = ("--memory-limit=1536MiB", f"--model-roots={tmp_path}", "--on-triton-restart=reload")
    with embedded_adapter(COMPLETE, *flags) as adapter, closing(adapter.client()) as client:
        assert client.load("echo", EXAMPLES / "identity").status == 200
        leak(client, package)
        leaked = 0.9 * LOADS * KEPT_MIB * MIB
        wait_until(lambda: not_attributed_bytes(adapter) > leaked, 30, "the leak is reported")
        unload_all(adapter)
        assert client.load("echo", EXAMPLES / "identity").status == 200
        wait_until(lambda: not_attributed_bytes(adapter) > leaked, 30, "unloads do not free it")

        os.kill(tritonserver(adapter), signal.SIGKILL)

        wait_until(lambda: not_attributed_bytes(adapter) < 20 * MIB, 60, "all memory is attributed")
        wait_until(lambda: [m["state"] for m in adapter.state()["models"]] == ["READY"], 30, "back")
