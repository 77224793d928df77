"""triton-adapter forget: what was learned of a model is learned anew."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.client.terminal import run
from tests.journeys.memory.models import MIB, write_eater
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

_LIMIT = 400 * MIB
_TOKEN = "sixteen-characters"  # noqa: S105 - of this test alone
# takes as many MiB as a file outside of the package says: the package stays the same
_INITIALIZE = """
import pathlib
self.held = numpy.ones(int(pathlib.Path({size!r}).read_text()) * 2**20, numpy.uint8)
"""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Iterator[RunningAdapter]:
    root = tmp_path_factory.getbasetemp()
    flags = ("--memory-source=host", f"--memory-limit={_LIMIT}", f"--model-roots={root}")
    with embedded_adapter(*flags, COMPLETE, environ={"ADAPTER_CONTROL_TOKEN": _TOKEN}) as adapter:
        yield adapter


@pytest.fixture
def client(adapter) -> Iterator[Client]:
    with adapter.client() as client:
        client.headers = {"Authorization": f"Bearer {_TOKEN}"}
        yield client
        for model in client.get("/models").json()["models"]:
            client.unload(model["modelName"])


class Package:
    """A package whose model takes another amount of memory each time, as its test likes."""

    def __init__(self, folder: Path) -> None:
        self._size = folder / "mebibytes"
        initialize = _INITIALIZE.format(size=str(self._size))
        self.path = write_eater(folder / "package", 0, initialize=initialize)

    def set_size(self, mebibytes: int) -> None:
        self._size.write_text(str(mebibytes))


@pytest.fixture
def package(tmp_path) -> Package:
    return Package(tmp_path)


def forget(adapter: RunningAdapter, name: str, *flags: str) -> tuple[int, str, str]:
    environ = {"ADAPTER_ADMIN": adapter.admin, "ADAPTER_CONTROL_TOKEN": _TOKEN}
    done = run("forget", name, *flags, environ=environ)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_too_large_model_is_tried_after_forget(adapter, client, package):
    package.set_size(600)
    for _ in range(2):
        refused = client.load("grown", package.path)
        assert (refused.status, refused.code) == (400, "ModelTooLarge")
    package.set_size(20)
    # nobody can know that it is smaller by now
    assert client.load("grown", package.path).code == "ModelTooLarge"

    code, out, err = forget(adapter, "grown")

    assert (code, err) == (0, "")
    assert out.startswith("grown: forgot that it ")
    assert "that it can never fit" in out
    client.load_model("grown", package.path)
    adapter.wait_for("memory.forgotten", model_id="grown")


def test_measured_size_is_forgotten(adapter, client, package):
    package.set_size(150)
    client.load_model("shrunk", package.path)
    client.unload_model("shrunk")
    client.load_model("beside", write_eater(package.path.parent / "beside", 230))
    package.set_size(20)
    assert "(measured)" in client.load("shrunk", package.path).error

    code, out, _ = forget(adapter, "shrunk", "--json")

    known = json.loads(out)
    assert code == 0
    assert known["bytes"]["host"] > 150 * MIB
    assert (known["is_measured"], known["was_too_large"]) == (True, False)
    client.load_model("shrunk", package.path)


def test_forget_refuses_unknown_names_and_callers(adapter):
    code, _, err = forget(adapter, "never-loaded")
    assert code == 1
    assert "404: nothing was learned of model 'never-loaded'" in err
    assert "is not the listener" not in err
    environ = {"ADAPTER_ADMIN": adapter.admin}
    refused = run("forget", "never-loaded", environ=environ)
    assert refused.returncode == 1
    assert b"401" in refused.stderr
    assert b"set ADAPTER_CONTROL_TOKEN to it" in refused.stderr
    with Client(adapter.admin) as admin:
        admin.headers = {"Authorization": f"Bearer {_TOKEN}"}
        reply = admin.post("/forget")
        assert (reply.status, reply.json()) == (
            400,
            {"error": "model_id: the name of a model is missing"},
        )
