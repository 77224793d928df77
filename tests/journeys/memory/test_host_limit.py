"""A limit of 512 MiB, and models that truly take over 95 MiB each: four fit, the fifth does not."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.memory.models import MIB, check_agreement, tree_bytes, write_eater
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter, unload_all
from tests.trees import infer_body

pytestmark = pytest.mark.triton

_LIMIT = 512 * MIB
_MODEL_MIB = 95
_SHARE = 0.06
_FOUR = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningAdapter, Path]]:
    root = tmp_path_factory.mktemp("models")
    flags = ("--memory-source=host", "--memory-limit=512MiB", "--memory-reserve=0")
    with embedded_adapter(*flags, COMPLETE, f"--model-roots={root}") as adapter:
        yield adapter, root


@pytest.fixture
def adapter(limited: tuple[RunningAdapter, Path]) -> Iterator[RunningAdapter]:
    yield limited[0]
    unload_all(limited[0])


@pytest.fixture
def root(limited: tuple[RunningAdapter, Path]) -> Path:
    return limited[1]


def refused(client: Client, url: Path) -> dict[str, Any]:
    reply = client.load("e", url)
    body = reply.json()
    assert (reply.status, body["code"]) == (507, "InsufficientMemory"), body
    assert body["limit_bytes"] == _LIMIT
    return body


def check_one_out_one_in(adapter: RunningAdapter, client: Client, url: Path) -> None:
    check_agreement(adapter)
    assert client.delete("/models/b").status == 200
    assert client.load("e", url).status == 200
    assert client.post("/models/e/invoke", infer_body(1.5)).json()["outputs"][0]["data"] == [1.5]
    assert tree_bytes(adapter) <= _LIMIT
    check_agreement(adapter)


def test_fifth_is_refused_with_measured_figures(adapter: RunningAdapter, root: Path) -> None:
    """It fits once one has gone."""
    package = write_eater(root / "measured", _MODEL_MIB)
    with closing(adapter.client()) as client:
        empty = tree_bytes(adapter)
        assert client.load("a", package).status == 200
        taken = tree_bytes(adapter) - empty
        for name in _FOUR[1:]:
            assert client.load(name, package).status == 200

        body = refused(client, package)

        used = tree_bytes(adapter)
        assert body["needed_bytes"] == pytest.approx(taken, rel=_SHARE)
        assert body["limit_bytes"] - body["free_bytes"] == pytest.approx(used, rel=_SHARE)
        check_one_out_one_in(adapter, client, package)


def test_fifth_that_declares_its_need_is_refused(adapter: RunningAdapter, root: Path) -> None:
    """It was never loaded."""
    packages = {
        # each with a text of its own: what is learned of one says nothing of the others
        name: write_eater(
            root / f"declared-{name}",
            _MODEL_MIB,
            declares=f"{_MODEL_MIB + 30}MiB",
            imports=f"#{name}",
        )
        for name in (*_FOUR, "e")
    }
    with closing(adapter.client()) as client:
        for name in _FOUR:
            assert client.load(name, packages[name]).status == 200

        body = refused(client, packages["e"])

        used = tree_bytes(adapter)
        assert body["needed_bytes"] == (_MODEL_MIB + 30) * MIB
        assert body["limit_bytes"] - body["free_bytes"] == pytest.approx(used, rel=_SHARE)
        check_one_out_one_in(adapter, client, packages["e"])


def test_when_an_unload_is_answered_the_memory_is_back(adapter: RunningAdapter, root: Path) -> None:
    package = write_eater(root / "back", _MODEL_MIB)
    with closing(adapter.client()) as client:
        before = tree_bytes(adapter)
        assert client.load("a", package).status == 200
        footprint = tree_bytes(adapter) - before
        assert footprint > _MODEL_MIB * MIB
        assert client.post("/models/a/invoke", infer_body(1.0)).status == 200

        assert client.delete("/models/a").status == 200

        assert tree_bytes(adapter) - before < footprint / 4
