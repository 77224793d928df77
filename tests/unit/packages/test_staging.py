"""A model's folder in Triton's repository, on real trees."""

import asyncio
import errno
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

from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.errors import BackendError, InvalidModel, InvalidRequest
from adapter.packages import repository as repository_module
from adapter.packages import staging
from adapter.packages.contents import MARKER, MARKER_DRAFT
from adapter.packages.repository import link_tree, ownership_of
from adapter.packages.staging import Packages
from adapter.packages.unpack import RESERVE_BYTES, Free
from tests.packages.staged import (
    CONFIG,
    STAGED_CONFIG,
    make,
    place,
    prepare,
    put,
    remove,
    tree,
)


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


@pytest.fixture
def packages(root, repository):
    return Packages(repository, [root])


# --- place


async def test_copy_leaves_last_gib_alone(root, repository, monkeypatch):
    source = make(root / "m")
    packages = Packages(repository, [root], staging="copy")
    free = Free(RESERVE_BYTES + 3, None)
    monkeypatch.setattr(repository_module, "free_at", lambda _: free)
    with pytest.raises(BackendError, match=r"no room for a copy of \S+: 1\.0 GiB free"):
        await place(packages, "a", source)
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_staged_model_is_folder_of_links(packages, root, repository):
    source = make(root / "m")
    (source / "labels.txt").write_text("x")
    (source / ".hidden").write_text("x")
    assert await place(packages, "a", source) == Placement((TritonName("a"),))
    assert tree(repository) == {
        "a": None,
        "a/1": Path("../../models/m/1"),
        "a/labels.txt": Path("../../models/m/labels.txt"),
        "a/.hidden": Path("../../models/m/.hidden"),
        "a/config.pbtxt": STAGED_CONFIG,
        f"a/{MARKER}": (repository / "a" / MARKER).read_bytes(),
    }
    assert json.loads((repository / "a" / MARKER).read_text()) == {
        "owner": "a",
        "model_id": "id of a",
        "load": ["a"],
        "along": [],
    }


class _Garbage:
    """Python code runs wherever it is collected, and other threads have their turn there."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


@pytest.mark.slow
async def test_concurrent_inspections_survive_garbage_collection(packages, root):
    code = "class TritonPythonModel:\n" + "    answer = [1, 2.5, 'three']\n" * 50
    for name in "ab":
        folder = make(root / name, 'backend: "python"\n')
        (folder / "1" / "model.py").write_text(code)
    over = threading.Event()

    def litter() -> None:
        while not over.wait(0):
            _Garbage()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    littering = threading.Thread(target=litter)
    littering.start()
    try:
        for _ in range(100):
            await asyncio.gather(*(prepare(packages, name, root / name) for name in "abab"))
    finally:
        sys.setswitchinterval(interval)
        over.set()
        littering.join()


async def test_link_moved_after_place_does_not_move_model(packages, root, repository):
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


@pytest.mark.parametrize("room", [0, 2000], ids=["for nothing", "for the marker only"])
async def test_full_disk_fails_load_and_leaves_nothing(room, packages, root, repository):
    """A limit on file size stands in for the full disk: the same call fails, with an OSError."""
    package = await prepare(packages, "a", make(root / "m", CONFIG + "# long comment" * 1000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(BackendError, match=r"cannot stage the model in .*/a: File too large"):
            await put(packages, "a", package)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_package_that_vanished_fails_load_and_leaves_nothing(root, repository):
    packages = Packages(repository, [root], staging="copy")
    package = await prepare(packages, "a", make(root / "m"))
    shutil.rmtree(root / "m")
    with pytest.raises(BackendError, match="No such file or directory"):
        await put(packages, "a", package)
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_repository_that_does_not_exist_fails_load(root, tmp_path):
    packages = Packages(tmp_path / "absent", [root])
    with pytest.raises(BackendError, match="No such file"):
        await place(packages, "a", make(root / "m"))
    await packages.remove(TritonName("a"))
    assert await packages.staged() == []


async def test_keeping_that_is_cancelled_keeps_nothing(packages, root, repository, monkeypatch):
    """Nobody learns of what was linked by then, which would keep its room on the disk."""
    make(root / "m")
    shutil.make_archive(str(root / "m"), "zip", root / "m")
    await place(packages, "a", root / "m.zip")
    is_linked = threading.Event()
    may_end = threading.Event()

    def link_slowly(source, target):
        is_there = link_tree(source, target)
        is_linked.set()
        assert may_end.wait(60)
        return is_there

    monkeypatch.setattr(staging, "link_tree", link_slowly)
    keeping = asyncio.create_task(packages.set_aside(TritonName("a")))
    assert await asyncio.to_thread(is_linked.wait, 60)
    keeping.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await keeping
    assert [path.name for path in repository.iterdir()] == ["a"]


async def test_keeping_that_fails_keeps_nothing(packages, root, repository, monkeypatch):
    make(root / "m")
    shutil.make_archive(str(root / "m"), "zip", root / "m")
    await place(packages, "a", root / "m.zip")

    def refuse(source, target, **_):
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(BackendError, match="Too many links"):
        await packages.set_aside(TritonName("a"))
    assert [path.name for path in repository.iterdir()] == ["a"]


async def test_name_freed_by_removal_has_its_new_owner(packages, root, repository, monkeypatch):
    """The removal is stopped between its last two steps; the next package wants the same name."""
    for name in "ab":
        for model in (f"main-{name}", "helper"):
            make(root / name / model)
    await place(packages, "a", root / "a", entry="main-a")
    package = await prepare(packages, "b", root / "b", entry="main-b")
    is_renamed = threading.Event()
    may_end = threading.Event()
    rmtree = shutil.rmtree

    def remove_slowly(path, *args, **options):
        if Path(path).name == ".ta-half-helper" and Path(path).exists():
            is_renamed.set()
            assert may_end.wait(60)
        rmtree(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    removing = asyncio.create_task(remove(packages, "a"))
    assert await asyncio.to_thread(is_renamed.wait, 60)
    placing = asyncio.create_task(put(packages, "b", package))
    await asyncio.wait({placing}, timeout=0.3)
    may_end.set()
    await removing
    placement = await placing
    assert placement.load == ("helper", "b")
    assert {ownership_of(repository / name).owner for name in placement.load} == {"b"}


async def test_package_placed_again_keeps_its_names(packages, root, repository):
    """Place it as after a load that was out of memory; code calls the helper by its own name."""
    for model in ("main", "helper"):
        make(root / "a" / model)
    package = await prepare(packages, "a", root / "a", entry="main")
    first = await put(packages, "a", package)
    staged = tree(repository)
    assert await put(packages, "a", package) == first
    assert first.load == ("helper", "a")
    assert tree(repository) == staged


async def test_helper_gets_no_name_that_is_taken(packages, root):
    """A model that waits for its load has a name in Triton, and no folder."""
    for model in ("main", "helper"):
        make(root / "a" / model)
    package = await prepare(packages, "a", root / "a", entry="main")
    placement = await packages.place(
        TritonName("a"), ModelId("a"), package, is_taken="helper".__eq__
    )
    assert placement.load[0].startswith("ta.p.")
    (warning,) = placement.warnings
    assert "in Triton: a model that is being loaded has this name; code finds" in warning


# --- other means than links


def shown(repository):
    files = (path for path in (repository / "a").rglob("*") if path.is_file())
    return {str(path.relative_to(repository / "a")): path for path in files}


@pytest.mark.parametrize("staging", ["hardlink", "copy"])
async def test_files_are_there_without_links(root, repository, staging):
    source = make(root / "m")
    (root / "blobs").mkdir()
    (root / "blobs" / "blob").write_text("blob")
    (source / "1" / "deep").mkdir()
    (source / "1" / "deep" / "weights").symlink_to("../../../blobs/blob")  # as a cache has it
    await place(Packages(repository, [root], staging=staging), "a", source)
    shutil.rmtree(root)
    texts = {name: path.read_text() for name, path in shown(repository).items()}
    assert texts["1/model.py"] == "weights"
    assert texts["1/deep/weights"] == "blob"
    await Packages(repository, [root]).remove(TritonName("a"))
    assert tree(repository) == {}


LABELS = """backend: "own" runtime: "libown.so" output { name: "OUT" label_filename: "%s" }
parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "/models/a/batch.so" } }
"""


@pytest.mark.parametrize("place_of", ["same", "other"])
@pytest.mark.parametrize("named", ["labels.txt", "words/./en/labels.txt", "1/labels.txt"])
async def test_files_named_by_config_are_no_links(root, repository, named, place_of):
    """Since 26.06 Triton refuses labels and libraries that a link leads to out of the folder. On
    another file system, /dev/shm is one, they are copied.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        roots = [Path(folder) if place_of == "other" else root]
        source = make(roots[0] / "m", LABELS % named)
        own = {named.replace("/./", "/"), "libown.so", "batch.so"}
        for path in (*own, "env.tar.gz"):
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_text(path)
        await place(Packages(repository, roots), "a", source)
        staged = shown(repository)
        assert {
            path for path in own if not staged[path].resolve().is_relative_to(repository)
        } == set()
        assert {path: staged[path].read_text() for path in own} == {path: path for path in own}
        assert {staged[p].samefile(source / p) for p in own} == {place_of == "same"}
        assert staged["env.tar.gz"].is_symlink()
        weights = staged.get("1/model.py", repository / "a" / "1")
        assert weights.is_symlink()
    await remove(Packages(repository, [root]), "a")
    assert tree(repository) == {}


@pytest.mark.parametrize("staging", ["symlink", "hardlink", "copy"])
async def test_own_stub_keeps_its_mode_in_the_package(root, repository, staging):
    """Triton takes all of its bits but one, through any link to it."""
    source = make(root / "m")
    stub = source / "triton_python_backend_stub"
    stub.write_text("stub")
    stub.chmod(0o644)
    await place(Packages(repository, [root], staging=staging), "a", source)
    staged = repository / "a" / stub.name
    assert staged.stat().st_mode & 0o777 == 0o744
    assert staged.read_text() == "stub"
    staged.chmod(0o100)
    assert stub.stat().st_mode & 0o777 == 0o644


async def test_why_a_file_cannot_be_linked_is_said(repository):
    """Another file system: /dev/shm is one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source = make(Path(folder) / "m")
        packages = Packages(repository, [Path(folder)], staging="hardlink")
        with pytest.raises(BackendError, match="cross-device"):
            await place(packages, "a", source)
    await remove(packages, "a")
    assert tree(repository) == {}


@pytest.mark.parametrize("staging", ["symlink", "hardlink", "copy"])
async def test_notes_of_package_are_not_staged(root, repository, staging):
    """The adapter would write its own through the link, into a file of somebody else."""
    packages = Packages(repository, [root], staging=staging)
    source = package_with(root / "m", "one")
    for folder in (source / "net", source / "common"):
        (folder / MARKER).write_text("{}")
        (folder / MARKER_DRAFT).symlink_to(root / "theirs.txt")
    (root / "theirs.txt").write_text("theirs")
    package = await prepare(packages, "a", source)
    await put(packages, "a", package)
    await packages.confirm(TritonName("a"), ModelSource(str(source)), package.content_key, {})
    assert (root / "theirs.txt").read_text() == "theirs"
    await remove(packages, "a")
    assert tree(repository) == {}


@pytest.mark.parametrize("staging", ["symlink", "copy"])
async def test_deep_folder_is_refused_before_recursion(staging, root, repository):
    source = make(root / "m")
    where = source / "1"
    for _ in range(220):
        where /= "d"
    where.mkdir(parents=True)
    with pytest.raises(InvalidModel, match="nested deeper than 200 folders"):
        await prepare(Packages(repository, [root], staging=staging), "a", source)


# --- folders beside the models


def package_with(folder, content):
    make(folder / "net")
    for name in ("common", ".git", "__MACOSX"):
        (folder / name).mkdir()
        (folder / name / "factor.txt").write_text(content)
    return folder


async def test_schema_may_lie_beside_an_archive(packages, root, repository):
    """ModelMesh's puller puts the schema of a model next to its archive."""
    config = 'backend: "python"'
    folder = make(root / "unpacked" / "m", config)
    archive = shutil.make_archive(str(root / "m"), "tar", folder.parent)
    schema = root / "schema.json"
    tensor = {"name": "IN", "datatype": "FP32", "shape": [2]}
    schema.write_text(json.dumps({"inputs": [tensor], "outputs": []}))
    await place(packages, "a", archive, schema=str(schema))
    assert 'name: "IN"' in (repository / "a" / "config.pbtxt").read_text()


@pytest.mark.parametrize("staging", ["symlink", "hardlink", "copy"])
async def test_folder_beside_models_is_beside_them_in_triton(root, repository, staging):
    """Python code finds it from its own folder, as `../common`."""
    packages = Packages(repository, [root], staging=staging)
    await place(packages, "a", package_with(root / "m", "one"))
    assert (repository / "common" / "factor.txt").read_text() == "one"
    assert sorted(path.name for path in repository.iterdir()) == ["a", "common"]
    await place(packages, "a", root / "m")
    assert (repository / "common" / "factor.txt").read_text() == "one"
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_placement_names_neighbours_and_owners(root, repository):
    packages = Packages(repository, [root])
    first = await place(packages, "a", package_with(root / "a", "a"))
    assert (first.beside, first.warnings) == (("common",), ())
    second = await place(packages, "b", package_with(root / "b", "b"))
    assert second.beside == ()
    assert len(second.warnings) == 1
    (repository / "helper").mkdir()
    for name in ("main", "helper", "a#b"):
        make(root / "c" / name)
    third = await place(packages, "c", root / "c", entry="main")
    unsafe, taken = third.warnings
    assert "its model 'a#b' is called 'ta.p." in unsafe
    assert "Triton takes no such name; code finds the name in the parameter" in unsafe
    assert unsafe.endswith("triton_adapter.model.a#b")
    assert "another folder of Triton's repository has this name" in taken
    assert next(model.placement for model in await packages.staged()) == first


async def test_neighbour_gives_way_to_model_of_its_name(root, repository):
    packages = Packages(repository, [root])
    await place(packages, "a", package_with(root / "a", "a"))
    await place(packages, "common", make(root / "m"))
    assert (repository / "common" / "config.pbtxt").exists()
    await remove(packages, "a")
    assert (repository / "common" / "config.pbtxt").exists()
    await remove(packages, "common")
    assert tree(repository) == {}


async def test_models_folder_is_found_by_hard_coded_path(root, repository):
    """Code that transformer-deploy writes; SageMaker gives each model a name of its own."""
    packages = Packages(repository, [root])
    for name in ("painter", "quiet"):
        (make(root / "m" / name) / "1" / "factor.txt").write_text("weights")
    code = "open(repository + '/painter/1/factor.txt'); InferenceRequest(model_name='quiet')"
    (root / "m" / "painter" / "1" / "model.py").write_text(code)
    await place(packages, "hash", root / "m")
    assert (repository / "painter" / "1" / "factor.txt").read_text() == "weights"
    assert sorted(path.name for path in repository.iterdir()) == ["hash", "painter", "quiet"]
    await remove(packages, "hash")
    await place(packages, "painter", root / "m")
    assert sorted(path.name for path in repository.iterdir()) == ["painter", "quiet"]


# --- backends


@pytest.mark.parametrize("library", ["libtriton_own.so", "1/libtriton_own.so"])
async def test_a_backend_may_lie_in_the_package(root, repository, library):
    packages = Packages(repository, [root], backends=lambda: frozenset({"python"}))
    source = make(root / "o", 'backend: "own"')
    (source / library).touch()
    await place(packages, "c", source)


async def test_runtime_in_python_is_sought_in_triton_alone(root, repository):
    """Triton 2.51 looks for the model.py of such a backend in its own folders."""
    packages = Packages(repository, [root], backends=lambda: frozenset({"python"}))
    source = make(root / "m", 'backend: "pytorch" runtime: "model.py"')
    with pytest.raises(InvalidModel, match="take a Triton that has the backend pytorch"):
        await prepare(packages, "a", source)


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


async def test_model_whose_files_are_gone_can_be_removed(packages, root, repository):
    """SageMaker may delete the folder first."""
    await place(packages, "a", make(root / "m"))
    shutil.rmtree(root / "m")
    await packages.remove(TritonName("a"))
    assert tree(repository) == {}


# --- prepare


async def test_repository_and_package_must_not_hold_each_other(root):
    repository = make(root / "m") / "repository"
    repository.mkdir()
    packages = Packages(repository, [root])
    await place(packages, "a", make(root / "other"))
    for url in (root / "m", repository / "a", repository):
        with pytest.raises(InvalidRequest) as caught:
            await prepare(packages, "b", url)
        assert "must not hold each other" in str(caught.value)


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


async def test_no_file_work_is_done_on_event_loop(root, repository):
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
    package = await packages.prepare(TritonName("b"), ModelId("b"), source)
    for act in (
        packages.place(TritonName("b"), ModelId("b"), package),
        packages.remove(TritonName("a")),
        Packages(repository / "closed", [root]).staged(),
        packages.prepare(TritonName("c"), ModelId("c"), ModelSource(str(root / "closed"))),
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


async def test_folder_that_is_closed_to_adapter_is_named(open_folder):
    """Root may write everywhere, so another user tries."""
    root, repository = open_folder / "models", open_folder / "repository"
    (repository / "closed").mkdir(parents=True)
    await place(Packages(repository, [root]), "a", make(root / "m"))
    make(root / "closed")
    modes = {
        repository / "a": 0o555,
        repository / "closed": 0o000,
        repository: 0o555,
        root / "closed": 0o000,
    }
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
        "BackendError cannot remove model 'a': Permission denied",
        f"BackendError cannot list {repository}/closed: Permission denied",
        f"InvalidModel {root}/closed: Permission denied",
    ]
