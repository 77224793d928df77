"""examples/modelmesh does what it says; the manifest keeps the controller's rules."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import yaml

from adapter.settings import load_settings
from tests.asking import model_names
from tests.grpcurl import Grpcurl

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "modelmesh"
GIB = 2**30


IDENTITY = ROOT / "examples" / "models" / "identity"


def play(adapter, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "client.py", adapter.grpc, "zoo-1", IDENTITY, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.triton
def test_client_unloads_only_when_told(adapter, client):
    client.load_model("of-another", IDENTITY)

    done = play(adapter)
    assert [line.partition(" bytes")[0] for line in done.stdout.splitlines()][-2:] == [
        "zoo-1 answers [1.0, 2.5]",
        "zoo-1 is unloaded",
    ]
    assert model_names(client) == ["of-another"]
    play(adapter, "--unload-all")
    assert model_names(client) == []


@pytest.mark.triton
def test_the_grpcurl_lines_can_be_pasted(adapter):
    text = (FOLDER / "README.md").read_text().replace("$PWD", str(ROOT))
    lines = [shlex.split(line)[1:] for line in re.findall(r"^grpcurl .*$", text, re.MULTILINE)]
    with grpc.insecure_channel(adapter.grpc) as channel:
        grpcurl = Grpcurl(channel)

        answers = {words[-1].partition("/")[2]: grpcurl.run(words) for words in lines}

    assert answers["runtimeStatus"]["status"] == "READY"
    assert int(answers["predictModelSize"]["sizeInBytes"]) > 0
    assert answers["modelSize"] == answers["loadModel"]
    assert answers["ModelInfer"]["modelName"] == "m"
    assert answers["Check"] == {"status": "SERVING"}
    assert answers["unloadModel"] == {}


@pytest.fixture(scope="module")
def spec():
    return yaml.safe_load((FOLDER / "runtime.yaml").read_text())["spec"]


def environment(spec: dict) -> dict[str, str]:
    [container] = [c for c in spec["containers"] if c["name"] == "adapter"]
    return {e["name"]: e.get("value", str(8 * GIB)) for e in container["env"]}


def test_the_environment_of_the_manifest_is_understood(spec):
    loaded = load_settings({}, environment(spec), None)

    assert loaded.warnings == []
    assert str(loaded.settings.grpc) == spec["grpcEndpoint"] == spec["grpcDataEndpoint"]
    assert loaded.settings.load_concurrency == 2
    assert loaded.settings.load_timeout_seconds == 90
    assert loaded.settings.modelmesh_capacity == 8 * GIB - 128 * 2**20
    assert loaded.origins["modelmesh_capacity"] == "CONTAINER_MEM_REQ_BYTES"


def test_triton_fills_the_repository_that_the_adapter_fills(spec):
    [triton] = [c for c in spec["containers"] if c["name"] == "triton"]
    repository = load_settings({}, environment(spec), None).settings.repository

    assert f"--model-repository={repository}" in triton["args"][1].split()
    assert "--model-control-mode=explicit" in triton["args"][1].split()


def test_manifest_passes_the_controllers_validator(spec):
    names = [container["name"] for container in spec["containers"]]
    assert not {"mm", "puller", "rest-proxy"}.intersection(names)
    assert not [name for name in names if name.startswith("mm-")]
    for container in spec["containers"]:
        assert {"ports", "readinessProbe", "lifecycle"}.isdisjoint(container)
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= {"shm"}
    assert [volume["name"] for volume in spec["volumes"]] == ["shm"]  # a name of ours
    assert {str(Path(spec[kind]).parent) for kind in ("grpcEndpoint", "grpcDataEndpoint")} == {
        "unix:/mm-sock"
    }
    references = [
        e["valueFrom"]["resourceFieldRef"]
        for c in spec["containers"]
        for e in c.get("env", [])
        if "valueFrom" in e
    ]
    assert references == [{"containerName": "triton", "resource": "requests.memory"}]
