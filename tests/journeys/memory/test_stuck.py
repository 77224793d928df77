"""Loads that Triton never answers: their python process is killed while Triton asks it for the
configuration (docs/design/triton.md). Each keeps one of Triton's four load threads for good.
"""

import time
from pathlib import Path

import pytest

from tests.asking import background, model_names, triton_index
from tests.journeys.memory.models import check_agreement, write_eater
from tests.running import Client, Reply, RunningAdapter, embedded_adapter, wait_until

pytestmark = [
    pytest.mark.triton,
    pytest.mark.of_triton("2.51", "2.73", "loads that it never answers"),
]

_KILLED_AT_IMPORT = """\
import os, time
time.sleep(0.3)
os.kill(os.getpid(), 9)
"""
# What is known of beforehand is loaded side by side.
_DECLARES = "16MiB"
_PATIENCE_SECONDS = 100  # and not the 350 that a load may take


def write_sound(folder: Path) -> Path:
    return write_eater(folder, 1, declares=_DECLARES)


def write_deadly(folder: Path) -> Path:
    return write_eater(folder, 1, declares=_DECLARES, imports=_KILLED_AT_IMPORT)


def timed_load(client: Client, name: str, url: Path) -> tuple[Reply, float]:
    begun = time.monotonic()
    return client.load(name, url), time.monotonic() - begun


def check_given_up(reply: Reply, seconds: float, name: str) -> None:
    body = reply.json()
    assert (reply.status, body["code"], body["model_name"]) == (400, "InvalidModel", name), body
    assert "python process" in body["error"]
    assert "ended while the model was being loaded" in body["error"]
    assert seconds < _PATIENCE_SECONDS


def is_serving(adapter: RunningAdapter, name: str) -> bool:
    with adapter.client() as client:
        return client.invoke(name).status == 200


def test_stuck_load_is_given_up_and_reloads(tmp_path):
    sound, package = write_sound(tmp_path / "sound"), write_deadly(tmp_path / "changing")
    with (
        embedded_adapter(f"--model-roots={tmp_path}") as adapter,
        adapter.client() as client,
        background(adapter) as others,
    ):
        stuck = others.ask(lambda c: timed_load(c, "mended", package))
        wait_until(lambda: "LOADING" in triton_index(adapter).values(), 60, "Triton has begun")
        client.load_model("other", sound)
        check_given_up(*stuck.result(), "mended")
        assert model_names(client) == ["other"]
        check_agreement(adapter, stuck={"mended"})

        write_sound(package)
        client.load_model("mended", package)

        assert is_serving(adapter, "mended")
        assert is_serving(adapter, "other")
        assert model_names(client) == ["mended", "other"]
        check_agreement(adapter, stuck={"mended"})
        client.unload_model("mended")
        assert client.get("/models/mended").status == 404
        check_agreement(adapter, stuck={"mended"})


@pytest.mark.nightly
def test_stuck_load_threads_restart_triton_with_models(tmp_path):
    sound, deadly = write_sound(tmp_path / "sound"), write_deadly(tmp_path / "deadly")
    names = [f"dead-{number}" for number in range(4)]
    with (
        embedded_adapter(f"--model-roots={tmp_path}") as adapter,
        adapter.client() as client,
        background(adapter) as others,
    ):
        for name in ("one", "team/two"):
            client.load_model(name, sound)
        asked = {n: others.ask(lambda c, n=n: timed_load(c, n, deadly)) for n in names}
        for name, each in asked.items():
            check_given_up(*each.result(), name)

        adapter.wait_for("triton.ended")
        adapter.wait_for("triton.restarted", restarts=1)
        adapter.wait_for("triton.models_vanished")

        wait_until(lambda: model_names(client) == ["one", "team/two"], 60, "both are back")
        assert is_serving(adapter, "one")
        assert is_serving(adapter, "team/two")
        with Client(adapter.admin) as admin:
            assert admin.get("/readyz").status == 200
        check_agreement(adapter)
        client.load_model("dead-0", sound)
        assert is_serving(adapter, "dead-0")
        check_agreement(adapter)
