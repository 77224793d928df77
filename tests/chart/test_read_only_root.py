"""Triton's container has a root that nobody writes to, a /tmp, and a home folder there."""

import subprocess
import tempfile
from contextlib import closing

import pytest

from tests.chart.chart import containers, pod_spec, values_of
from tests.chart.pod import running_pod
from tests.trees import infer_body, write_python_model

_MOUNT = 'mount --rbind "$1" "$1" && mount -o remount,bind,ro / && shift'
INSIDE = ["unshare", "-Urm", "sh", "-c", f'{_MOUNT} && exec "$@"', "sh", tempfile.gettempdir()]

# 1 for each place that can be written to
TRIES = """
import os, pathlib
def works(folder):
    try:
        path = pathlib.Path(folder, f"written-{os.getpid()}")
        path.write_text("a")
        path.unlink()
    except OSError:
        return 0.0
    return 1.0
values[:] = [works("/"), works("/root"), works(os.environ["HOME"]), works("/dev/shm")]
"""


@pytest.mark.triton
def test_triton_runs_on_a_read_only_root(tmp_path):
    tried = subprocess.run([*INSIDE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    values = values_of("cpu")
    triton = containers(pod_spec(values))["triton"]
    home = [f"{each['name']}={each['value']}" for each in triton["env"]]
    write_python_model(tmp_path / "tries", answer=TRIES)

    with (
        running_pod(values, tmp_path, before=[*INSIDE, "env", *home]) as adapter,
        closing(adapter.client()) as client,
    ):
        assert client.load("tries", tmp_path / "tries").status == 200
        answer = client.post("/models/tries/invoke", infer_body(9.0, 9.0, 9.0, 9.0))

    assert triton["securityContext"]["readOnlyRootFilesystem"] is True
    assert answer.json()["outputs"][0]["data"] == [0.0, 0.0, 1.0, 1.0]
