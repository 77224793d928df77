"""Each labelled failure text, raised by a real python model: 507 exactly where its label says."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from adapter._proto import model_runtime_pb2 as mmesh
from tests.grpc_calls import Calls
from tests.journeys.memory.failing_models import (
    Label,
    failing,
    labels,
    write_failing_answers,
    write_failing_load,
)
from tests.running import COMPLETE, Reply, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

DOORS = ("http", "grpc")
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


@dataclass(frozen=True)
class Listener:
    load: Callable[[str, Path], Outcome]
    infer: Callable[[str, dict[str, object]], Outcome]
    close: Callable[[], None]


def http_listener(adapter: RunningAdapter) -> Listener:
    client = adapter.client(120)
    return Listener(
        lambda name, url: http_outcome(client.load(name, url)),
        lambda name, body: http_outcome(client.post(f"/models/{name}/invoke", body)),
        client.close,
    )


def http_outcome(reply: Reply) -> Outcome:
    if reply.status == 200:
        return Outcome(is_out_of_memory=False, text=None)
    assert 400 <= reply.status < 600
    return Outcome(reply.status == 507, reply.json()["error"])


def grpc_listener(adapter: RunningAdapter) -> Listener:
    """Loads through ModelMesh's contract, inferences through V2's, as a mesh does."""
    channel = grpc.insecure_channel(adapter.grpc)
    stub = channel.unary_unary(
        "/mmesh.ModelRuntime/loadModel",
        request_serializer=mmesh.LoadModelRequest.SerializeToString,
    )
    calls = Calls(adapter.grpc)

    def close() -> None:
        channel.close()
        calls.channel.close()

    return Listener(
        lambda name, url: grpc_outcome(
            lambda: stub(mmesh.LoadModelRequest(modelId=name, modelPath=str(url)), timeout=120)
        ),
        lambda name, body: grpc_outcome(lambda: calls.call("ModelInfer", tensors(name, body))),
        close,
    )


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


OPEN = {"http": http_listener, "grpc": grpc_listener}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningAdapter, Path]]:
    """Memory is not read, and another model is loaded: the words alone decide."""
    root = tmp_path_factory.mktemp("models")
    with beside_another_model("--memory-source=off", root=root) as adapter:
        yield adapter, root


@contextmanager
def beside_another_model(*flags: str, root: Path) -> Iterator[RunningAdapter]:
    """An adapter whose loads do not wait for each other, with a model of its own."""
    flags = (*flags, COMPLETE, f"--load-concurrency={_AT_ONCE}", f"--model-roots={root}")
    with embedded_adapter(*flags) as adapter:
        with closing(adapter.client()) as client:
            assert client.load("other", write_failing_answers(root / "other")).status == 200
        yield adapter


@pytest.fixture(params=DOORS)
def open_listener(
    request: pytest.FixtureRequest, adapter: tuple[RunningAdapter, Path]
) -> Callable[[], Listener]:
    return lambda: OPEN[request.param](adapter[0])


@pytest.fixture(scope="module")
def raiser(adapter: tuple[RunningAdapter, Path]) -> Iterator[str]:
    running, root = adapter
    with closing(running.client()) as client:
        assert client.load("raiser", write_failing_answers(root / "raiser")).status == 200
        yield "raiser"
        assert client.delete("/models/raiser").status == 200


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


@pytest.mark.parametrize(
    ("failure", "each"),
    [
        (answered, 3),
        (answered_long, 20),
        pytest.param(answered, 1, marks=pytest.mark.nightly),
        pytest.param(answered_long, 5, marks=pytest.mark.nightly),
    ],
)
def test_an_inference_that_fails_is_507_as_its_text_is_labelled(
    open_listener: Callable[[], Listener],
    raiser: str,
    failure: Callable[[Label], tuple[str, str]],
    each: int,
) -> None:
    cases = sorted(labels("infer"), key=lambda label: label.is_oom)[::each]
    wrong = []
    with closing(open_listener()) as listener:
        for label in cases:
            how, text = failure(label)
            outcome = listener.infer(raiser, failing(how, text))
            if not is_as_labelled(label, outcome, text):
                wrong.append((label, str(outcome)[:500]))
            # a second failure in a row is doubted where memory is not read
            assert listener.infer(raiser, failing("answer", "")).text is None

    assert wrong == []


def failed_loads(open_listener: Callable[[], Listener], packages: Sequence[Path]) -> list[Outcome]:
    """So many at a time as Triton takes, each over a connection of its own."""

    def load(package: Path) -> Outcome:
        with closing(open_listener()) as listener:
            return listener.load(package.name, package)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(load, packages))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("open_listener", "failure", "each"),
    [
        ("http", raised, 40),
        ("grpc", raised, 60),
        ("http", raised_long, 100),
        pytest.param("http", raised, 1, marks=pytest.mark.nightly),
        pytest.param("grpc", raised, 1, marks=pytest.mark.nightly),
        pytest.param("http", raised_long, 1, marks=pytest.mark.nightly),
    ],
    indirect=["open_listener"],
)
def test_a_load_that_fails_is_507_as_its_text_is_labelled(
    open_listener: Callable[[], Listener],
    adapter: tuple[RunningAdapter, Path],
    tmp_path: Path,
    failure: Callable[[Label], tuple[str, str]],
    each: int,
) -> None:
    """Some of both labels; all in the nightly run."""
    cases = sorted(labels("load"), key=lambda label: label.is_oom)[::each]
    texts = [failure(label) for label in cases]
    root = adapter[1] / tmp_path.name
    packages = [write_failing_load(root / f"l{n}", *text) for n, text in enumerate(texts)]

    outcomes = failed_loads(open_listener, packages)

    assert [
        (label, str(outcome)[:500])
        for label, (_, said), outcome in zip(cases, texts, outcomes, strict=True)
        if not is_as_labelled(label, outcome, said)
    ] == []
    with closing(adapter[0].client()) as client:
        listed = {model["modelName"] for model in client.get("/models").json()["models"]}
    assert listed <= {"raiser", "other"}


@pytest.mark.timeout(400)
def test_load_is_507_by_its_text_without_gpu(tmp_path: Path) -> None:
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
        replies = failed_replies(adapter, packages)
    believed = [(reply.status, reply.json()["code"]) for reply in replies]
    assert [
        (label, replies[number].body)
        for number, label in enumerate(cases)
        if believed[number] != (507, "OutOfMemory")
    ] == []
    of_cuda = [reply.json() for reply in replies if "CUDA" in reply.json()["error"]]
    assert of_cuda
    assert {body["device"] for body in of_cuda} == {None}
    assert {body["free_bytes"] for body in of_cuda} == {None}
    assert {body["limit_bytes"] for body in of_cuda} == {None}


def failed_replies(adapter: RunningAdapter, packages: Sequence[Path]) -> list[Reply]:
    def load(package: Path) -> Reply:
        with closing(adapter.client(120)) as client:
            return client.load(package.name, package)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(load, packages))
