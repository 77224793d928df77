"""What outlives the adapter, and what does not outlive Triton."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter.packages.sizes_file import FILE_NAME
from tests.asking import model_names, quoted, triton_index
from tests.journeys.memory.models import MIB, check_agreement, counted, write_eater
from tests.processes import beside, triton_client, tritonserver
from tests.running import (
    COMPLETE,
    EMBEDDED,
    Client,
    RunningAdapter,
    embedded_adapter,
    running_adapter,
    wait_until,
)

pytestmark = pytest.mark.triton

_NAMES = ("one", "team/two")
_LIMIT = "--memory-limit=1GiB"
_NOTICED_SECONDS = 2


@pytest.fixture(scope="module")
def triton() -> Iterator[RunningAdapter]:
    """A Triton of somebody else's, which starts it again when it dies."""
    with embedded_adapter(COMPLETE) as adapter:
        yield adapter


@pytest.fixture
def package(tmp_path) -> Path:
    return write_eater(tmp_path / "m", 16, declares="64MiB")


def load_all(client: Client, package: Path) -> None:
    for name in _NAMES:
        client.load_model(name, package)


def invoke(client: Client, name: str) -> int:
    return client.invoke(name).status


def check_served_and_unloaded(adapter: RunningAdapter, client: Client) -> None:
    assert model_names(client) == sorted(_NAMES)
    assert [invoke(client, name) for name in _NAMES] == [200, 200]
    check_agreement(adapter)
    for name in _NAMES:
        client.unload_model(name)
    assert adapter.state()["models"] == []
    check_agreement(adapter)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_restarted_adapter_serves_what_was_loaded(triton, package, number):
    flags = (f"--model-roots={package.parent}", _LIMIT)
    with beside(triton, *flags) as first, first.client() as client:
        load_all(client, package)
        before = first.state()
        first.stop(number)
    ready = {name for name, state in triton_index(triton).items() if state == "READY"}
    assert len(ready) == len(_NAMES)

    with beside(triton, *flags) as second, second.client() as client:
        after = second.state()

        assert {line["model_id"] for line in second.events("model.adopted")} == set(_NAMES)
        assert by_id(after) == by_id(before)
        assert held(after) == held(before) == 2 * 64 * MIB
        for name in _NAMES:
            assert client.load(name, package).status == 409
        check_served_and_unloaded(second, client)


def by_id(state: dict[str, Any]) -> dict[str, Any]:
    """What an adapter says of each model, but for what only the one knows that loaded it."""
    passing = {"state_seconds", "idle_seconds", "served", "basis"}
    return {
        model["model_id"]: {key: value for key, value in model.items() if key not in passing}
        for model in state["models"]
    }


def held(state: dict[str, Any]) -> int:
    return sum(book["used_by_models_bytes"] for book in state["memory"]["devices"].values())


def test_measured_sizes_are_known_to_next_run(tmp_path):
    package = write_eater(tmp_path / "models" / "m", 128)
    repository = tmp_path / "repository"
    flags = (
        *(f"--model-roots={package.parent}", f"--repository={repository}"),
        *("--memory-source=host", "--memory-limit=512MiB", "--memory-reserve=0"),
    )
    with running_adapter(*EMBEDDED, COMPLETE, *flags) as first, first.client() as client:
        client.load_model("m", package)
        wait_until((repository / FILE_NAME).exists, 60, "the size is written down")
        first.stop(signal.SIGKILL)

    with running_adapter(*EMBEDDED, COMPLETE, *flags) as second, second.client() as client:
        assert model_names(client) == []  # that Triton has ended with its adapter
        client.load_model("again", package)
        assert [predicted(second, upto) for upto in ("0.9", "1.1", "+Inf")] == [0, 1, 1]
        check_agreement(second)


def predicted(adapter: RunningAdapter, at_most: str) -> float:
    """Loads whose size was predicted by what had been learned, at most so much of the truth."""
    return counted(
        adapter, f'triton_adapter_memory_prediction_ratio_bucket{{basis="learned",le="{at_most}"}}'
    )


@pytest.mark.parametrize("mode", ["forget", "reload"])
@pytest.mark.races
def test_restarted_triton_is_noticed_at_once(triton, package, mode):
    """The embedded one is: test_killed.py, test_ping.py."""
    flags = (f"--model-roots={package.parent}", _LIMIT, f"--on-triton-restart={mode}")
    with beside(triton, *flags) as adapter, adapter.client() as client:
        load_all(client, package)
        restarts = len(triton.events("triton.restarted")) + 1
        os.kill(tritonserver(triton), signal.SIGKILL)
        assert invoke(client, "one") in {503, 404}

        triton.wait_for("triton.restarted", restarts=restarts)
        adapter.wait_for("triton.models_vanished", _NOTICED_SECONDS)

        if mode == "reload":
            wait_until(lambda: model_names(client) == sorted(_NAMES), 60, "both are back")
        else:
            assert model_names(client) == []
            assert [invoke(client, name) for name in _NAMES] == [404, 404]
            assert held(adapter.state()) == 0
            wait_until(lambda: not folders(adapter), 60, "what was staged is cleared away")
            load_all(client, package)
        check_served_and_unloaded(adapter, client)


def folders(adapter: RunningAdapter) -> list[Path]:
    return [path for path in adapter.repository.iterdir() if path.is_dir()]


@pytest.mark.races
def test_list_soon_drops_what_triton_lost(triton, package):
    flags = (f"--model-roots={package.parent}", _LIMIT)
    with beside(triton, *flags) as adapter, adapter.client() as client:
        load_all(client, package)
        with triton_client(triton) as raw:
            assert raw.post("/v2/repository/models/one/unload", {}).status == 200

        adapter.wait_for("triton.models_vanished", 2 * _NOTICED_SECONDS, models=["one"])

        assert model_names(client) == ["team/two"]
        assert invoke(client, "one") == 404
        wait_until(lambda: len(folders(adapter)) == 1, 60, "what was staged is cleared away")
        check_agreement(adapter)
        assert client.delete(f"/models/{quoted('team/two')}").status == 200
