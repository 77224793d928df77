"""Sudden deaths: of a model's process, of Triton, of the adapter. Afterwards all books agree, and
the next load works. Of a process killed at import: test_stuck.py.
"""

import http.client
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.asking import background, model_names
from tests.journeys.memory.models import check_agreement, write_eater
from tests.processes import beside, stubs, tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, unload_all, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

_NAMES = ("one", "two", "three", "four")
_SEED = 4
# What a caller may be told while an adapter lives, whatever else is under way.
_EXPECTED = {200, 404, 409, 503}


@pytest.fixture(scope="module")
def running(root) -> Iterator[RunningAdapter]:
    flags = (f"--model-roots={root}", "--on-triton-restart=forget", COMPLETE)
    with embedded_adapter(*flags) as adapter:
        yield adapter


@pytest.fixture
def folder(root, tmp_path) -> Path:
    return root / tmp_path.name


def invoke(client: Client, name: str = "m") -> int:
    return client.invoke(name).status


def check_next_load(adapter: RunningAdapter, package: Path) -> None:
    """Of the same name, of the package as it is now."""
    with adapter.client() as client:
        reply = client.load("m", package)
        assert reply.status == 200, reply.body
        assert invoke(client) == 200
        client.unload_model("m")


def test_process_killed_in_initialize_fails_its_load_alone(adapter, folder, gate):
    package = write_python_model(folder, initialize=gate.statements)
    with background(adapter) as others:
        loading = others.ask(lambda c: c.load("m", package))
        gate.wait_reached()
        (pid,) = stubs(adapter, "m")
        os.kill(pid, signal.SIGKILL)

        reply = loading.result()

    assert (reply.status, reply.code) == (400, "InvalidModel"), reply.body
    assert "A python process ended while the model was being loaded" in reply.error
    check_agreement(adapter)
    write_python_model(package)
    check_next_load(adapter, package)
    check_agreement(adapter)


@pytest.mark.of_triton("2.51", "2.73", "the words of its python backend")
def test_process_killed_in_inference_reloads(adapter, folder, gate):
    package = write_python_model(folder, answer=gate.statements)
    with adapter.client() as client, background(adapter) as others:
        client.load_model("dies", package)
        invoking = others.ask(lambda c: c.invoke("dies"))
        gate.wait_reached()
        (pid,) = stubs(adapter, "dies")
        os.kill(pid, signal.SIGKILL)

        reply = invoking.result()
        assert (reply.status, reply.code) == (500, "InferenceFailed")
        assert reply.error == (
            "Stub process 'dies_0' is not healthy. "
            "A python process of the model has ended: load it again, or unload it"
        )

        assert model_names(client) == []
        assert invoke(client, "dies") == 404
        gate.open()
        client.load_model("dies", package)
        assert invoke(client, "dies") == 200
        check_agreement(adapter)


@pytest.mark.parametrize("moment", ["load", "inference", "unload"])
def test_killed_triton_is_replaced_and_its_models_forgotten(adapter, folder, gate, moment):
    body = {"load": "initialize", "inference": "answer", "unload": "finalize"}[moment]
    package = write_python_model(folder, **{body: gate.statements})
    sound = write_python_model(folder.with_name(f"{folder.name}-sound"))
    restarts = len(adapter.events("triton.restarted")) + 1
    with adapter.client() as client, background(adapter) as others:
        client.load_model("bystander", sound)
        asked = begin(moment, client, others.ask, package)
        gate.wait_reached()
        os.kill(tritonserver(adapter), signal.SIGKILL)
        reply = asked.result()
        gate.open()

        assert reply.status in ({200, 503} if moment == "unload" else {503}), reply.body
        if moment == "load":
            why = b"Triton was killed by SIGKILL while it was loading model 'm'"
            assert why in reply.body
            assert b"docs/operations.md#after-a-restart-of-triton" in reply.body
        adapter.wait_for("triton.restarted", restarts=restarts)
        wait_until(lambda: adapter.state()["models"] == [], 60, "all are forgotten")
        assert model_names(client) == []
        assert invoke(client, "bystander") == 404
    wait_until(lambda: not list(adapter.repository.iterdir()), 60, "nothing is staged")
    check_next_load(adapter, sound)
    check_agreement(adapter)


def begin(moment: str, client: Client, ask: Any, package: Path) -> "Future[Any]":
    if moment == "load":
        return ask(lambda c: c.load("m", package))
    client.load_model("m", package)
    if moment == "unload":
        return ask(lambda c: c.unload("m"))
    return ask(lambda c: c.invoke("m"))


def keep_busy(adapter: RunningAdapter, seed: int, package: Path) -> set[int]:
    """Load, invoke and unload at random until nobody answers; the statuses that were no wonder
    are left out.
    """
    dice, seen = Random(seed), set()
    with adapter.client() as client:
        while True:
            name = dice.choice(_NAMES)
            try:
                match dice.randrange(3):
                    case 0:
                        seen.add(client.load(name, package).status)
                    case 1:
                        seen.add(invoke(client, name))
                    case _:
                        seen.add(client.unload(name).status)
            except (OSError, http.client.HTTPException):
                return seen - _EXPECTED


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_next_adapter_mends_what_killed_one_left(tmp_path):
    """It was killed at any moment."""
    kill_at_moments(range(3), _SEED, tmp_path)


def kill_at_moments(moments: Iterable[int], seed: int, root: Path) -> None:
    """One kill, and one new adapter, for each of `moments`."""
    package = write_eater(root / "models" / "m", 8, declares="48MiB")
    flags = (f"--model-roots={root / 'models'}", "--memory-limit=1GiB")
    dice = Random(seed)
    with embedded_adapter(COMPLETE) as triton, ThreadPoolExecutor(3) as pool:
        for moment in moments:
            with beside(triton, *flags) as adapter:
                check_agreement(adapter)
                check_next_load(adapter, package)
                busy = [pool.submit(keep_busy, adapter, moment * 3 + n, package) for n in range(3)]
                threading.Event().wait(dice.uniform(0.1, 4))
                adapter.stop(signal.SIGKILL)
                assert [each.result() for each in busy] == [set()] * 3
        with beside(triton, *flags) as adapter:
            check_agreement(adapter)
            check_next_load(adapter, package)
            unload_all(adapter)
            check_agreement(adapter)
            assert adapter.stop() == 0
        assert not any(path.is_dir() for path in triton.repository.iterdir())
