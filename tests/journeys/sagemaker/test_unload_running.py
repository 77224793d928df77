"""DELETE of a model that still computes though its caller has left: 200 says that it has ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.asking import background
from tests.constants import HANG, UNLOAD
from tests.journeys.sagemaker.leaving import hang_up
from tests.processes import is_alive, stubs
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import CONFIG, write_python_model

pytestmark = pytest.mark.triton

_FOR_EVER = "import pathlib, time\npathlib.Path({mark!r}).touch()\ntime.sleep(3600)"


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def adapter(packages) -> Iterator[RunningAdapter]:
    """An unload waits 10 s at most for what computes, and has as long to end it."""
    flags = (f"--model-roots={packages}", "--memory-limit=1GiB", "--infer-timeout-seconds=60")
    with embedded_adapter(*flags, COMPLETE, constants={UNLOAD: 20, HANG: 2}) as adapter:
        yield adapter


@pytest.fixture
def root(packages, tmp_path) -> Path:
    """A folder of this test's own that packages are loaded from."""
    return packages / tmp_path.name


def test_endless_instances_end_before_delete_says_200(adapter, client, root):
    mark = root.with_suffix(".computes")
    many = "instance_group { kind: KIND_CPU count: 2 } version_policy { all {} }\n"
    for version in ("1", "2"):
        answer = _FOR_EVER.format(mark=str(mark))
        write_python_model(root / "many", answer=answer, config=CONFIG + many, version=version)
    client.load_model("many", root / "many")
    family = stubs(adapter, "many")
    assert len(family) == 4
    hang_up(adapter, "many", lambda: wait_until(mark.exists, 60, "the model computes"))

    reply = client.unload("many")

    assert reply.status == 200, reply.body
    assert not [pid for pid in family if is_alive(pid)]
    assert stubs(adapter, "many") == []
    killed = adapter.wait_for("model.processes_killed", model_id="many")["processes"]
    assert set(killed) <= set(family)


def test_model_that_ends_in_time_is_not_killed(adapter, client, root, gate):
    """Longer than an unload may stand still, and its caller has left; but it finalizes."""
    finalized = gate.path.with_name("finalized")
    package = write_python_model(
        root / "slow", answer=gate.statements, finalize=f"open({str(finalized)!r}, 'w').close()"
    )
    client.load_model("slow", package)
    hang_up(adapter, "slow", gate.wait_reached)
    with background(adapter) as others:
        deleting = others.ask(lambda c: c.unload("slow"))
        wait_until(lambda: client.get("/models/slow").status == 404, 60, "the unload has begun")
        with pytest.raises(TimeoutError):
            deleting.exception(3)
        gate.open()
        assert deleting.result().status == 200
    assert finalized.exists()


def test_a_finalize_that_never_ends_is_ended(adapter, client, root):
    package = write_python_model(root / "endless", finalize="import time\ntime.sleep(3600)")
    client.load_model("endless", package)
    (stub,) = stubs(adapter, "endless")
    client.unload_model("endless")
    assert not is_alive(stub)
