"""The example models do on a real Triton what examples/README.md says of them."""

import importlib.util
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from adapter.triton.server.processes import resident_bytes
from tests.processes import stubs
from tests.running import EXAMPLES, Client, Reply, RunningAdapter

MIB = 2**20


def resident_bytes_of(adapter: RunningAdapter, name: str) -> int:
    return sum(resident_bytes(Path("/proc", str(pid))) for pid in stubs(adapter, name))


@pytest.mark.triton
def test_sample_file_is_a_whole_request(client: Client) -> None:
    body = (EXAMPLES / "digits/sample.json").read_bytes()
    assert client.load("digits", EXAMPLES / "digits").status == 200
    reply = client.post("/v2/models/digits/infer", body)
    assert reply.status == 200
    outputs = {output["name"]: output["data"] for output in reply.json()["outputs"]}
    assert outputs["LABEL"] == json.loads(body)["labels"]


@pytest.mark.triton
def test_two_of_three_hungry_models_fit(adapter: RunningAdapter) -> None:
    def load(name: str) -> Reply:
        with closing(adapter.client()) as client:
            return client.load(name, EXAMPLES / "hungry")

    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(load, ["first", "second", "third"]))
    [refused] = [reply for reply in replies if reply.status != 200]
    assert "MemoryError: Unable to allocate 700 MiB" in refused.json()["error"]


@pytest.mark.triton
def test_what_a_request_took_is_free_after_it(adapter: RunningAdapter, client: Client) -> None:
    def ask(mebibytes: int) -> Reply:
        tensor = {"name": "MIB", "datatype": "INT64", "shape": [1], "data": [mebibytes]}
        return client.post("/v2/models/m/infer", {"inputs": [tensor]})

    assert client.load("m", EXAMPLES / "hungry_infer").status == 200
    before = resident_bytes_of(adapter, "m")
    assert ask(500).status == 200
    assert resident_bytes_of(adapter, "m") - before < 50 * MIB
    refused = ask(0)
    assert refused.status == 400
    assert "MIB is 0; it must be at least 1" in refused.json()["error"]


@pytest.mark.triton
def test_hungry_model_holds_memory_until_unloaded(adapter: RunningAdapter, client: Client) -> None:
    assert client.load("m", EXAMPLES / "hungry").status == 200
    assert resident_bytes_of(adapter, "m") > 700 * MIB
    assert client.delete("/models/m").status == 200
    assert stubs(adapter, "m") == []


def test_every_hungry_model_has_the_same_device() -> None:
    copies = [path.read_bytes() for path in EXAMPLES.glob("*/1/device.py")]
    assert len(copies) == 3
    assert len(set(copies)) == 1


def test_hungry_declared_is_hungry_with_its_need_declared() -> None:
    def settings(model: Path) -> set[str]:
        lines = (model / "config.pbtxt").read_text().splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    undeclared = EXAMPLES / "hungry"
    declared = EXAMPLES / "hungry_declared"
    assert (undeclared / "1/model.py").read_text() == (declared / "1/model.py").read_text()
    more = settings(declared) - settings(undeclared)
    assert more == {'parameters { key: "memory_bytes" value { string_value: "700MiB" } }'}
    assert settings(undeclared) <= settings(declared)


def test_allocating_leaves_no_lock_file_behind() -> None:
    """Outside Triton, by the module that the hungry models allocate with."""
    spec = importlib.util.spec_from_file_location("device", EXAMPLES / "hungry/1/device.py")
    assert spec is not None
    assert spec.loader is not None
    device = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device)
    with pytest.raises(MemoryError):
        device.allocate(size=MIB, limit=0)
    device.allocate(size=MIB, limit=2**60).close()
    assert not Path(tempfile.gettempdir(), f"triton-device-{os.getppid()}.lock").exists()
