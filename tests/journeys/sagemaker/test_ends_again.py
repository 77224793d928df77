"""--on-triton-restart=reload and auto, with a Triton that ends again and again."""

import os
import signal

import pytest

from tests.asking import model_names
from tests.processes import tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = [pytest.mark.triton, pytest.mark.nightly]

_NAMES = [f"m{number}" for number in range(5)]
# Once the file is there, its python process ends the server that loads it.
_DEADLY = """
import os, pathlib, signal, time
if pathlib.Path({mark!r}).exists():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


def kill_triton(adapter: RunningAdapter) -> None:
    os.kill(tritonserver(adapter), signal.SIGKILL)


def ends_noticed(adapter: RunningAdapter) -> int:
    """One that ends before its start was noticed counts as a restart that failed: housekeeping may
    find its models gone, and begin their loads, just before.
    """
    return sum(len(adapter.events(event)) for event in ("triton.exited", "triton.restart_failed"))


def kill_twice(adapter: RunningAdapter) -> None:
    """The second time at the first load that brings a model back. Both ends are known by then."""
    seen, ends = len(adapter.events("model.loading")), ends_noticed(adapter)
    kill_triton(adapter)
    wait_until(lambda: len(adapter.events("model.loading")) > seen, 60, "they are brought back")
    kill_triton(adapter)
    wait_until(lambda: ends_noticed(adapter) >= ends + 2, 60, "both are noticed")


def served(client: Client, names: list[str]) -> bool:
    """These are listed and answer. Until it is asked, a Triton that was killed has them all."""
    if model_names(client) != names:
        return False
    return all(client.invoke(n).status == 200 for n in names)


def test_models_return_when_triton_ends_twice(tmp_path):
    for name in _NAMES:
        write_python_model(tmp_path / name)
    flags = (f"--model-roots={tmp_path}", "--on-triton-restart=reload")
    with embedded_adapter(*flags, COMPLETE) as adapter, adapter.client() as client:
        for name in _NAMES:
            client.load_model(name, tmp_path / name)

        kill_twice(adapter)

        wait_until(lambda: served(client, _NAMES), 90, "all are back")
        assert adapter.events("model.return_given_up") == []


def test_load_that_ends_triton_is_given_up(tmp_path):
    """The others come back."""
    mark = tmp_path / "mark"
    others = _NAMES[:2]
    for name in others:
        write_python_model(tmp_path / name)
    write_python_model(tmp_path / "deadly", initialize=_DEADLY.format(mark=str(mark)))
    flags = (f"--model-roots={tmp_path}", "--on-triton-restart=reload")
    with embedded_adapter(*flags, COMPLETE) as adapter, adapter.client() as client:
        for name in ("deadly", *others):
            client.load_model(name, tmp_path / name)
        mark.touch()
        kill_triton(adapter)

        adapter.wait_for("model.return_given_up", 120, model_id="deadly")
        wait_until(lambda: served(client, others), 60, "the others are back")

        assert client.invoke("deadly").status == 404
        mark.unlink()
        # a platform loads whatever is missing, so it is refused; a person tries it now
        assert client.load("deadly", tmp_path / "deadly").status == 503
        assert client.post("/v2/repository/models/deadly/load").status == 200


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "when"),
    [  # a caller's own load that ended Triton is not sent again
        ("load", "request"),
        ("load_at_start", "initialize"),
        ("load_at_start", "request"),
    ],
)
def test_model_that_keeps_ending_triton_is_given_up(tmp_path, how, when):
    """The others stay."""
    deadly = {
        "initialize": {"initialize": _DEADLY.format(mark="/")},
        "request": {"answer": _DEADLY.format(mark="/")},
    }[when]
    write_python_model(tmp_path / "good" / "healthy")
    write_python_model(tmp_path / "deadly", **deadly)
    flags = [f"--model-roots={tmp_path}", f"--load-at-start={tmp_path}/good/*"]
    if how == "load_at_start":
        flags.append(f"--load-at-start={tmp_path}/deadly")
    with embedded_adapter(*flags, COMPLETE) as adapter, adapter.client() as client:
        if how == "load":
            wait_until(lambda: served(client, ["healthy"]), 60, "it is loaded")
            client.load_model("deadly", tmp_path / "deadly")

        def given_up() -> bool:
            client.invoke("healthy")
            if when == "request":
                client.invoke("deadly")
            return bool(adapter.events("model.return_given_up"))

        wait_until(given_up, 240, "it is given up")
        assert {line["model_id"] for line in adapter.events("model.return_given_up")} == {"deadly"}
        wait_until(lambda: served(client, ["healthy"]), 60, "the other is back")
        ends = ends_noticed(adapter)
        assert ends <= 5

        assert client.invoke("deadly").status == 404
        [lost] = adapter.state()["forgotten"]
        assert (lost["model_id"], lost["is_given_up"]) == ("deadly", True)

        # the adapter loads it no more, also after another end
        loads = len([e for e in adapter.events("model.loading") if e["model_id"] == "deadly"])
        kill_triton(adapter)
        wait_until(lambda: served(client, ["healthy"]), 90, "the other is back again")
        assert ends_noticed(adapter) == ends + 1
        loading = [e for e in adapter.events("model.loading") if e["model_id"] == "deadly"]
        assert len(loading) == loads
