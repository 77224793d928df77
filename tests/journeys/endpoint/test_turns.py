"""Cold starts of two keys: one asks for many models at once, the other for one."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.journeys.endpoint.conftest import client_of
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_SECRETS = {"AKIDMANY": "the secret of many", "AKIDONE": "the secret of one"}
_MODELS = 8


@pytest.fixture
def keyed(tmp_path, gate) -> Iterator[RunningAdapter]:
    """One load at a time, each of which waits for the gate."""
    draft = write_python_model(tmp_path / "draft", initialize=gate.statements)
    for name in [*(f"many/{number}" for number in range(_MODELS)), "one/a"]:
        shutil.copytree(draft, tmp_path / "store" / name)
    config = tmp_path / "adapter.yaml"
    keys = ["AKIDMANY env:MANY many/*", "AKIDONE env:ONE one/*"]
    config.write_text(json.dumps({"endpoint_keys": keys}))
    environ = {
        "MANY": _SECRETS["AKIDMANY"],
        "ONE": _SECRETS["AKIDONE"],
        "ADAPTER_CONTROL_TOKEN": "canary-7f3a9c0e51d24b86",
    }
    store = (f"--model-store={tmp_path}/store", f"--cache-dir={tmp_path}/cache")
    flags = (f"--config={config}", *store, "--load-concurrency=1", COMPLETE)
    with embedded_adapter(*flags, environ=environ) as running:
        yield running


def invoke(adapter: RunningAdapter, key: str, model: str) -> None:
    keys = {"aws_access_key_id": key, "aws_secret_access_key": _SECRETS[key]}
    client = client_of(adapter.http, **keys)
    body = json.dumps(infer_body(1.0))
    client.invoke_endpoint(EndpointName="any", TargetModel=model, Body=body)


def test_cold_start_waits_for_one_load(keyed, gate):
    with ThreadPoolExecutor(_MODELS + 1) as pool:
        calls = [
            pool.submit(invoke, keyed, "AKIDMANY", f"many/{number}") for number in range(_MODELS)
        ]
        for number in range(_MODELS):  # their files are there: all of them wait for their loads
            keyed.wait_for("artifact.fetched", key=f"many/{number}")
        calls.append(pool.submit(invoke, keyed, "AKIDONE", "one/a"))
        keyed.wait_for("artifact.fetched", key="one/a")
        gate.open()
        for call in calls:
            call.result(100)
    order = [line["model_id"] for line in keyed.events("model.loaded")]
    assert order.index("one/a") <= 1, order
