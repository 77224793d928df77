"""A model's folder in Triton's repository, on real trees."""

import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.errors import BackendError, InvalidModel, InvalidRequest, SourceMissing
from adapter.packages.staging import MARKER, Packages, StagedModel

CONFIG = '# mine\r\nname: "other"; backend: "python"\r\n'
STAGED_CONFIG = b'# mine\r\n  backend: "python"\r\n'


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


def make(folder, config=CONFIG):
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("weights")
    (folder / "config.pbtxt").write_bytes(config.encode())
    return folder


def tree(folder):
    """Every path below, links not followed, with what is behind it."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


async def place(packages, name, folder):
    source = ModelSource(str(folder))
    package = await packages.inspect(source)
    await packages.place(TritonName(name), ModelId(f"id of {name}"), source, package)
    return package


# --- place


async def test_a_staged_model_is_a_real_folder_of_links_with_its_own_config(
    packages, root, repository
):
    source = make(root / "m")
    (source / "labels.txt").write_text("x")
    (source / ".hidden").write_text("x")
    package = await place(packages, "a", source)
    assert tree(repository) == {
        "a": None,
        "a/1": source / "1",
        "a/labels.txt": source / "labels.txt",
        "a/.hidden": source / ".hidden",
        "a/config.pbtxt": STAGED_CONFIG,
        f"a/{MARKER}": (repository / "a" / MARKER).read_bytes(),
    }
    assert json.loads((repository / "a" / MARKER).read_text()) == {
        "model_id": "id of a",
        "url": str(source),
        "content_key": package.content_key,
    }


async def test_the_source_is_left_as_it_was(packages, root):
    source = make(root / "m")
    before = tree(source)
    await place(packages, "a", source)
    await packages.remove(TritonName("a"))
    assert tree(source) == before


async def test_a_link_moved_after_place_does_not_move_the_model(packages, root, repository):
    make(root / "v1")
    make(root / "v2")
    package = make(root / "m")
    shutil.rmtree(package / "1")
    (package / "1").symlink_to(root / "v1" / "1")
    (root / "current").symlink_to(package)
    await place(packages, "a", root / "current")
    (package / "1").unlink()
    (package / "1").symlink_to(root / "v2" / "1")
    (root / "current").unlink()
    assert (repository / "a" / "1").resolve() == root / "v1" / "1"


async def test_a_name_that_is_not_utf8_is_staged(packages, root, repository):
    source = make(root / "m")
    odd = os.fsdecode(b"\xff")
    (source / odd).write_text("x")
    await place(packages, "a", source)
    assert (repository / "a" / odd).read_text() == "x"


async def test_a_marker_in_the_package_is_not_taken_for_ours(packages, root, repository):
    source = make(root / "m")
    (source / MARKER).write_text("theirs")
    await place(packages, "a", source)
    assert (source / MARKER).read_text() == "theirs"
    assert [model.model_id for model in await packages.staged()] == ["id of a"]


async def test_what_a_former_run_left_is_replaced(packages, root, repository):
    old, new = make(root / "old"), make(root / "new")
    (old / "more").write_text("x")
    await place(packages, "a", old)
    (repository / "a" / "written" / "by").mkdir(parents=True)
    before = tree(old)
    await place(packages, "a", new)
    assert set(tree(repository / "a")) == {"1", "config.pbtxt", MARKER}
    assert (repository / "a" / "1").resolve() == new / "1"
    assert tree(old) == before


@pytest.mark.parametrize("kind", ["empty folder", "folder", "file", "link", "dangling link"])
async def test_a_name_that_somebody_else_has_is_refused_and_not_touched(
    kind, packages, root, repository
):
    source = make(root / "m")
    await place(packages, "ours", source)
    theirs = repository / "a"
    match kind:
        case "empty folder":
            theirs.mkdir()
        case "folder":
            make(theirs)
        case "file":
            theirs.write_text("x")
        case "link":
            theirs.symlink_to(repository / "ours")
        case "dangling link":
            theirs.symlink_to("nowhere")
    before = tree(repository)
    with pytest.raises(InvalidRequest, match="not of this adapter's making"):
        await place(packages, "a", source)
    await packages.remove(TritonName("a"))
    assert tree(repository) == before
    assert [model.name for model in await packages.staged()] == ["ours"]


async def test_a_marker_that_is_a_link_makes_no_folder_ours(packages, root, repository):
    await place(packages, "ours", make(root / "m"))
    (repository / "a").mkdir()
    (repository / "a" / MARKER).symlink_to(repository / "ours" / MARKER)
    await packages.remove(TritonName("a"))
    assert (repository / "a" / MARKER).is_symlink()


@pytest.mark.parametrize("room", [0, 2000], ids=["for nothing", "for the marker only"])
async def test_a_full_disk_fails_the_load_and_leaves_nothing(room, packages, root, repository):
    """A limit on file size stands in for the full disk: the same call fails, with an OSError."""
    source = ModelSource(str(make(root / "m", CONFIG + "# long comment" * 1000)))
    package = await packages.inspect(source)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(BackendError, match=r"cannot stage the model in .*/a: File too large"):
            await packages.place(TritonName("a"), ModelId("a"), source, package)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tree(repository) == {}


async def test_a_package_that_vanished_fails_the_load_and_leaves_nothing(
    packages, root, repository
):
    source = ModelSource(str(make(root / "m")))
    package = await packages.inspect(source)
    shutil.rmtree(root / "m")
    with pytest.raises(BackendError, match="No such file or directory"):
        await packages.place(TritonName("a"), ModelId("a"), source, package)
    assert tree(repository) == {}


async def test_the_config_is_written_as_utf8(packages, root, repository):
    await place(packages, "a", make(root / "m", "name: 'é' # é"))
    assert (repository / "a" / "config.pbtxt").read_bytes() == "  # é".encode()


async def test_a_repository_that_does_not_exist_fails_the_load(root, tmp_path):
    packages = Packages(tmp_path / "absent", [root])
    with pytest.raises(BackendError, match="No such file"):
        await place(packages, "a", make(root / "m"))
    await packages.remove(TritonName("a"))
    assert await packages.staged() == []


async def test_models_are_placed_side_by_side_at_once(packages, root, repository):
    sources = {name: make(root / name) for name in "abcdefgh"}
    await asyncio.gather(*(place(packages, name, path) for name, path in sources.items()))
    for name, path in sources.items():
        assert (repository / name / "1").resolve() == path / "1"
        assert (repository / name / "config.pbtxt").read_bytes() == STAGED_CONFIG


async def test_thousands_of_files_are_staged(packages, root, repository):
    source = make(root / "m")
    (source / "assets").mkdir()
    for number in range(2500):
        (source / f"f{number}").touch()
        (source / "assets" / f"{number}").touch()
    await place(packages, "a", source)
    assert len(list((repository / "a").iterdir())) == 2500 + len(
        {"1", "assets", "config", "marker"}
    )
    await packages.remove(TritonName("a"))
    assert len(list((source / "assets").iterdir())) == 2500


# --- remove


async def test_remove_is_idempotent_and_never_follows_a_link(packages, root, repository):
    source = make(root / "m")
    before = tree(source)
    await place(packages, "a", source)
    (repository / "a" / "__pycache__").mkdir()
    (repository / "a" / "__pycache__" / "link").symlink_to(source)
    await packages.remove(TritonName("a"))
    await packages.remove(TritonName("a"))
    assert tree(repository) == {}
    assert tree(source) == before


async def test_a_model_whose_files_are_gone_can_be_removed(packages, root, repository):
    """SageMaker may delete the folder first."""
    await place(packages, "a", make(root / "m"))
    shutil.rmtree(root / "m")
    await packages.remove(TritonName("a"))
    assert tree(repository) == {}


# --- staged


async def test_what_is_staged_is_listed_by_name(packages, root, repository):
    sources = {name: make(root / name) for name in ("b", "a")}
    for name, path in sources.items():
        await place(packages, name, path)
    make(repository / "theirs")
    (repository / "file").touch()
    (repository / "link").symlink_to(repository / "a")
    assert await Packages(repository, []).staged() == [
        StagedModel(TritonName(name), ModelId(f"id of {name}"), str(sources[name]))
        for name in ("a", "b")
    ]


@pytest.mark.parametrize("marker", [b"", b"{", b"\xff", b"[]", b"{}", b'{"model_id": "x"}'])
async def test_a_half_written_marker_is_not_listed_and_its_folder_is_replaced(
    marker, packages, root, repository
):
    (repository / "a").mkdir()
    (repository / "a" / MARKER).write_bytes(marker)
    assert await packages.staged() == []
    await place(packages, "a", make(root / "m"))
    assert len(await packages.staged()) == 1


# --- inspect


async def test_the_repository_and_a_package_must_not_hold_each_other(root):
    repository = make(root / "m") / "repository"
    repository.mkdir()
    packages = Packages(repository, [root])
    await place(packages, "a", make(root / "other"))
    for url in (root / "m", repository / "a", repository):
        with pytest.raises((InvalidRequest, InvalidModel)) as caught:
            await packages.inspect(ModelSource(str(url)))
        if url != repository:
            assert "must not hold each other" in str(caught.value)


async def test_a_repository_beside_the_packages_is_fine(root):
    repository = root / "_triton_models"
    repository.mkdir()
    packages = Packages(repository, [root])
    await place(packages, "a", make(root / "m"))
    assert [model.name for model in await packages.staged()] == ["a"]


async def test_faults_of_the_source_come_through(packages, root):
    with pytest.raises(SourceMissing):
        await packages.inspect(ModelSource(str(root / "absent")))
    with pytest.raises(InvalidRequest):
        await packages.inspect(ModelSource("s3://bucket/m"))
    with pytest.raises(InvalidModel):
        await packages.inspect(ModelSource(str(root)))


# --- threads and permissions


class WatchedPath(type(Path())):
    """Remembers which threads asked for it."""

    threads: ClassVar[set[int]] = set()

    def __fspath__(self):
        self.threads.add(threading.get_ident())
        return super().__fspath__()

    def __truediv__(self, other):
        self.threads.add(threading.get_ident())
        return Path(str(self)) / other


async def test_no_file_work_is_done_on_the_event_loop(root, repository):
    packages = Packages(WatchedPath(repository), [WatchedPath(root)])
    for act in (
        place(packages, "a", make(root / "m")),
        packages.staged(),
        packages.remove(TritonName("a")),
    ):
        WatchedPath.threads.clear()
        await act
        assert WatchedPath.threads
        assert threading.get_ident() not in WatchedPath.threads


_AS_NOBODY = """
import asyncio, os, sys
import concurrent.futures.thread  # while the library can still be read
from pathlib import Path
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.errors import AdapterError
from adapter.packages.staging import Packages

async def main(repository, root):
    packages = Packages(repository, [root])
    source = ModelSource(str(root / "m"))
    package = await packages.inspect(source)
    for act in (
        packages.place(TritonName("b"), ModelId("b"), source, package),
        packages.remove(TritonName("a")),
        Packages(repository / "closed", [root]).staged(),
    ):
        try:
            await act
        except AdapterError as error:
            print(type(error).__name__, error)

if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture
def open_folder():
    """A folder that every user may look into; pytest's own are private."""
    with tempfile.TemporaryDirectory(prefix="staging-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


async def test_a_repository_that_may_not_be_written_is_named(open_folder):
    """Root may write everywhere, so another user tries."""
    root, repository = open_folder / "models", open_folder / "repository"
    (repository / "closed").mkdir(parents=True)
    await place(Packages(repository, [root]), "a", make(root / "m"))
    modes = {repository / "a": 0o555, repository / "closed": 0o000, repository: 0o555}
    for path, mode in modes.items():
        path.chmod(mode)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _AS_NOBODY, repository, root), stdout=subprocess.PIPE
    )
    output, _ = await child.communicate()
    for path in reversed(modes):
        path.chmod(0o755)
    assert (repository / "a" / MARKER).exists()
    assert output.decode().splitlines() == [
        f"BackendError cannot stage the model in {repository}/b: Permission denied",
        f"BackendError cannot remove {repository}/a: Permission denied",
        f"BackendError cannot list {repository}/closed: Permission denied",
    ]
