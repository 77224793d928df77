"""Each labelled failure text, raised by a real python model: 507 exactly where its label says."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.asking import model_names
from tests.journeys.memory.failing_models import (
    Label,
    failing,
    labels,
    write_failing_answers,
    write_failing_load,
)
from tests.running import COMPLETE, Client, Reply, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

Failure = Callable[[Label], tuple[str, str]]
_FRAMES = "\n" + "  File model.py, line 31, in forward\n" * 4_200  # 150 KB
_AT_ONCE = 4  # loads that Triton works on at a time
# Of a C++ backend's failed load Triton says more than `Internal: `, and of a load that never began
# less. A python model's always comes as `load failed for model ...: Internal: <class>: <text>`, so
# these come inside that, and what they are about is the same.


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
def raiser(running, root) -> Iterator[Client]:
    with running.client(120) as client:
        client.load_model("raiser", write_failing_answers(root / "raiser"))
        yield client


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


def is_as_labelled(label: Label, reply: Reply, text: str) -> bool:
    """The words are all there."""
    is_oom = reply.status == 507
    return text.strip().removesuffix(";") in reply.error and is_oom == label.is_oom


@pytest.mark.parametrize(
    ("failure", "each"),
    [
        (answered, 3),
        (answered_long, 20),
        pytest.param(answered, 1, marks=pytest.mark.nightly),
        pytest.param(answered_long, 5, marks=pytest.mark.nightly),
    ],
)
def test_failed_inference_is_507_as_labelled(raiser, failure, each):
    cases = sorted(labels("infer"), key=lambda label: label.is_oom)[::each]
    wrong = []
    for label in cases:
        how, text = failure(label)
        reply = raiser.post("/models/raiser/invoke", failing(how, text))
        if not is_as_labelled(label, reply, text):
            wrong.append((label, reply.body[:500]))
        # a second failure in a row is doubted where memory is not read
        assert raiser.post("/models/raiser/invoke", failing("answer", "")).status == 200

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
        if not is_as_labelled(label, reply, said):
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
