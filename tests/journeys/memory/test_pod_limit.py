"""A container whose memory the kernel limits: a load is ended before the kernel ends the rest."""

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.memory.models import MIB, check_agreement, write_eater
from tests.processes import is_alive, tritonserver
from tests.running import COMPLETE, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

_POD_BYTES = 640 * MIB
_V1 = Path("/sys/fs/cgroup/memory")
# 50 MiB a second, 2 GiB in all
_GROWS = """
import time
self.held = []
for _ in range(400):
    self.held.append(numpy.ones(5 * 2**20, numpy.uint8))
    time.sleep(0.1)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup of v1 below our own, with the pod's limit."""
    rows = [row.split(":", 2) for row in Path("/proc/self/cgroup").read_text().splitlines()]
    [own] = [row[2] for row in rows if "memory" in row[1].split(",")] or [""]
    group = _V1 / own.lstrip("/") / f"pod-{secrets.token_hex(4)}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroups of v1 here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(_POD_BYTES))
    yield group
    group.rmdir()


@pytest.fixture
def pod(group, tmp_path) -> Iterator[RunningAdapter]:
    """An adapter in the cgroup, with its Triton."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho $$ > {group}/cgroup.procs\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    roots = f"--model-roots={tmp_path / 'models'}"
    with embedded_adapter(COMPLETE, roots, python=str(python)) as adapter:
        yield adapter


def oom_kills(group: Path) -> str:
    rows = (group / "memory.oom_control").read_text().splitlines()
    return dict(row.split() for row in rows)["oom_kill"]


def test_growing_load_is_ended_before_the_kernel_acts(pod, group, tmp_path):
    """The limit is what the cgroup has, less what the adapter needs: nobody has set one."""
    root = tmp_path / "models"
    server = tritonserver(pod)
    with pod.client() as client:
        client.load_model("small", write_eater(root / "small", 18))

        reply = client.load("greedy", write_eater(root / "greedy", 1, initialize=_GROWS))

        body = reply.json()
        assert (reply.status, body["code"]) == (507, "InsufficientMemory"), body
        assert "needs more than" in body["error"]
        pod.wait_for("model.load_ended", model_id="greedy")
        assert body["limit_bytes"] == _POD_BYTES - 128 * MIB
        assert client.invoke("small", 1.5).status == 200
    assert oom_kills(group) == "0"
    assert is_alive(server)
    check_agreement(pod)
