"""A limit of 512 MiB, and models that truly take over 95 MiB each: four fit, the fifth does not."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.memory.models import MIB, check_agreement, tree_bytes, write_eater
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter

pytestmark = pytest.mark.triton

_LIMIT = 512 * MIB
_MODEL_MIB = 95
_SHARE = 0.06


@pytest.fixture(scope="module")
def running(root) -> Iterator[RunningAdapter]:
    flags = ("--memory-source=host", "--memory-limit=512MiB", "--memory-reserve=0")
    with embedded_adapter(*flags, COMPLETE, f"--model-roots={root}") as adapter:
        yield adapter


def check_fifth(adapter: RunningAdapter, client: Client, url: Path, needed_bytes: Any) -> None:
    """It is refused, and fits once another has gone."""
    reply = client.load("e", url)
    body = reply.json()
    used = tree_bytes(adapter)
    assert (reply.status, body["code"]) == (507, "InsufficientMemory"), body
    assert body["limit_bytes"] == _LIMIT
    assert body["needed_bytes"] == needed_bytes
    assert body["limit_bytes"] - body["free_bytes"] == pytest.approx(used, rel=_SHARE)
    check_agreement(adapter)
    client.unload_model("b")
    client.load_model("e", url)
    assert client.invoke("e", 1.5).data == [1.5]
    assert tree_bytes(adapter) <= _LIMIT
    check_agreement(adapter)


def test_fifth_is_refused_with_measured_figures(adapter, client, root):
    package = write_eater(root / "measured", _MODEL_MIB)
    empty = tree_bytes(adapter)
    client.load_model("a", package)
    taken = tree_bytes(adapter) - empty
    for name in "bcd":
        client.load_model(name, package)
    check_fifth(adapter, client, package, pytest.approx(taken, rel=_SHARE))


def test_fifth_that_declares_its_need_is_refused(adapter, client, root):
    """It was never loaded."""
    declared = f"{_MODEL_MIB + 30}MiB"
    packages = {
        # each with a text of its own: what is learned of one says nothing of the others
        name: write_eater(root / name, _MODEL_MIB, declares=declared, imports=f"#{name}")
        for name in "abcde"
    }
    for name in "abcd":
        client.load_model(name, packages[name])
    check_fifth(adapter, client, packages["e"], (_MODEL_MIB + 30) * MIB)


def test_memory_is_back_when_unload_is_answered(adapter, client, root):
    package = write_eater(root / "back", _MODEL_MIB)
    before = tree_bytes(adapter)
    client.load_model("a", package)
    footprint = tree_bytes(adapter) - before
    assert footprint > _MODEL_MIB * MIB
    assert client.invoke("a").status == 200

    client.unload_model("a")

    assert tree_bytes(adapter) - before < footprint / 4


def test_limit_above_the_machine_is_cut(root):
    """Otherwise the kernel would end Triton before any load is refused."""
    flags = ("--memory-source=host", "--memory-limit=1000TiB", f"--model-roots={root}")
    with embedded_adapter(*flags) as adapter:
        [book] = adapter.state()["memory"]["devices"].values()
    assert book["limit_bytes"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
