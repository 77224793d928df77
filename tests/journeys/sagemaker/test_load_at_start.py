"""--load-at-start: models that are there without a load call, and are there again."""

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.processes import tritonserver
from tests.running import COMPLETE, EMBEDDED, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


RELOAD = {"parameters": {"force_reload": True}}


def invoked(client: Client, name: str) -> int:
    return client.invoke(name).status


def reason(admin: Client) -> str | None:
    reply = admin.get("/readyz")
    return None if reply.status == 200 else reply.json()["reason"]


def wanted(admin: Client) -> dict[str, str]:
    return {each["model_id"]: each["state"] for each in admin.get("/debug/state").json()["wanted"]}


def counted(admin: Client) -> dict[str, float]:
    page = admin.get("/metrics").body.decode()
    found = re.findall(r'^triton_adapter_models_wanted\{state="(\w+)"\} (\S+)$', page, re.MULTILINE)
    return {state: float(count) for state, count in found}


@contextmanager
def starting(*flags: str) -> Iterator[tuple[RunningAdapter, Client]]:
    """From the moment on when Triton is there."""
    with embedded_adapter(*flags, COMPLETE) as adapter, Client(adapter.admin) as admin:
        yield adapter, admin


def test_probes_are_ready_with_every_wanted_model(tmp_path, gate):
    write_python_model(tmp_path / "quick")
    write_python_model(tmp_path / "slow", initialize=gate.statements)
    flags = (
        f"--model-roots={tmp_path}",
        f"--load-at-start={tmp_path}/quick",
        f"--load-at-start=other={tmp_path}/slow",
    )
    with starting(*flags) as (adapter, admin), adapter.client() as client:
        gate.wait_reached()
        wait_until(lambda: wanted(admin)["quick"] == "loaded", 60, "the quick one is loaded")
        assert admin.get("/startup").status == 200
        assert client.get("/ping").status == 503
        assert reason(admin) == "1 of 2 models are to be loaded: 'other' (waiting)"
        assert counted(admin) == {"loaded": 1, "missing": 1, "unloaded": 0}
        assert client.invoke("quick").status == 200

        gate.open()
        adapter.wait_for("adapter.models_loaded", models=2)
        assert (reason(admin), client.get("/ping").status) == (None, 200)
        assert counted(admin) == {"loaded": 2, "missing": 0, "unloaded": 0}
        assert client.invoke("other").status == 200


def test_failing_wanted_model_is_named_and_retried(tmp_path):
    write_python_model(tmp_path / "good")
    write_python_model(tmp_path / "bad", initialize='raise ValueError("no weights yet")')
    flags = (
        f"--model-roots={tmp_path}",
        f"--load-at-start={tmp_path}/good",
        f"--load-at-start={tmp_path}/bad",
    )
    with starting(*flags) as (adapter, admin), adapter.client() as client:
        adapter.wait_for("model.load_failed", model_id="bad")
        said = re.compile(r"^1 of 2 models are to be loaded: 'bad' \(.*no weights yet", re.DOTALL)
        wait_until(lambda: said.match(str(reason(admin))) is not None, 60, "it says why")

        write_python_model(tmp_path / "bad")
        wait_until(lambda: reason(admin) is None, 60, "it is ready")
        assert client.invoke("bad").status == 200


@pytest.mark.parametrize("restart", ["forget", "reload"])
@pytest.mark.nightly
def test_unloaded_model_stays_away_after_tritons_death(tmp_path, restart):
    for name in ("kept", "gone", "changed"):
        write_python_model(tmp_path / name)
    flags = (
        f"--model-roots={tmp_path}",
        f"--load-at-start={tmp_path}/*",
        f"--on-triton-restart={restart}",
    )
    with starting(*flags) as (adapter, admin), adapter.client() as client:
        adapter.wait_for("adapter.models_loaded")
        shutil.rmtree(tmp_path / "gone")
        assert client.post("/v2/repository/models/gone/unload", {}).status == 200
        client.unload_model("changed")
        assert client.post("/v2/repository/models/changed/load", {}).status == 200
        assert client.post("/v2/repository/models/kept/load", RELOAD).status == 200
        assert (reason(admin), counted(admin)) == (None, {"loaded": 2, "missing": 0, "unloaded": 1})

        os.kill(tritonserver(adapter), signal.SIGKILL)
        adapter.wait_for("triton.exited")  # it is not ready by then

        def is_ready() -> bool:
            if reason(admin) is not None:
                return False
            statuses = [invoked(client, name) for name in ("kept", "changed", "gone")]
            assert statuses == [200, 200, 404], "ready without its models"
            return True

        wait_until(is_ready, 60, "it is ready again")
        assert client.get("/ping").status == 200
        assert wanted(admin) == {"changed": "loaded", "gone": "unloaded", "kept": "loaded"}
        assert counted(admin) == {"loaded": 2, "missing": 0, "unloaded": 1}


def test_unloading_broken_model_makes_adapter_ready(tmp_path):
    write_python_model(tmp_path / "good")
    write_python_model(tmp_path / "bad", initialize='raise ValueError("no weights yet")')
    flags = (f"--model-roots={tmp_path}", f"--load-at-start={tmp_path}/*")
    with starting(*flags) as (adapter, admin), adapter.client() as client:
        adapter.wait_for("model.loaded", model_id="good")
        wait_until(lambda: wanted(admin)["bad"] == "failed", 60, "the broken one has failed")
        shutil.rmtree(tmp_path / "bad")
        reply = client.unload("bad")
        assert reply.status in {200, 404}  # 200: it has ended another try to load it
        if reply.status == 404:
            assert reply.error == (
                "model 'bad' is not loaded; its unload ends the adapter's own attempts to load it"
            )

        assert (reason(admin), client.get("/ping").status) == (None, 200)
        assert wanted(admin) == {"bad": "unloaded", "good": "loaded"}
        adapter.wait_for("adapter.wanted_no_more", model_id="bad")


def test_missing_folder_ends_the_start(tmp_path):
    adapter = RunningAdapter(*EMBEDDED, f"--model-roots={tmp_path}", "--load-at-start=models/*")

    adapter.process.wait(60)

    [failed] = adapter.events("adapter.failed")
    assert "load_at_start" in failed["reason"]
    assert adapter.stop() == 1


def test_a_folder_without_a_model_is_warned_of(tmp_path):
    """An agent may fill it later, so it does not end the start."""
    with starting(f"--model-roots={tmp_path}", f"--load-at-start={tmp_path}/*") as (adapter, _):
        [warned] = adapter.events("adapter.nothing_to_load")
        assert warned["load_at_start"] == [f"{tmp_path}/*"]
