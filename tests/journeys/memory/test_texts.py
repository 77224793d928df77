"""Each labelled failure text, raised by a real python model: 507 exactly where its label says."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.asking import model_names
from tests.grpc_calls import calls_to
from tests.journeys.memory.failing_models import (
    Label,
    failing,
    labels,
    write_failing_answers,
    write_failing_load,
)
from tests.running import COMPLETE, Reply, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

Failure = Callable[[Label], tuple[str, str]]
_FRAMES = "\n" + "  File model.py, line 31, in forward\n" * 4_200  # 150 KB
_AT_ONCE = 4  # loads that Triton works on at a time
_CUT = re.compile(r" \.\.\. \(\d+ characters cut\)$")
_ENVELOPE = 500  # what may stand before the text: Triton's words, the class
# Of a C++ backend's failed load Triton says more than `Internal: `, and of a load that never began
# less. A python model's always comes as `load failed for model ...: Internal: <class>: <text>`, so
# these come inside that, and what they are about is the same.


@dataclass(frozen=True)
class Outcome:
    """`text` is None of a good answer. Over gRPC it begins with its noun and may be cut."""

    is_out_of_memory: bool
    text: str | None


Infer = Callable[[RunningAdapter, str, dict[str, object]], Outcome]


def http_outcome(reply: Reply) -> Outcome:
    if reply.status == 200:
        return Outcome(is_out_of_memory=False, text=None)
    assert 400 <= reply.status < 600
    return Outcome(reply.status == 507, reply.error)


def infer_by_http(adapter: RunningAdapter, name: str, body: dict[str, object]) -> Outcome:
    with adapter.client(120) as client:
        return http_outcome(client.post(f"/models/{name}/invoke", body))


def infer_by_grpc(adapter: RunningAdapter, name: str, body: dict[str, object]) -> Outcome:
    with calls_to(adapter.grpc) as calls:
        return grpc_outcome(lambda: calls.call("ModelInfer", tensors(name, body)))


def grpc_outcome(call: Callable[[], object]) -> Outcome:
    try:
        call()
    except grpc.RpcError as error:
        failure = error
    else:
        return Outcome(is_out_of_memory=False, text=None)
    noun, _, text = failure.details().partition(": ")
    # Triton's own queue has the same code, and another noun, which UNAVAILABLE of a model has too
    is_exhausted = failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert is_exhausted == (noun == "OutOfMemory") or noun == "BackendUnavailable", failure
    return Outcome(noun == "OutOfMemory", text)


def tensors(name: str, body: dict[str, object]) -> pb.ModelInferRequest:
    [tensor] = body["inputs"]
    contents = {"bytes_contents": [text.encode() for text in tensor["data"]]}
    shown = {"name": tensor["name"], "datatype": "BYTES", "shape": tensor["shape"]}
    return pb.ModelInferRequest(model_name=name, inputs=[shown | {"contents": contents}])


@pytest.fixture(scope="module")
def running(root) -> Iterator[RunningAdapter]:
    """Memory is not read, and another model is loaded: the words alone decide."""
    with beside_another_model("--memory-source=off", root=root) as adapter:
        yield adapter


@contextmanager
def beside_another_model(*flags: str, root: Path) -> Iterator[RunningAdapter]:
    """An adapter whose loads do not wait for each other, with a model of its own."""
    flags = (*flags, COMPLETE, f"--load-concurrency={_AT_ONCE}", f"--model-roots={root}")
    with embedded_adapter(*flags) as adapter:
        with adapter.client() as client:
            client.load_model("other", write_failing_answers(root / "other"))
        yield adapter


@pytest.fixture(scope="module")
def raiser(running, root) -> str:
    with running.client() as client:
        client.load_model("raiser", write_failing_answers(root / "raiser"))
    return "raiser"


def raised(label: Label) -> tuple[str, str]:
    return label.raised


def raised_long(label: Label) -> tuple[str, str]:
    """At the end of a long traceback, as of an exception that was the cause of another."""
    return "RuntimeError", f"{_FRAMES}{label.inner}\n{_FRAMES}"


def answered(label: Label) -> tuple[str, str]:
    """An exception where Triton's words around it say so, else an error of the one request."""
    return label.raised if label.has_envelope else (str(label.status), label.text)


def answered_long(label: Label) -> tuple[str, str]:
    """What Triton says itself it says first."""
    return raised_long(label) if label.has_envelope else (str(label.status), label.text + _FRAMES)


def is_as_labelled(label: Label, outcome: Outcome, said: str) -> bool:
    """The words are all there; of a text that gRPC's metadata cannot hold, the first ones."""
    said, told = said.strip().removesuffix(";"), outcome.text or ""
    if (mark := _CUT.search(told)) is not None:
        told = told[: mark.start()]
        said = said[: max(0, len(told) - _ENVELOPE)]
    return said in told and outcome.is_out_of_memory == label.is_oom


@pytest.mark.parametrize("infer", [infer_by_http, infer_by_grpc])
@pytest.mark.parametrize(
    ("failure", "each"),
    [
        (answered, 3),
        (answered_long, 20),
        pytest.param(answered, 1, marks=pytest.mark.nightly),
        pytest.param(answered_long, 5, marks=pytest.mark.nightly),
    ],
)
def test_failed_inference_is_507_as_labelled(running, raiser, infer, failure, each):
    cases = sorted(labels("infer"), key=lambda label: label.is_oom)[::each]
    wrong = []
    for label in cases:
        how, text = failure(label)
        outcome = infer(running, raiser, failing(how, text))
        if not is_as_labelled(label, outcome, text):
            wrong.append((label, str(outcome)[:500]))
        # a second failure in a row is doubted where memory is not read
        assert infer(running, raiser, failing("answer", "")).text is None

    assert wrong == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("failure", "each"),
    [
        (raised, 40),
        (raised_long, 100),
        pytest.param(raised, 1, marks=pytest.mark.nightly),
        pytest.param(raised_long, 1, marks=pytest.mark.nightly),
    ],
)
def test_failed_load_is_507_as_labelled(running, root, tmp_path, failure, each):
    """Some of both labels; all in the nightly run."""
    cases = sorted(labels("load"), key=lambda label: label.is_oom)[::each]
    texts = [failure(label) for label in cases]
    folder = root / tmp_path.name
    packages = [write_failing_load(folder / f"l{n}", *text) for n, text in enumerate(texts)]

    replies = failed_loads(running, packages)

    wrong = []
    for label, (_, said), reply in zip(cases, texts, replies, strict=True):
        if not is_as_labelled(label, http_outcome(reply), said):
            wrong.append((label, reply.body[:500]))
    assert wrong == []
    with running.client() as client:
        assert set(model_names(client)) <= {"raiser", "other"}


@pytest.mark.timeout(400)
def test_load_is_507_by_its_text_without_gpu(tmp_path):
    """Memory is read, and by the readings most of these texts are about a GPU that is not seen.
    That may be because a library is missing: Triton sees it all the same.
    """
    cases = [label for label in labels("load") if label.is_oom]
    packages = [
        write_failing_load(tmp_path / f"l{number}", *label.raised)
        for number, label in enumerate(cases)
    ]
    with beside_another_model(root=tmp_path) as adapter:
        assert adapter.started["memory_source"] == "host"
        replies = failed_loads(adapter, packages)
    believed = [(reply.status, reply.code) for reply in replies]
    assert [
        (label, replies[number].body)
        for number, label in enumerate(cases)
        if believed[number] != (507, "OutOfMemory")
    ] == []
    of_cuda = [reply.json() for reply in replies if "CUDA" in reply.error]
    assert of_cuda
    assert {body["device"] for body in of_cuda} == {None}
    assert {body["free_bytes"] for body in of_cuda} == {None}
    assert {body["limit_bytes"] for body in of_cuda} == {None}


def failed_loads(adapter: RunningAdapter, packages: Sequence[Path]) -> list[Reply]:
    """So many at a time as Triton takes, each over a connection of its own."""

    def load(package: Path) -> Reply:
        with adapter.client(120) as client:
            return client.load(package.name, package)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(load, packages))
