"""A Triton that does not load models by call, which is Triton's default."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.modelmesh.tritons import KINDS, Elsewhere
from tests.running import EXAMPLES, Client, Reply, RunningAdapter, running_adapter, wait_until

pytestmark = pytest.mark.triton

ADVICE = "start Triton with --model-control-mode=explicit"
NOT_EXPLICIT = pytest.mark.parametrize("mode", ["none", "poll"])


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    folder = Path(tempfile.mkdtemp(prefix="cm-"))
    triton = Elsewhere(folder)
    yield triton
    triton.stop()
    shutil.rmtree(folder)


def flags_beside(elsewhere: Elsewhere) -> list[str]:
    return [
        *("--http=127.0.0.1:0", "--admin=127.0.0.1:0"),
        *(f"--triton-{kind}={getattr(elsewhere, kind)}" for kind in KINDS),
        *(f"--repository={elsewhere.repository}", f"--model-roots={EXAMPLES}"),
    ]


def ask(address: str, method: str, path: str, body: object = None) -> Reply:
    with Client(address) as client:
        return client.request(method, path, body)


def load(adapter: RunningAdapter, name: str) -> Reply:
    body = {"model_name": name, "url": str(EXAMPLES / "identity")}
    return ask(adapter.http, "POST", "/models", body)


def readiness(adapter: RunningAdapter) -> tuple[int, str]:
    reply = ask(adapter.admin, "GET", "/readyz")
    return reply.status, reply.json().get("reason", "")


def wait_until_ready(adapter: RunningAdapter) -> None:
    wait_until(lambda: readiness(adapter)[0] == 200, 30, "the adapter is ready")


def wait_for_advice(adapter: RunningAdapter) -> None:
    wait_until(lambda: ADVICE in readiness(adapter)[1], 30, "the reason names the option")
    assert readiness(adapter)[0] == 503
    assert ask(adapter.http, "GET", "/ping").status == 503


@NOT_EXPLICIT
def test_ready_and_load_name_the_missing_option(elsewhere, mode):
    """The package is fine: 400 would have its owner look for a fault in it."""
    elsewhere.start(mode)
    with running_adapter(*flags_beside(elsewhere)) as adapter:
        wait_for_advice(adapter)
        assert ADVICE in adapter.wait_for("triton.not_explicit")["reason"]
        reply = load(adapter, "m")
        assert (reply.status, reply.code) == (503, "BackendUnavailable")
        assert ADVICE in reply.error
        assert adapter.state()["models"] == []


def test_adapter_follows_the_mode_of_restarted_triton(elsewhere):
    elsewhere.start("explicit")
    with running_adapter(*flags_beside(elsewhere)) as adapter:
        wait_until_ready(adapter)
        assert load(adapter, "m").status == 200

        elsewhere.stop()
        elsewhere.start("none")
        wait_for_advice(adapter)

        elsewhere.stop()
        elsewhere.start("explicit")
        wait_until_ready(adapter)
        assert load(adapter, "other").status == 200


@NOT_EXPLICIT
def test_adapter_adopts_models_before_implicit_triton(elsewhere, mode):
    """Such a Triton loads what a killed adapter has staged, and serves it."""
    elsewhere.start("explicit")
    with running_adapter(*flags_beside(elsewhere)) as killed:
        assert load(killed, "m").status == 200
        killed.stop(signal.SIGKILL)
    elsewhere.stop()
    elsewhere.start(mode)
    with running_adapter(*flags_beside(elsewhere)) as adapter:
        wait_for_advice(adapter)
        assert [model["model_id"] for model in adapter.state()["models"]] == ["m"]
