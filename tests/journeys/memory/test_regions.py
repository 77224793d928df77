"""Triton keeps the shared memory of python processes that died: it is free when their model is
gone, and Triton and all its other models go on as if nothing had been.
"""

import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient

from tests.asking import background
from tests.constants import HANG, UNLOAD
from tests.journeys.memory.models import MIB
from tests.processes import arguments, is_alive, stubs, tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = [
    pytest.mark.triton,
    pytest.mark.of_triton("2.51", "2.73", "how its python backend lays out shared memory"),
]

_IMPORTS = "import numpy, os, time"
# 1: dies; 2: answers 32 MiB; 3: hangs; all else: answers as many values
_ANSWER = """
if values[0] == 1:
    os._exit(1)
if values[0] == 3:
    time.sleep(3600)
if values[0] == 2:
    values = numpy.full(8 * 2**20, 2, numpy.float32)
"""
_LARGE = 32 * MIB
_INSTANCES = "instance_group { kind: KIND_CPU count: 2 }\n"
_CALLS_ANOTHER = """
inputs = [pb_utils.Tensor("IN", values)]
asked = pb_utils.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=inputs)
found = asked.exec()
if found.has_error():
    raise pb_utils.TritonModelException(found.error().message())
values = pb_utils.get_output_tensor_by_name(found, "OUT").as_numpy()
"""


@pytest.fixture(scope="module")
def running(root) -> Iterator[RunningAdapter]:
    """What it does at its end is checked as well, with all that the tests have left in Triton."""
    flags = (f"--model-roots={root}", "--infer-timeout-seconds=4", COMPLETE)
    # models of two processes, which Triton unloads in 2.4 s, are not to be taken for hanging ones
    with embedded_adapter(*flags, constants={UNLOAD: 12, HANG: 3}) as adapter:
        yield adapter


@pytest.fixture
def package(root, tmp_path) -> Path:
    return write_python_model(root / tmp_path.name / "m", imports=_IMPORTS, answer=_ANSWER)


def regions(adapter: RunningAdapter) -> dict[str, int]:
    """The regions of this Triton and the bytes that they take."""
    prefix = adapter.repository.parent.name
    found = Path("/dev/shm").glob(f"{prefix}*")
    return {path.name: path.stat().st_blocks * 512 for path in found}


def mapped_bytes(adapter: RunningAdapter) -> int:
    """What tritonserver still has in memory of regions, removed ones too."""
    rows = Path(f"/proc/{tritonserver(adapter)}/smaps").read_text().splitlines()
    total, is_region = 0, False
    for row in rows:
        if "-" in row.split()[0]:
            is_region = "/dev/shm/" in row
        elif is_region and row.startswith("Rss:"):
            total += int(row.split()[1]) * 1024
    return total


def regions_of(adapter: RunningAdapter, name: str) -> set[str]:
    """Those that the living processes of a model have."""
    return {each for pid in stubs(adapter, name) for each in arguments(pid)} & {*regions(adapter)}


def check_serves(client: Client, name: str) -> None:
    raw = {"outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]}
    reply = client.post(f"/models/{name}/invoke", infer_body(2.0) | raw)
    assert reply.status == 200, reply.body
    assert reply.body.endswith(struct.pack("<f", 2.0) * (_LARGE // 4))


def die(client: Client, name: str = "m") -> None:
    reply = client.invoke(name)
    assert (reply.status, reply.code) == (500, "InferenceFailed"), reply.body


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_unload_frees_regions_of_dead_processes(adapter, client, package, end):
    before = mapped_bytes(adapter)
    client.load_model("m", package)
    check_serves(client, "m")
    assert sum(regions(adapter).values()) >= _LARGE
    if end == "dies":
        die(client)
    else:
        hung = client.invoke("m", 3.0)
        assert hung.status == 504, hung.body

    reply = client.unload("m")

    assert reply.status == 200, reply.body
    assert regions(adapter) == {}
    assert mapped_bytes(adapter) - before < 2 * MIB


def test_loaded_models_keep_their_regions(adapter, client, package):
    """They serve while those of others are freed."""
    two = write_python_model(
        package.with_name("two"), imports=_IMPORTS, answer=_ANSWER, config=CONFIG + _INSTANCES
    )
    calls = write_python_model(package.with_name("calls"), answer=_CALLS_ANOTHER)
    for name, url in {"m": package, "other": two, "calls": calls}.items():
        client.load_model(name, url)
        check_serves(client, name)
    kept = regions_of(adapter, "other") | regions_of(adapter, "calls")
    assert len(kept) == 3

    with background(adapter) as others:
        end = []

        def use(own: Client) -> int:
            answers = 0
            while not end or answers < 5:
                name = ("other", "calls")[answers % 2]
                assert own.invoke(name, 4.0).status == 200
                answers += 1
                time.sleep(0.01)
            for name in ("other", "calls"):
                check_serves(own, name)
            return answers

        using = others.ask(use)
        try:
            die(client)
            client.unload_model("m")
            assert {*regions(adapter)} == kept
        finally:
            end.append(True)
        assert using.result() >= 5


def test_dead_instances_region_stays_with_the_model(adapter, client, package):
    write_python_model(package, imports=_IMPORTS, answer=_ANSWER, config=CONFIG + _INSTANCES)
    other = write_python_model(package.with_name("other"))
    client.load_model("m", package)
    both = regions_of(adapter, "m")
    assert len(both) == 2
    victim = stubs(adapter, "m")[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_alive(victim), 60, "it has ended")
    client.load_model("other", other)
    client.unload_model("other")
    assert {*regions(adapter)} == both

    client.unload_model("m")

    assert regions(adapter) == {}


def test_dead_model_unloaded_elsewhere_leaves_no_region(adapter, client, package):
    client.load_model("m", package)
    check_serves(client, "m")
    (victim,) = stubs(adapter, "m")
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_alive(victim), 60, "it has ended")

    with closing(grpcclient.InferenceServerClient(adapter.grpc_address)) as triton:
        triton.unload_model("m")

    wait_until(lambda: regions(adapter) == {}, 30, "its region is free")
    wait_until(lambda: client.get("/models/m").status == 404, 60, "the adapter has seen it")
    client.load_model("m", package)
    check_serves(client, "m")


def test_process_dying_during_load_leaves_no_region(adapter, client, package):
    write_python_model(package, imports="import os", initialize="os._exit(1)")
    assert client.load("m", package).status == 400
    assert regions(adapter) == {}
