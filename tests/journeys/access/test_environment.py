"""Secrets that the adapter is given as variables, as a python model looks for them."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.journeys.endpoint.conftest import client_of
from tests.journeys.endpoint.test_invoke import invoke
from tests.processes import descendants
from tests.running import COMPLETE, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

TOKEN = "canary-0e51d24b867f3a9c"  # noqa: S105 - it opens nothing else
SECRET = "canary of the key"  # noqa: S105 - it opens nothing else

# Raises if a secret is in the environment of the model's process or of one above it.
SPY = """
pid = os.getpid()
while pid != 1 and pid != {test}:
    text = open(f"/proc/{{pid}}/environ").read()
    assert "canary" not in text, pid
    pid = int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
"""


def test_model_finds_no_secret_in_any_environment(tmp_path):
    """Not in its own either, and the adapter goes on to use them."""
    spy = SPY.format(test=os.getpid())
    write_python_model(tmp_path / "store" / "spy", imports="import os", answer=spy)
    flags = (
        f"--model-store={tmp_path / 'store'}",
        f"--cache-dir={tmp_path / 'cache'}",
        f"--model-roots={tmp_path / 'store'}",
        "--endpoint-keys=AKID env:SECRET_OF_A *",
    )
    environ = {"ADAPTER_CONTROL_TOKEN": TOKEN, "SECRET_OF_A": SECRET}
    with embedded_adapter(*flags, COMPLETE, environ=environ, own_session=True) as adapter:
        keys = {"aws_access_key_id": "AKID", "aws_secret_access_key": SECRET}
        caller = client_of(adapter.http, **keys)
        with closing(caller):
            assert invoke(caller, "spy")["Body"].read()
        with adapter.client() as client:
            bearer = {"Authorization": f"Bearer {TOKEN}"}
            body = {"model_name": "spy2", "url": str(tmp_path / "store" / "spy")}
            assert client.post("/models", body, bearer).status == 200
            reply = client.post("/models/spy2/invoke", infer_body(1.0), bearer)
            assert reply.status == 200, reply.body
        pids = [adapter.process.pid, *descendants(adapter.process.pid)]
        shown = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in pids}
    assert len(shown) > 2
    assert [pid for pid, text in shown.items() if b"canary" in text] == []
    started_with = shown[pids[0]].split(b"\0")
    assert b"SECRET_OF_A=" in started_with  # the variable is shown, and its value is not
