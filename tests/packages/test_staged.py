"""Packages of several models, and archives, as they are staged; no Triton looks at them here."""

import asyncio
import os
import shutil
import tarfile

import pytest

from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.errors import InvalidModel
from adapter.packages.contents import MARKER
from adapter.packages.staging import Packages
from adapter.packages.unpacking import Limits
from tests.packages.models import pack
from tests.packages.staged import (
    CONFIG,
    STAGED_CONFIG,
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


async def test_all_models_of_a_package_are_staged_for_the_gpu_it_is_put_on(
    packages, root, repository
):
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


async def test_a_model_without_a_config_gets_one_that_names_its_gpu_alone(
    packages, root, repository
):
    (root / "m").mkdir()
    (root / "m" / "net.onnx").write_text("x")
    prepared = await prepare(packages, "a", root / "m")
    await packages.place(TritonName("a"), ModelId("a"), prepared, 2)
    text = (repository / "a" / "config.pbtxt").read_text()
    assert text == "instance_group { kind: KIND_GPU gpus: 2 }\n"


async def test_steps_get_private_names_and_the_ensemble_calls_them_by_these(
    packages, root, repository
):
    package = lay(root, one="", two="", whole=ensemble("one", "two"))
    placement = await place(packages, "a", package)
    assert placement.load == ("a",)
    one, two = placement.along
    assert one.startswith("ta.p.")
    assert one.endswith(".one")
    assert {folder.name for folder in repository.iterdir()} == {"a", one, two}
    config = (repository / "a" / "config.pbtxt").read_text()
    assert f'model_name: "{one}"' in config
    assert f'model_name: "{two}"' in config
    assert (repository / one / "config.pbtxt").read_bytes() == STAGED_CONFIG
    assert (repository / one / "1").resolve() == package / "one" / "1"
    assert (repository / "a" / "1").resolve() == package / "whole" / "1"
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_the_missing_version_folder_of_an_ensemble_is_made(packages, root, repository):
    package = lay(root, one="", whole=ensemble("one"))
    shutil.rmtree(package / "whole" / "1")
    await place(packages, "a", package)
    assert list((repository / "a" / "1").iterdir()) == []
    assert not (package / "whole" / "1").exists()


async def test_a_helper_keeps_its_name_where_it_is_free(packages, root, repository):
    placement = await place(packages, "a", lay(root, main="", helper=""), entry="main")
    assert placement == Placement((TritonName("helper"), TritonName("a")))
    assert b"parameters" not in (repository / "a" / "config.pbtxt").read_bytes()
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_all_models_of_a_package_are_told_the_private_names_of_its_helpers(
    packages, root, repository
):
    (repository / "helper").mkdir()
    package = lay(root, main="", helper="", other="")
    placement = await place(packages, "a", package, entry="main")
    private = next(name for name in placement.load if name.endswith(".helper"))
    told = f'parameters {{ key: "triton_adapter.model.helper" value {{ string_value: "{private}"'
    for name in placement.load:
        assert told in (repository / name / "config.pbtxt").read_text()


@pytest.mark.parametrize("is_archive", [False, True], ids=["folder", "archive"])
async def test_a_helper_called_as_the_caller_calls_the_package_gets_another_name(
    packages, root, repository, is_archive
):
    package = lay(root, main="", a="")
    if is_archive:
        package = pack(package, root / "m.zip")
    placement = await place(packages, "a", package, entry="main")
    helper, entry = placement.load
    assert entry == "a"
    assert helper != "a"


async def test_a_step_that_python_code_may_call_as_well_is_told_its_private_name(
    packages, root, repository
):
    package = lay(root, one="", two="", whole=ensemble("one", "two"))
    (package / "two" / "1" / "model.py").write_text("CALLED = 'one'")
    placement = await place(packages, "a", package)
    two = next(name for name in placement.along if name.endswith(".two"))
    config = (repository / two / "config.pbtxt").read_text()
    assert "triton_adapter.model.one" in config


async def test_a_helper_of_any_bytes_is_staged(packages, root, repository):
    package = lay(root, main="")
    make(package / os.fsdecode(b"\xff"))
    placement = await place(packages, "a", package, entry="main")
    assert len(placement.load) == 2
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_two_packages_that_want_a_name_at_once_do_not_share_it(packages, root, repository):
    package = lay(root, main="", helper="")
    placements = await asyncio.gather(
        *(place(packages, name, package, entry="main") for name in "abcdefgh")
    )
    assert len({name for placement in placements for name in placement.names}) == 16
    await remove(packages, *"abcdefgh")
    assert tree(repository) == {}


async def test_what_a_former_run_left_of_a_package_goes_with_the_new_one(
    packages, root, repository
):
    await place(packages, "a", lay(root, main="", helper=""), entry="main")
    await place(packages, "a", make(root / "alone"))
    await remove(packages, "a")
    assert tree(repository) == {}


# --- archives


@pytest.mark.parametrize("name", ["m.tar.gz", "m.tgz", "m.tar", "m.zip"])
@pytest.mark.parametrize("is_alone", [False, True], ids=["as url", "alone in its folder"])
async def test_an_archive_is_unpacked_into_the_repository(
    packages, root, repository, name, is_alone
):
    archive = pack(make(root.parent / "source"), root / name)
    (root / ".hidden").touch()
    await place(packages, "a", root if is_alone else archive)
    assert (repository / "a" / "1" / "model.py").read_text() == "weights"
    assert (repository / "a" / "config.pbtxt").read_bytes() == STAGED_CONFIG
    await remove(packages, "a")
    assert tree(repository) == {}
    assert archive.exists()


async def test_an_archive_beside_other_files_is_not_the_package(packages, root, repository):
    pack(make(root / "m"), root / "m" / "more.zip")
    await place(packages, "a", root / "m")
    assert (repository / "a" / "more.zip").resolve() == root / "m" / "more.zip"


async def test_an_archive_of_several_models_goes_with_its_entry(packages, root, repository):
    package = pack(lay(root, one="", whole=ensemble("one")), root / "m.zip")
    placement = await place(packages, "a", package)
    (step,) = placement.along
    assert (repository / step / "1" / "model.py").read_text() == "weights"
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_an_archive_that_a_former_run_left_unpacked_is_unpacked_anew(
    packages, root, repository
):
    """Its remove failed, or the process ended."""
    archive = pack(make(root / "m"), root / "m.zip")
    await place(packages, "a", archive)
    (root / "m" / "1" / "model.py").write_text("new")
    pack(root / "m", archive)
    await place(packages, "a", archive)
    assert (repository / "a" / "1" / "model.py").read_text() == "new"


async def test_an_archive_may_hold_a_name_that_the_adapter_uses(packages, root, repository):
    make(root / "m")
    (root / "m" / ".unpacked").mkdir()
    (root / "m" / MARKER).write_text("theirs")
    await place(packages, "a", pack(root / "m", root / "m.zip"))
    assert (repository / "a" / "1" / "model.py").read_text() == "weights"


async def test_what_is_wrong_in_an_archive_is_said_by_the_archives_name(packages, root, repository):
    make(root / "m", "backend: 3")
    with pytest.raises(InvalidModel, match=r"m\.zip.*config\.pbtxt"):
        await prepare(packages, "a", pack(root / "m", root / "m.zip"))
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_a_link_in_an_archive_may_not_lead_to_another_package(packages, root, repository):
    make(root / "secret")
    make(root / "m")
    with tarfile.open(root / "m.tar", "w") as packed:
        packed.add(root / "m", ".")
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(root / "secret")
        packed.addfile(link)
    with pytest.raises(InvalidModel, match="may lead out of the archive"):
        await prepare(packages, "a", root / "m.tar")
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_the_limits_of_unpacking_hold(root, repository):
    packages = Packages(repository, [root], limits=Limits(max_unpacked_bytes=10))
    with pytest.raises(InvalidModel, match="unpacks to more than 10 bytes"):
        await prepare(packages, "a", pack(make(root / "m"), root / "m.zip"))
    await remove(packages, "a")
    assert tree(repository) == {}
