"""Packages of several models, and archives, as they are staged; no Triton looks at them here."""

import asyncio

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.packages.contents import MARKER
from adapter.packages.staging import Packages
from tests.packages.models import pack
from tests.packages.staged import (
    CONFIG,
    ensemble,
    make,
    place,
    prepare,
    remove,
    tree,
)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


@pytest.fixture
def packages(root, repository):
    return Packages(repository, [root])


# --- several models


def lay(root, **configs):
    """A package of models by name; an empty config is a python model that names the others."""
    for name, config in configs.items():
        make(root / "m" / name.replace("_", "-"), config or CONFIG)
    return root / "m"


async def test_all_models_are_staged_for_packages_gpu(packages, root, repository):
    package = lay(root, one="", two="", whole=ensemble("one", "two"))
    prepared = await prepare(packages, "a", package)
    placement = await packages.place(TritonName("a"), ModelId("a"), prepared, 1)
    texts = [(repository / name / "config.pbtxt").read_text() for name in placement.along]
    assert [text.count("gpus: 1 }") for text in texts] == [1, 1]
    assert "instance_group" not in (repository / "a" / "config.pbtxt").read_text()
    [staged] = await packages.staged()
    assert staged.gpu is None  # until it is loaded
    await packages.confirm(TritonName("a"), ModelSource(str(package)), "key", {})
    [staged] = await packages.staged()
    assert staged.gpu == 1


async def test_model_without_config_gets_one_for_its_gpu(packages, root, repository):
    (root / "m").mkdir()
    (root / "m" / "net.onnx").write_text("x")
    prepared = await prepare(packages, "a", root / "m")
    await packages.place(TritonName("a"), ModelId("a"), prepared, 2)
    text = (repository / "a" / "config.pbtxt").read_text()
    assert text == "instance_group { kind: KIND_GPU gpus: 2 }\n"


async def test_two_packages_do_not_share_a_name(packages, root, repository):
    package = lay(root, main="", helper="")
    placements = await asyncio.gather(
        *(place(packages, name, package, entry="main") for name in "abcdefgh")
    )
    assert len({name for placement in placements for name in placement.names}) == 16
    await remove(packages, *"abcdefgh")
    assert tree(repository) == {}


# --- archives


async def test_archive_beside_files_is_not_the_package(packages, root, repository):
    pack(make(root / "m"), root / "m" / "more.zip")
    await place(packages, "a", root / "m")
    assert (repository / "a" / "more.zip").resolve() == root / "m" / "more.zip"


async def test_leftover_unpacked_archive_is_unpacked_anew(packages, root, repository):
    """Its remove failed, or the process ended."""
    archive = pack(make(root / "m"), root / "m.zip")
    await place(packages, "a", archive)
    (root / "m" / "1" / "model.py").write_text("new")
    pack(root / "m", archive)
    await place(packages, "a", archive)
    assert (repository / "a" / "1" / "model.py").read_text() == "new"


async def test_archive_may_hold_the_adapters_names(packages, root, repository):
    make(root / "m")
    (root / "m" / ".unpacked").mkdir()
    (root / "m" / MARKER).write_text("theirs")
    await place(packages, "a", pack(root / "m", root / "m.zip"))
    assert (repository / "a" / "1" / "model.py").read_text() == "weights"
