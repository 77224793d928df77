"""DELETE of a model that has never answered a request: no process is left that could."""

import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.asking import background, quoted
from tests.constants import UNLOAD
from tests.grpc_calls import calls_to, infer_request
from tests.processes import is_alive, stubs
from tests.running import COMPLETE, RunningAdapter, embedded_adapter, wait_until
from tests.trees import infer_body, write_python_model

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


def over_http(adapter: RunningAdapter, name: str, asked: Callable[[], None]) -> None:
    connection = http.client.HTTPConnection(adapter.http, timeout=60)
    connection.request("POST", f"/models/{quoted(name)}/invoke", json.dumps(infer_body(1.0)))
    asked()
    connection.close()


def over_grpc(adapter: RunningAdapter, name: str, asked: Callable[[], None]) -> None:
    with calls_to(adapter.grpc) as calls:
        calling = calls.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(
            infer_request(name, 1.0).SerializeToString(), timeout=60
        )
        asked()
        calling.cancel()


def over_a_stream(adapter: RunningAdapter, name: str, asked: Callable[[], None]) -> None:
    with calls_to(adapter.grpc) as calls:
        stream = calls.stream([infer_request(name, 1.0)])
        asked()
        stream.cancel()
        with pytest.raises(grpc.RpcError):
            next(stream)


WAYS = {
    "over-http": over_http,
    "through-the-proxy": over_grpc,
    "through the fallback": over_grpc,  # it has another name in Triton
    "over-a-stream": over_a_stream,
}


def test_unload_ends_though_request_was_never_answered(adapter, tmp_path):
    """A load and a stop follow."""
    processes: list[int] = []
    with adapter.client() as client, background(adapter) as others:
        for name, ask in WAYS.items():
            package, mark = silent_model(tmp_path / name)
            assert client.load(name, package).status == 200
            processes += stubs(adapter, adapter.models()[name]["triton_name"])
            ask(adapter, name, lambda mark=mark: wait_until(mark.exists, 60, "it was asked"))

        unloads = [others.ask(lambda c, n=n: c.delete(path(n))) for n in WAYS]

        assert [unload.result().status for unload in unloads] == [200] * len(WAYS)
        assert len(processes) == len(WAYS)
        assert not any(map(is_alive, processes))
        for name in WAYS:
            assert adapter.wait_for("model.requests_lost", model_id=name)["requests"] == 1
        assert adapter.state()["models"] == []
        assert adapter.events("model.left_running") == []

        name = "through the fallback"
        assert client.load(name, write_python_model(tmp_path / "mended")).status == 200
        answer = client.post(f"{path(name)}/invoke", infer_body(1.0))
        assert answer.status == 200, answer.body
        assert client.delete(path(name)).status == 200
        assert adapter.events("triton.exited") == []


def path(name: str) -> str:
    return f"/models/{quoted(name)}"
