"""Which folders in Triton's repository are ours, and whose."""

import shutil

import pytest

from adapter.core.model import ModelId, Placement, TritonName
from adapter.errors import InvalidRequest
from adapter.packages.files import MARKER
from adapter.packages.ownership import Ownership, clear, note_ownership, ownership_of
from adapter.packages.staging import Packages, StagedModel
from tests.packages.staged import ensemble, make, place, prepare, remove, tree


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


# --- the note in a folder


def test_a_note_says_what_was_noted(tmp_path):
    ours = Ownership("a", "id of a / ü \ud800", ("h", "a"), ("s",))
    note_ownership(tmp_path, ours)
    assert ownership_of(tmp_path) == ours
    note_ownership(tmp_path, Ownership("b", "b"))
    assert ownership_of(tmp_path) == Ownership("b", "b", (), ())
    assert [path.name for path in tmp_path.iterdir()] == [MARKER]


@pytest.mark.parametrize(
    "marker",
    [
        *(b"", b"{", b"\xff", b"[]", b"{}", b"3", b"null", b'{"model_id": "x"}'),
        b'{"owner": "a", "model_id": "a", "load": 3, "along": []}',
        b"[" * 100_000,
    ],
    ids=lambda marker: marker[:20],
)
def test_a_note_that_is_none_makes_no_folder_ours(marker, tmp_path):
    (tmp_path / MARKER).write_bytes(marker)
    assert ownership_of(tmp_path) is None


def test_a_folder_without_a_note_is_not_ours(tmp_path):
    assert ownership_of(tmp_path) is None
    assert ownership_of(tmp_path / "absent") is None


def test_a_folder_is_cleared_but_for_what_is_kept(tmp_path):
    folder = tmp_path / "a"
    (folder / "1" / "deep").mkdir(parents=True)
    (folder / "kept").mkdir()
    (folder / "kept" / "x").touch()
    (folder / "link").symlink_to(folder / "kept")
    note_ownership(folder, Ownership("a", "a"))
    clear(folder, keep="kept")
    assert set(tree(folder)) == {"kept", "kept/x", MARKER}
    clear(folder)
    assert not folder.exists()


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


async def test_a_marker_in_the_package_is_not_taken_for_ours(packages, root, repository):
    source = make(root / "m")
    (source / MARKER).write_text("theirs")
    await place(packages, "a", source)
    assert (source / MARKER).read_text() == "theirs"
    assert [model.model_id for model in await packages.staged()] == ["id of a"]


async def test_a_marker_that_is_a_link_makes_no_folder_ours(packages, root, repository):
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


async def test_a_helpers_name_is_refused_to_others_by_its_packages_name(packages, root, repository):
    for name in ("main", "helper"):
        make(root / "m" / name)
    await place(packages, "a", root / "m", entry="main")
    before = tree(repository)
    with pytest.raises(InvalidRequest, match="'helper' is the name of a model in the package"):
        await place(packages, "helper", root / "m" / "main")
    await remove(packages, "helper")
    assert tree(repository) == before


async def test_a_package_of_several_models_is_listed_once_with_its_placement(
    packages, root, repository
):
    make(root / "m" / "one")
    make(root / "m" / "whole", ensemble("one"))
    placement = await place(packages, "a", root / "m")
    (staged,) = await Packages(repository, []).staged()
    assert staged == StagedModel(TritonName("a"), ModelId("id of a"), placement)


async def test_a_package_that_was_only_prepared_is_listed_to_be_cleared(packages, root, repository):
    """The process ended between the two."""
    shutil.make_archive(str(root / "m"), "zip", make(root / "m"))
    await prepare(packages, "a", root / "m.zip")
    (staged,) = await packages.staged()
    assert staged.placement == Placement((TritonName("a"),))
    await remove(packages, "a")
    assert tree(repository) == {}


async def test_remove_leaves_alone_what_a_note_names_and_others_own(packages, root, repository):
    await place(packages, "a", make(root / "m"))
    await place(packages, "b", root / "m")
    names = (TritonName("b"), TritonName("theirs"), TritonName("a"))
    (repository / "theirs").mkdir()
    note_ownership(repository / "a", Ownership("a", "a", names))
    await remove(packages, "a")
    assert {folder.name for folder in repository.iterdir()} == {"b", "theirs"}
