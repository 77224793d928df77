"""DELETE of a model that has never answered a request: no process is left that could."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.asking import background
from tests.constants import UNLOAD
from tests.journeys.sagemaker.leaving import cancel_rpc, hang_up, leave_stream
from tests.processes import is_alive, stubs
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import write_python_model

pytestmark = pytest.mark.triton


@pytest.fixture
def adapter(tmp_path) -> Iterator[RunningAdapter]:
    """Its drain may take longer than the end of this fixture, or of any test, waits for it."""
    flags = (f"--model-roots={tmp_path}", "--grpc=127.0.0.1:0", "--memory-limit=1GiB", COMPLETE)
    times = ("--infer-timeout-seconds=60", "--drain-timeout-seconds=100")
    with embedded_adapter(*flags, *times, constants={UNLOAD: 16}) as adapter:
        yield adapter


def silent_model(folder: Path) -> tuple[Path, Path]:
    """A package whose `execute` returns None, and a file that is there once it has."""
    mark = folder / "asked"
    write_python_model(folder, imports="import pathlib")
    model = folder / "1" / "model.py"
    said = "return [self.answer(r) for r in requests]"
    text = model.read_text()
    assert said in text
    model.write_text(text.replace(said, f"pathlib.Path({str(mark)!r}).touch()"))
    return folder, mark


WAYS = {
    "over-http": hang_up,
    "through-the-proxy": cancel_rpc,
    "through the fallback": cancel_rpc,  # it has another name in Triton
    "over-a-stream": leave_stream,
}


def test_unload_ends_though_request_was_never_answered(adapter, tmp_path):
    """A load and a stop follow."""
    processes: list[int] = []
    with adapter.client() as client, background(adapter) as others:
        for name, ask in WAYS.items():
            package, mark = silent_model(tmp_path / name)
            client.load_model(name, package)
            processes += stubs(adapter, adapter.models()[name]["triton_name"])
            ask(adapter, name, lambda mark=mark: wait_until(mark.exists, 60, "it was asked"))

        unloads = [others.ask(lambda c, n=n: c.unload(n)) for n in WAYS]

        assert [unload.result().status for unload in unloads] == [200] * len(WAYS)
        assert len(processes) == len(WAYS)
        assert not any(map(is_alive, processes))
        for name in WAYS:
            assert adapter.wait_for("model.requests_lost", model_id=name)["requests"] == 1
        assert adapter.state()["models"] == []
        assert adapter.events("model.left_running") == []

        name = "through the fallback"
        client.load_model(name, write_python_model(tmp_path / "mended"))
        answer = client.invoke(name)
        assert answer.status == 200, answer.body
        client.unload_model(name)
        assert adapter.events("triton.exited") == []
