"""What lies within some folders, and links that are planted while somebody looks."""

import os
import shutil

import pytest

from adapter.core.model import TritonName
from adapter.errors import InvalidModel
from adapter.packages.roots import Inside
from adapter.packages.staging import Packages
from adapter.packages.uploads import payload
from tests.packages.staged import make, prepare, put, tree


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("inside")
    return root


@pytest.fixture
def secret(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "model.py").write_text("a secret")
    return tmp_path / "outside"


def read(root, path):
    with Inside([str(root)]).reading(str(path)) as file:
        return file.read().decode()


@pytest.mark.parametrize(
    "link",
    [
        "a/b/file",
        "./a//b/file",
        "a/../a/b/file",
        "../root/a/b/file",
        "{root}/a/b/file",
        "a/link/file",
    ],
)
def test_links_that_stay_inside_are_followed(root, link):
    (root / "a" / "link").symlink_to("b")
    (root / "link").symlink_to(link.format(root=root))
    assert read(root, root / "link") == "inside"


def test_kubernetes_volume_folder_is_followed(root):
    """The names lead to `..data`, and that to the version in force."""
    (root / "..2026_11" / "m").mkdir(parents=True)
    (root / "..2026_11" / "m" / "file").write_text("mounted")
    (root / "..data").symlink_to("..2026_11")
    (root / "m").symlink_to("..data/m")
    assert read(root, root / "m" / "file") == "mounted"


@pytest.mark.parametrize(
    "link", ["../outside/model.py", "{outside}/model.py", "a/../../outside/model.py"]
)
@pytest.mark.parametrize("is_deep", [False, True])
def test_links_that_lead_out_are_not_followed(root, secret, link, is_deep):
    (root / "link").symlink_to(link.format(outside=secret))
    (root / "way").symlink_to("link")
    with pytest.raises(InvalidModel, match="leads out of the model roots, which --model-roots"):
        read(root, root / ("way" if is_deep else "link"))


def test_folder_that_became_link_out_is_not_entered(root, secret):
    shutil.rmtree(root / "a" / "b")
    (root / "a" / "b").symlink_to(secret)
    with pytest.raises(InvalidModel, match="leads out"):
        read(root, root / "a" / "b" / "model.py")


def test_a_circle_of_links_ends(root):
    (root / "x").symlink_to("y")
    (root / "y").symlink_to("x")
    with pytest.raises(OSError, match="symbolic links"):
        read(root, root / "x")


def test_a_pipe_is_not_opened(root):
    os.mkfifo(root / "pipe")
    with pytest.raises(InvalidModel, match="neither a file nor a folder"):
        read(root, root / "pipe")


def test_no_descriptor_stays_open(root, secret):
    (root / "out").symlink_to(secret)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(InvalidModel):
        list(Inside([str(root)]).tree(str(root)))
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


# --- planted between inspection and staging


def plant_file(package, secret):
    (package / "1" / "model.py").unlink()
    (package / "1" / "model.py").symlink_to(secret / "model.py")


def plant_folder(package, secret):
    shutil.rmtree(package / "1")
    (package / "1").symlink_to(secret)


def plant_package(package, secret):
    shutil.rmtree(package)
    (secret / "1").mkdir(exist_ok=True)
    (secret / "1" / "model.py").write_text("a secret")
    package.symlink_to(secret)


PLANTS = [plant_file, plant_folder, plant_package]


def texts(folder):
    return [path.read_text() for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("staging", ["copy", "hardlink"])
async def test_what_is_planted_after_inspection_is_not_staged(
    tmp_path, root, secret, staging, plant
):
    packages, repository = Packages(tmp_path / "r", [root], staging=staging), tmp_path / "r"
    repository.mkdir()
    package = await prepare(packages, "m", make(root / "m"))
    plant(root / "m", secret)
    with pytest.raises(InvalidModel, match="leads out of the model roots"):
        await put(packages, "m", package)
    assert "a secret" not in texts(repository)
    await packages.remove(TritonName("m"))
    assert tree(repository) == {}


@pytest.mark.parametrize("plant", [plant_folder, plant_package])
async def test_nothing_outside_is_linked(tmp_path, root, secret, plant):
    packages = Packages(tmp_path / "r", [root])
    (tmp_path / "r").mkdir()
    package = await prepare(packages, "m", make(root / "m"))
    plant(root / "m", secret)
    with pytest.raises(InvalidModel, match="leads out of the model roots"):
        await put(packages, "m", package)
    assert "a secret" not in texts(tmp_path / "r")


@pytest.mark.parametrize("plant", PLANTS)
async def test_what_is_planted_after_staging_is_not_uploaded(tmp_path, root, secret, plant):
    packages = Packages(tmp_path / "r", [root])
    (tmp_path / "r").mkdir()
    await put(packages, "m", await prepare(packages, "m", make(root / "m")))
    plant(root / "m", secret)
    with pytest.raises(InvalidModel, match="leads out of the model roots"):
        payload(tmp_path / "r" / "m", [str(root)])


@pytest.mark.parametrize("name", ["config.pbtxt", "_schema.json"])
def test_config_planted_during_inspection_is_not_read(root, secret, name, monkeypatch):
    """Its words would be in the answer."""
    from adapter.core.model import ModelSource
    from adapter.packages import inspect

    package = make(root / "m")
    (package / name).write_text("{}")
    (secret / "words").write_text("a secret {")
    seen = inspect.Contents

    class Planting(seen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            (package / name).unlink()
            (package / name).symlink_to(secret / "words")

    monkeypatch.setattr(inspect, "Contents", Planting)
    with pytest.raises(InvalidModel, match="leads out of the model roots"):
        inspect.inspect(ModelSource(str(package)), package, [str(root)])
