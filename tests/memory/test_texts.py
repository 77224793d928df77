"""Each labelled failure text, raised by a real python model: 507 exactly where its label says."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.memory.failing_models import (
    Label,
    failing,
    labels,
    write_failing_answers,
    write_failing_load,
)
from tests.running import Reply, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

DOORS = ("http",)
_FRAMES = "\n" + "  File model.py, line 31, in forward\n" * 4_200  # 150 KB
_AT_ONCE = 4  # loads that Triton works on at a time
# Of a C++ backend's failed load Triton says more than `Internal: `, and of a load that never began
# less. A python model's always comes as `load failed for model ...: Internal: <class>: <text>`, so
# these come inside that, and what they are about is the same.


@dataclass(frozen=True)
class Door:
    """What a caller sees of a failure: its status as in HTTP, and its text."""

    load: Callable[[str, Path], Reply]
    infer: Callable[[str, dict[str, object]], Reply]
    close: Callable[[], None]


def http_door(adapter: RunningAdapter) -> Door:
    client = adapter.client(120)
    return Door(
        client.load,
        lambda name, body: client.post(f"/models/{name}/invoke", body),
        client.close,
    )


OPEN = {"http": http_door}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningAdapter, Path]]:
    """Memory is not read: the words alone decide, and loads do not wait for each other."""
    root = tmp_path_factory.mktemp("models")
    flags = ("--memory-source=off", "--triton-args=--disable-auto-complete-config")
    with embedded_adapter(*flags, f"--model-roots={root}") as adapter:
        yield adapter, root


@pytest.fixture(params=DOORS)
def open_door(
    request: pytest.FixtureRequest, adapter: tuple[RunningAdapter, Path]
) -> Callable[[], Door]:
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


def is_as_labelled(label: Label, reply: Reply, said: str) -> bool:
    body = reply.json()
    is_whole = said.strip().removesuffix(";") in body["error"]
    return is_whole and (reply.status == 507) == label.is_oom and 400 <= reply.status < 600


@pytest.mark.parametrize("failure", [answered, answered_long], ids=["as-labelled", "300-kb"])
def test_an_inference_that_fails_is_507_as_its_text_is_labelled(
    open_door: Callable[[], Door], raiser: str, failure: Callable[[Label], tuple[str, str]]
) -> None:
    wrong = []
    with closing(open_door()) as door:
        for label in labels("infer"):
            how, text = failure(label)
            reply = door.infer(raiser, failing(how, text))
            if not is_as_labelled(label, reply, text):
                wrong.append((label, reply.status, reply.body[:500]))
        assert door.infer(raiser, failing("answer", "")).status == 200

    assert wrong == []


def failed_loads(open_door: Callable[[], Door], packages: Sequence[Path]) -> list[Reply]:
    """So many at a time as Triton takes, each over a connection of its own."""

    def load(package: Path) -> Reply:
        with closing(open_door()) as door:
            return door.load(package.name, package)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(load, packages))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("failure", "each"), [(raised, 1), (raised_long, 6)], ids=["as-labelled", "300-kb"]
)
def test_a_load_that_fails_is_507_as_its_text_is_labelled(
    open_door: Callable[[], Door],
    adapter: tuple[RunningAdapter, Path],
    tmp_path: Path,
    failure: Callable[[Label], tuple[str, str]],
    each: int,
) -> None:
    """Of the long ones each sixth, of both labels."""
    cases = sorted(labels("load"), key=lambda label: label.is_oom)[::each]
    texts = [failure(label) for label in cases]
    root = adapter[1] / tmp_path.name
    packages = [write_failing_load(root / f"l{n}", *text) for n, text in enumerate(texts)]

    replies = failed_loads(open_door, packages)

    assert [
        (label, reply.status, reply.body[:500])
        for label, (_, said), reply in zip(cases, texts, replies, strict=True)
        if not is_as_labelled(label, reply, said)
    ] == []
    with closing(adapter[0].client()) as client:
        listed = {model["modelName"] for model in client.get("/models").json()["models"]}
    assert listed <= {"raiser"}
