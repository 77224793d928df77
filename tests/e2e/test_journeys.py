"""What users do, through the published ports of the containers."""

import json
import subprocess
import sys
from contextlib import closing

import pytest

from tests.e2e.stack import ROOT
from tests.running import EXAMPLES, Client

SAMPLE = (EXAMPLES / "digits" / "sample.json").read_bytes()


def run_example(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def client(stack):
    with closing(stack.client()) as one:
        yield one


def test_sagemaker_loads_lists_invokes_and_unloads(client):
    assert client.get("/ping").status == 200
    assert client.load("abc", "/models/local/digits").status == 200
    assert client.load("abc", "/models/local/digits").status == 409
    assert client.get("/models").json()["models"] == [
        {"modelName": "abc", "modelUrl": "/models/local/digits"}
    ]

    reply = client.post("/models/abc/invoke", SAMPLE)

    assert reply.status == 200
    labels = next(one for one in reply.json()["outputs"] if one["name"] == "LABEL")
    assert labels["data"] == json.loads(SAMPLE)["labels"]
    assert client.delete("/models/abc").status == 200
    assert client.post("/models/abc/invoke", SAMPLE).status == 404


def test_containers_have_the_documented_memory_limits(stack):
    limits = {
        service: stack.container(service).attrs["HostConfig"]["Memory"]
        for service in ("adapter", "triton-cpu")
    }
    assert limits == {"adapter": 512 * 2**20, "triton-cpu": 8 * 2**30}


def test_tritons_own_client_finds_v2_over_grpc(stack):
    said = run_example("examples/clients/grpc_client.py", stack.grpc)

    assert "unloaded: StatusCode.NOT_FOUND" in said


def test_prometheus_finds_its_metrics_at_the_admin_listener(stack):
    with closing(Client(stack.admin)) as client:
        assert b"triton_adapter_triton_live 1.0" in client.get("/metrics").body
