"""What users do, through the published ports of the containers."""

import subprocess
import sys
from contextlib import closing

from tests.e2e.stack import ROOT
from tests.running import Client


def test_containers_have_the_documented_memory_limits(stack):
    limits = {
        service: stack.container(service).attrs["HostConfig"]["Memory"]
        for service in ("adapter", "triton-cpu")
    }
    assert limits == {"adapter": 512 * 2**20, "triton-cpu": 8 * 2**30}


def test_tritons_own_client_finds_v2_over_grpc(stack):
    command = [sys.executable, "examples/clients/grpc_client.py", stack.grpc]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "unloaded: StatusCode.NOT_FOUND" in done.stdout


def test_prometheus_finds_its_metrics_at_the_admin_listener(stack):
    with closing(Client(stack.admin)) as client:
        assert b"triton_adapter_triton_live 1.0" in client.get("/metrics").body
