"""Which folders in Triton's repository are ours, and whose."""

import json
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from adapter.core.memory import HOST, Device
from adapter.core.model import ModelId, ModelSource, Placement, StagedModel, TritonName
from adapter.errors import BackendError, InvalidRequest
from adapter.packages.contents import MARKER
from adapter.packages.repository import (
    Loaded,
    Ownership,
    claim,
    clear,
    note_ownership,
    ownership_of,
)
from adapter.packages.staging import Packages
from tests.packages.staged import make, place, prepare, put, remove, tree

NAME = TritonName("a")
HELD = {Device("GPU-1"): 7, HOST: 8}
SOURCE = ModelSource("/u \ud800", "onnx", "/s", "e", declared_bytes=5)


@contextmanager
def full_disk():
    """A limit on file size stands in for it: the same call fails, with an OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


@pytest.fixture
def packages(root, repository):
    return Packages(repository, [root])


# --- the note in a folder


def test_a_note_says_what_was_noted(tmp_path):
    ours = Ownership("a", "id of a / ü \ud800", ("h", "a"), ("s",))
    note_ownership(tmp_path, ours)
    assert ownership_of(tmp_path) == ours
    note_ownership(tmp_path, Ownership("b", "b"))
    assert ownership_of(tmp_path) == Ownership("b", "b", (), ())
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


LOADED = Loaded(SOURCE, can_load_again=True, content_key="key", held=HELD)


@pytest.mark.parametrize(
    ("key", "junk"),
    [
        *(("url", None), ("model_type", 3), ("schema", []), ("entry", {}), ("content_key", None)),
        *(("can_load_again", 1), ("declared_bytes", "5"), ("held", []), ("held", {"host": "7"})),
        *(("held", {"host": -1}), ("held", {"host": 0.5})),
    ],
)
def test_damaged_note_leaves_folder_ours_not_loaded(key, junk, tmp_path):
    note_ownership(tmp_path, Ownership("a", "id", ("h", "a"), ("s",), LOADED))
    note = json.loads((tmp_path / MARKER).read_text())
    note["loaded"][key] = junk
    (tmp_path / MARKER).write_text(json.dumps(note))
    assert ownership_of(tmp_path) == Ownership("a", "id", ("h", "a"), ("s",))
    del note["loaded"][key]
    (tmp_path / MARKER).write_text(json.dumps(note))
    assert ownership_of(tmp_path) == Ownership("a", "id", ("h", "a"), ("s",))
    note["loaded"] = junk
    (tmp_path / MARKER).write_text(json.dumps(note))
    assert ownership_of(tmp_path) == Ownership("a", "id", ("h", "a"), ("s",))


def test_note_without_load_means_not_loaded(tmp_path):
    """Versions up to 0.1 wrote it so."""
    old = {"owner": "a", "model_id": "id", "load": ["a"], "along": []}
    (tmp_path / MARKER).write_text(json.dumps(old))
    assert ownership_of(tmp_path) == Ownership("a", "id", ("a",))


@pytest.mark.parametrize(
    "marker",
    [
        *(b"", b"{", b"\xff", b"[]", b"{}", b"3", b"null", b'{"model_id": "x"}'),
        b'{"owner": "a", "model_id": "a", "load": 3, "along": []}',
        b'{"owner": "a", "model_id": "a", "load": [3], "along": []}',
        b'{"owner": 3, "model_id": "a", "load": [], "along": []}',
        b"[" * 100_000,
    ],
    ids=lambda marker: marker[:20],
)
def test_note_that_is_none_makes_no_folder_ours(marker, tmp_path):
    (tmp_path / MARKER).write_bytes(marker)
    assert ownership_of(tmp_path) is None


def test_folder_is_cleared_but_for_what_is_kept(tmp_path):
    folder = tmp_path / "a"
    (folder / "1" / "deep").mkdir(parents=True)
    (folder / "kept").mkdir()
    (folder / "kept" / "x").touch()
    (folder / "link").symlink_to(folder / "kept")
    note_ownership(folder, Ownership("a", "a"))
    claim(folder, Ownership("a", "b"), keep="kept")
    assert set(tree(folder)) == {"kept", "kept/x", MARKER}
    assert ownership_of(folder) == Ownership("a", "b")
    clear(folder)
    assert tree(tmp_path) == {}


# --- whose folder it is


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
async def test_foreign_name_is_refused_untouched(kind, packages, root, repository):
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


async def test_marker_that_is_link_makes_no_folder_ours(packages, root, repository):
    await place(packages, "ours", make(root / "m"))
    (repository / "a").mkdir()
    (repository / "a" / MARKER).symlink_to(repository / "ours" / MARKER)
    await packages.remove(TritonName("a"))
    assert (repository / "a" / MARKER).is_symlink()


async def test_what_is_staged_is_listed_by_name(packages, root, repository):
    sources = {name: make(root / name) for name in ("b", "a")}
    for name, path in sources.items():
        await place(packages, name, path)
    make(repository / "theirs")
    (repository / "file").touch()
    (repository / "link").symlink_to(repository / "a")
    assert await Packages(repository, []).staged() == [
        StagedModel(TritonName(name), ModelId(f"id of {name}"), Placement((TritonName(name),)))
        for name in ("a", "b")
    ]


async def test_helpers_name_is_refused_with_its_package(packages, root, repository):
    for name in ("main", "helper"):
        make(root / "m" / name)
    await place(packages, "a", root / "m", entry="main")
    before = tree(repository)
    with pytest.raises(InvalidRequest, match="'helper' is the name of a model in the package"):
        await place(packages, "helper", root / "m" / "main")
    await remove(packages, "helper")
    assert tree(repository) == before


async def test_prepared_package_is_listed_to_be_cleared(packages, root, repository):
    """The process ended between the two."""
    shutil.make_archive(str(root / "m"), "zip", make(root / "m"))
    await prepare(packages, "a", root / "m.zip")
    (staged,) = await packages.staged()
    assert staged.placement == Placement((TritonName("a"),))
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_remove_leaves_what_others_own(packages, root, repository):
    await place(packages, "a", make(root / "m"))
    await place(packages, "b", root / "m")
    names = (TritonName("b"), TritonName("theirs"), TritonName("a"))
    (repository / "theirs").mkdir()
    note_ownership(repository / "a", Ownership("a", "a", names))
    await remove(packages, "a")
    assert {folder.name for folder in repository.iterdir()} == {"b", "theirs"}


# --- what is served


@pytest.mark.parametrize("brought", [{"config": "x" * 9999}, {"files": (("1/model.py", b"x"),)}])
async def test_model_of_request_files_cannot_be_reloaded(brought, packages, root, repository):
    """What a request brought is not noted."""
    await place(packages, "a", make(root / "m"))
    await packages.confirm(NAME, replace(SOURCE, **brought), "key", HELD)
    for _ in range(2):
        (staged,) = await packages.staged()
        assert (staged.source, staged.can_load_again) == (SOURCE, False)
        assert len((repository / "a" / MARKER).read_bytes()) < 1000
        # the next run knows no better source than the note's
        await packages.confirm(NAME, staged.source, "key", {HOST: 9})


async def test_only_entry_that_is_there_can_be_confirmed(packages, root, repository):
    for name in ("main", "helper"):
        make(root / "m" / name)
    await place(packages, "a", root / "m", entry="main")
    make(repository / "theirs")
    before = tree(repository)
    for name in ("absent", "theirs", "helper"):
        await packages.confirm(TritonName(name), SOURCE, "key", HELD)
    assert tree(repository) == before


async def test_disk_that_refuses_note_leaves_old_one(packages, root):
    await place(packages, "a", make(root / "m"))
    await packages.confirm(NAME, SOURCE, "key", HELD)
    with full_disk(), pytest.raises(BackendError, match=r"/a: File too large"):
        await packages.confirm(NAME, SOURCE, "key", {HOST: 9})
    (staged,) = await packages.staged()
    assert staged.held == HELD


async def test_full_disk_keeps_no_model_from_being_removed(packages, root, repository):
    for name in ("main", "helper"):
        make(root / "m" / name)
    await place(packages, "a", root / "m", entry="main")
    await packages.confirm(NAME, SOURCE, "key", HELD)
    with full_disk():
        await remove(packages, "a")
    assert tree(repository) == {}


async def test_restaged_model_is_unloaded_until_confirmed(packages, root):
    await place(packages, "a", make(root / "m"))
    await packages.confirm(NAME, SOURCE, "key", HELD)
    shutil.make_archive(str(root / "m"), "zip", root / "m")
    package = await prepare(packages, "a", root / "m.zip")
    assert [model.is_loaded for model in await packages.staged()] == [False]
    await packages.confirm(NAME, SOURCE, "key", HELD)
    await put(packages, "a", package)
    assert [model.is_loaded for model in await packages.staged()] == [False]


async def test_archive_replacing_models_clears_them(packages, root, repository):
    """A removal that failed had left them."""
    for name in ("main", "helper"):
        make(root / "m" / name)
    await place(packages, "a", root / "m", entry="main")
    shutil.make_archive(str(root / "one"), "zip", root / "m" / "main")
    await prepare(packages, "a", root / "one.zip")
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_kept_files_are_out_of_reach_of_models(packages, root, repository):
    """While a model is updated its old files are kept, and other models come and go."""
    shutil.make_archive(str(root / "m"), "zip", make(root / "m"))
    await place(packages, "m", root / "m.zip")
    kept = Path(await packages.set_aside(TritonName("m")))
    before = tree(kept)
    assert "1/model.py" in before
    other = make(root / "other")
    for name in ("kept-m", "half-kept-m"):
        await place(packages, name, other)
        assert set(tree(repository / name)) == {"1", "config.pbtxt", MARKER}
        await remove(packages, name)
    assert tree(kept) == before
    await packages.discard(str(kept))
    await remove(packages, "m")
    assert tree(repository) == {}


async def test_half_made_folders_are_swept_at_start(packages, root, repository):
    await place(packages, "ours", make(root / "m"))
    left = [repository / f".ta-half-{name}" for name in ("bare", "noted", "link", "file")]
    left[0].mkdir()
    left[1].mkdir()
    note_ownership(left[1], Ownership("a", "a"))
    left[2].symlink_to(root)
    left[3].touch()
    assert [model.name for model in await packages.staged()] == ["ours"]
    assert {path.name for path in repository.iterdir()} == {"ours", left[2].name, left[3].name}
    assert (root / "m" / "config.pbtxt").exists()
