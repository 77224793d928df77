"""What lies below a package's root: links, odd files, permissions, and the content key."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from adapter.core.model import ModelSource
from adapter.errors import InvalidModel
from adapter.packages import contents
from adapter.packages.inspect import inspect
from tests.unit.packages.looking import PYTHON, look, make, refusal

# --- links and odd files


def test_links_within_roots_are_followed_and_counted_once(root):
    folder = make(root / "m", files=["1/model.py"])
    make(root / "shared", files=["big.bin"])
    (folder / "2").symlink_to("1")
    (folder / "1" / "again.py").symlink_to("model.py")
    os.link(folder / "1" / "model.py", folder / "1" / "hard.py")
    (folder / "shared").symlink_to(root / "shared")
    assert look(folder, root).size_bytes == 2 * len(PYTHON) + 2 * len("weights")


def double(folder, levels):
    """Make a chain of folders, each with two links to the next one."""
    for number in range(levels):
        (folder / f"d{number}").mkdir(parents=True)
        (folder / f"d{number}" / "left").symlink_to(f"../d{number + 1}")
        (folder / f"d{number}" / "right").symlink_to(f"../d{number + 1}")
    (folder / f"d{levels}").mkdir()
    return folder


@pytest.mark.parametrize("has_config", [True, False])
def test_links_that_multiply_paths_are_refused(root, has_config):
    """Triton looks at what is behind each link, a thousand million times here, at each load. So
    does whoever seeks a config.pbtxt in a folder without one.
    """
    folder = double(root / "m", 30)
    if has_config:
        make(folder)
    assert "its links lead to more than 1000000 paths" in refusal(folder, root)


def test_folder_behind_a_thousand_links_is_entered_once(root):
    assert look(double(make(root / "m"), 9), root)


@pytest.mark.parametrize("link", ["1/model.py", "config.pbtxt", "2", "1/deep/passwd"])
def test_link_that_leaves_roots_names_link_and_target(link, root, tmp_path):
    outside = make(tmp_path / "outside")
    folder = make(root / "m", files=["1/model.py", "1/deep/x"])
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to(outside)
    text = refusal(folder, root)
    assert str(folder / link) in text
    assert f"{outside} is outside the model roots" in text


def test_a_loop_through_a_second_folder_is_refused(root):
    folder = make(root / "m")
    make(root / "other")
    (folder / "1" / "there").symlink_to(root / "other")
    (root / "other" / "back").symlink_to(folder / "1")
    assert "a loop" in refusal(folder, root)


def test_loop_in_unused_folder_is_refused(root):
    """A link up to the model root, which is not a part of the package."""
    folder = make(root / "m")
    (folder / "1" / "up").symlink_to(root)
    assert "a loop" in refusal(folder, root)


def test_config_that_is_a_device_is_refused(root):
    folder = make(root / "m")
    (folder / "config.pbtxt").unlink()
    (folder / "config.pbtxt").symlink_to("/dev/zero")
    with pytest.raises(InvalidModel, match="neither a file nor a folder"):
        inspect(ModelSource(str(folder)), folder, [str(root), "/dev"])


def test_a_package_of_too_many_entries_is_refused(root, monkeypatch):
    monkeypatch.setattr(contents, "MAX_ENTRIES", 100)
    folder = make(root / "m", files=["1/model.py", *(f"data/{n}" for n in range(100))])
    assert "holds more than 100 entries" in refusal(folder, root)


def test_model_behind_link_that_leaves_roots_is_refused(root, tmp_path):
    (root / "m").symlink_to(make(tmp_path / "outside"))
    assert "outside the model roots, which --model-roots" in refusal(root, root)


# --- permissions: root may read everything, so another user looks

# says of each folder in a line of its own what is wrong with it
_AS_NOBODY = """
import os, sys
from pathlib import Path
from adapter.core.model import ModelSource
from adapter.errors import InvalidModel
from adapter.packages.inspect import inspect
if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
root, *folders = sys.argv[1:]
for folder in folders:
    try:
        inspect(ModelSource(folder), Path(folder), [root])
        print()
    except InvalidModel as error:
        print(error)
"""


@pytest.fixture
def open_root():
    """A root that every user may look into; pytest's own folders are private."""
    with tempfile.TemporaryDirectory(prefix="inspection-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _refusals_to_nobody(folders, root):
    command = [sys.executable, "-c", _AS_NOBODY, str(root), *map(str, folders)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.splitlines()


@pytest.mark.slow
def test_what_may_not_be_read_is_named(open_root):
    cases = [
        *(("1/model.py", 0o000), ("config.pbtxt", 0o000)),
        *(("1", 0o000), ("1", 0o644), ("1", 0o311)),
    ]
    folders = [make(open_root / f"m{number}") for number in range(len(cases))]
    assert _refusals_to_nobody(folders, open_root) == [""] * len(cases)
    closed = [folder / name for folder, (name, _) in zip(folders, cases, strict=True)]
    for path, (_, mode) in zip(closed, cases, strict=True):
        path.chmod(mode)
    texts = _refusals_to_nobody(folders, open_root)
    for path in closed:
        path.chmod(0o755)
    for path, text in zip(closed, texts, strict=True):
        assert f"{path}" in text
        assert "Permission denied" in text


# --- the content key


def test_the_same_files_give_the_same_key(root):
    """Wherever they are, and in whichever order the disk lists them."""
    files = ["1/model.py", *(f"1/{number}" for number in range(30))]
    first = make(root / "a", files=files)
    second = make(root / "b", files=reversed(files))
    for name in ("config.pbtxt", *files):
        shutil.copystat(first / name, second / name)
    key = look(first, root).content_key
    assert look(first, root).content_key == key
    assert look(second, root).content_key == key


def test_code_that_python_has_compiled_changes_no_key(root):
    """The first load writes it beside the code, and the size that it had is that of the next."""
    folder = make(root / "m", files=["1/model.py"])
    key = look(folder, root).content_key
    times = (folder / "1").stat()
    make(folder / "1" / "__pycache__", files=["model.cpython-312.pyc"])
    os.utime(folder / "1", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert look(folder, root).content_key == key


def test_key_of_store_distinguishes_equal_files(root):
    """Else a tenant's file could teach the adapter the size of another's."""
    folder = make(root / "m", files=["1/model.py"])
    sources = [ModelSource("/m", is_cached=True, key=key) for key in ("team-a/m", "team-b/m")]
    keys = {inspect(source, folder, [str(root)]).content_key for source in sources}
    assert len(keys) == 2


def test_any_change_gives_another_key(root):
    folder = make(root / "m", files=["1/model.py", "2/model.py", "1/w/x"])
    (folder / "3").symlink_to("1")
    seen = {look(folder, root).content_key}
    file = folder / "1" / "w" / "x"
    times = file.stat()

    def changed():
        key = look(folder, root).content_key
        is_new = key not in seen
        seen.add(key)
        return is_new

    file.write_text("longer than before")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changed(), "size"
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert changed(), "time"
    file.rename(folder / "1" / "renamed")
    assert changed(), "name"
    (folder / "empty").mkdir()
    assert changed(), "an empty folder"
    (folder / "3").unlink()
    (folder / "3").symlink_to("2")
    assert changed(), "a link's target"
    config = folder / "config.pbtxt"
    times = config.stat()
    config.write_text(PYTHON.replace("\n", " "))
    os.utime(config, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert changed(), "the config's text"
    assert not changed()
