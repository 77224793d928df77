"""What a package must be to be served, on real trees."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from adapter.errors import InvalidModel, InvalidRequest, SourceMissing
from adapter.packages.contents import MAX_ENTRIES
from adapter.packages.inspection import MAX_CONFIG_BYTES, inspect

PYTHON = 'backend: "python"\n'


@pytest.fixture
def root(tmp_path):
    """The only model root."""
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def make(folder, config=PYTHON, files=("1/model.py",)):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_bytes(config if isinstance(config, bytes) else config.encode())
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("weights")
    return folder


def look(folder, root):
    return inspect(str(folder), [root])


def refusal(folder, root):
    with pytest.raises(InvalidModel) as caught:
        look(folder, root)
    text = str(caught.value)
    assert text.encode()
    return text


# --- where the url may lead


def test_the_folder_itself_may_be_the_model(root):
    folder = make(root / "m", files=["1/model.py", "1/weights/w.bin", "labels.txt"])
    package = look(folder, root)
    assert package.root == str(folder)
    assert package.config_text == PYTHON
    assert package.size_bytes == len(PYTHON) + 3 * len("weights")
    assert package.declared_bytes is None


def test_the_only_folder_with_a_config_is_the_model(root):
    folder = make(root / "archive" / "m")
    (root / "archive" / "README.md").write_text("loose")
    make(root / "archive" / "__MACOSX")
    make(root / "archive" / ".cache")
    (root / "archive" / "notes").mkdir()
    assert look(root / "archive", root).root == str(folder)


def test_links_to_the_folder_and_to_the_root_are_followed(root, tmp_path):
    folder = make(root / "m")
    (root / "link").symlink_to(folder)
    (tmp_path / "mount").symlink_to(root)
    assert look(root / "link", root).root == str(folder)
    assert inspect(str(folder), [tmp_path / "mount"]).root == str(folder)
    (root / "archive").mkdir()
    (root / "archive" / "m").symlink_to(folder)
    assert look(root / "archive", root).root == str(folder)


def test_a_file_url_is_percent_decoded(root):
    folder = make(root / "a b")
    assert inspect(f"file://{root}/a%20b", [root]).root == str(folder)


@pytest.mark.parametrize(
    "url",
    ["", "m", "./m", "s3://bucket/m", "file:m", "file://host/m", "/m\0", "file:///m%00", "/\ud800"],
)
def test_a_url_that_is_no_absolute_local_path_is_an_invalid_request(url, root):
    with pytest.raises(InvalidRequest, match="url"):
        inspect(url, [Path("/")])


def test_a_url_that_leaves_the_roots_is_refused_whether_it_exists_or_not(root, tmp_path):
    make(tmp_path / "outside")
    make(tmp_path / "models2")
    (root / "link").symlink_to(tmp_path / "outside")
    for url in (
        tmp_path / "outside",
        tmp_path / "absent",
        tmp_path / "models2",
        root / "link",
        f"{root}/../outside",
    ):
        with pytest.raises(InvalidRequest, match="outside the model roots"):
            look(url, root)


def test_a_path_that_does_not_exist_is_a_missing_source(root):
    make(root / "m")
    for url in (root / "absent", root / "m" / "config.pbtxt" / "x", root / ("x" * 300)):
        with pytest.raises(SourceMissing, match="does not exist"):
            look(url, root)


def test_a_url_in_a_loop_of_links_is_refused(root):
    (root / "a").symlink_to(root / "b")
    (root / "b").symlink_to(root / "a")
    assert "symbolic links" in refusal(root / "a", root)


# --- which folder is the model


def test_an_archive_is_to_be_unpacked_first(root):
    (root / "m.tar.gz").write_bytes(b"x")
    assert "is a file; unpack it" in refusal(root / "m.tar.gz", root)
    os.mkfifo(root / "pipe")
    assert "is no folder" in refusal(root / "pipe", root)


def test_a_folder_without_a_config_says_what_was_found_and_what_is_expected(root):
    assert "found nothing; expected config.pbtxt" in refusal(root, root)
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "model.onnx").write_text("x")
    text = refusal(root / "m", root)
    assert "found 1, model.onnx; expected config.pbtxt" in text
    for number in range(30):
        (root / "m" / f"file{number}").touch()
    assert "and 22 more" in refusal(root / "m", root)


def test_several_models_are_listed(root):
    make(root / "a")
    make(root / "b")
    text = refusal(root, root)
    assert "a, b; one model per package is supported" in text


@pytest.mark.parametrize(
    "config", ['platform: "ensemble"', "ensemble_scheduling { }", PYTHON + "ensemble_scheduling {}"]
)
def test_an_ensemble_is_refused(config, root):
    assert "ensembles are not supported" in refusal(make(root / "m", config), root)


# --- the config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("", "config.pbtxt is empty"),
        ("\ufeff \r\n", "config.pbtxt is empty"),
        (b"# \xff", "config.pbtxt is not valid UTF-8: byte 2 is 0xff"),
        ("\nbackend: 3", "config.pbtxt:2:10: Expected string but found: '3'"),
        ("input {", "config.pbtxt:1:"),
        ('backend: "it\': s" }', "config.pbtxt:1:19: Expected identifier or number, got }."),
        ("x {" * 2000, "nested too deeply"),
        (" " * (MAX_CONFIG_BYTES + 1), "config.pbtxt is larger than"),
    ],
)
def test_a_config_that_cannot_be_read_says_where_and_why(config, reason, root):
    assert reason in refusal(make(root / "m", config), root)


def test_a_config_that_is_a_folder_is_refused(root):
    (root / "m" / "config.pbtxt").mkdir(parents=True)
    assert "config.pbtxt: Is a directory" in refusal(root / "m", root)


def test_unknown_fields_and_a_byte_order_mark_are_accepted(root):
    config = "\ufeff" + PYTHON + 'field_of_tomorrow { name: "x" }\r\n'
    assert look(make(root / "m", config), root).config_text == config


@pytest.mark.parametrize(
    ("size", "expected"), [("700MiB", 700 * 2**20), ("1.5 GiB", 3 * 2**29), ("12", 12)]
)
def test_memory_bytes_are_declared_in_the_parameters(size, expected, root):
    config = f'{PYTHON}parameters {{ key: "memory_bytes" value {{ string_value: "{size}" }} }}'
    assert look(make(root / "m", config), root).declared_bytes == expected


@pytest.mark.parametrize("size", ["", "lots", "-1", "1" * 400 + ".0", "1" * 5000])
def test_memory_bytes_that_are_no_size_are_refused(size, root):
    config = f'{PYTHON}parameters {{ key: "memory_bytes" value {{ string_value: "{size}" }} }}'
    assert "config.pbtxt: parameter memory_bytes: " in refusal(make(root / "m", config), root)


# --- versions and model files


@pytest.mark.parametrize("name", ["", "0", "01", "-1", "v1", "1.0", "²"])
def test_a_version_folder_is_a_positive_integer(name, root):
    folder = make(root / "m", files=[f"{name}/model.py"] if name else [])
    (folder / "2").touch()
    assert f"no version folder such as 1; found {name or 'nothing'}" in refusal(folder, root)


@pytest.mark.parametrize(
    "name", [str(2**63), "-" + "9" * 30, "20260101000000000000-old", " +" + "9" * 20]
)
def test_a_folder_name_that_would_end_triton_is_refused(name, root):
    folder = make(root / "m", files=["1/model.py", f"{name}/x"])
    assert f"/{name}: a version number must be below 2**63" in refusal(folder, root)


def test_the_largest_version_is_accepted(root):
    assert look(make(root / "m", files=[f"{2**63 - 1}/model.py"]), root)


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ('backend: "python"', "model.py"),
        ('backend: "onnxruntime"', "model.onnx"),
        ('platform: "onnxruntime_onnx"', "model.onnx"),
        ('backend: "tensorrt"', "model.plan"),
        ('platform: "tensorrt_plan"', "model.plan"),
        ('backend: "pytorch"', "model.pt"),
        ('platform: "pytorch_libtorch"', "model.pt"),
        ('backend: "tensorflow"', "model.savedmodel/saved_model.pb"),
        ('backend: "tensorflow"', "model.graphdef"),
        ('platform: "tensorflow_savedmodel"', "model.savedmodel/saved_model.pb"),
        ('platform: "tensorflow_graphdef"', "model.graphdef"),
        ('backend: "openvino"', "model.xml"),
        ('backend: "python" default_model_filename: "main.py"', "main.py"),
    ],
)
def test_one_version_must_hold_the_file_that_the_backend_needs(config, file, root):
    folder = make(root / "m", config, files=["1/other", f"2/{file}"])
    assert look(folder, root)
    (folder / "2").rename(folder / "old")
    text = refusal(folder, root)
    assert file.partition("/")[0] in text
    assert "in version 1;" in text


@pytest.mark.parametrize(
    "config",
    [
        "max_batch_size: 8",
        'backend: "identity"',
        'backend: "identity" default_model_filename: "x"',
        'backend: "pytorch" platform: "torch_aoti"',
        'backend: "tensorrt" cc_model_filenames { key: "9.0" value: "h.plan" }',
    ],
)
def test_what_is_not_known_for_sure_is_left_to_triton(config, root):
    assert look(make(root / "m", config, files=["1/model.bin"]), root)


def test_an_empty_model_file_is_refused(root):
    folder = make(root / "m")
    (folder / "1" / "model.py").write_text("")
    assert "1/model.py is empty" in refusal(folder, root)


@pytest.mark.parametrize(
    "fields",
    [
        'default_model_filename: "../../secret"',
        'default_model_filename: "/etc/passwd"',
        'cc_model_filenames { key: "9.0" value: "a/../../b" }',
    ],
)
def test_a_model_file_outside_its_version_folder_is_refused(fields, root):
    folder = make(root / "m", f'backend: "tensorrt" {fields}')
    assert "leaves the version folder" in refusal(folder, root)


# --- links and odd files


def test_links_within_the_roots_are_followed_and_counted_once(root):
    folder = make(root / "m", files=["1/model.py"])
    make(root / "shared", files=["big.bin"])
    (folder / "2").symlink_to("1")
    (folder / "1" / "again.py").symlink_to("model.py")
    os.link(folder / "1" / "model.py", folder / "1" / "hard.py")
    (folder / "shared").symlink_to(root / "shared")
    assert look(folder, root).size_bytes == 2 * len(PYTHON) + 2 * len("weights")


def test_a_folder_that_many_links_lead_to_is_entered_once(root):
    """Thirty folders, each linked twice from the one before: a thousand million ways."""
    folder = make(root / "m")
    for number in range(30):
        (folder / f"d{number}").mkdir()
        (folder / f"d{number}" / "left").symlink_to(f"../d{number + 1}")
        (folder / f"d{number}" / "right").symlink_to(f"../d{number + 1}")
    (folder / "d30").mkdir()
    assert look(folder, root)


@pytest.mark.parametrize("link", ["1/model.py", "config.pbtxt", "2", "1/deep/passwd"])
def test_a_link_that_leaves_the_roots_names_link_and_target(link, root, tmp_path):
    outside = make(tmp_path / "outside")
    folder = make(root / "m", files=["1/model.py", "1/deep/x"])
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to(outside)
    text = refusal(folder, root)
    assert str(folder / link) in text
    assert f"{outside} lies outside the model roots" in text


def test_a_model_behind_a_link_that_leaves_the_roots_is_refused(root, tmp_path):
    (root / "m").symlink_to(make(tmp_path / "outside"))
    assert "outside the model roots" in refusal(root, root)


@pytest.mark.parametrize("link", ["1/data.bin", "config.pbtxt"])
def test_a_dangling_link_names_link_and_target(link, root):
    folder = make(root / "m")
    (folder / link).unlink(missing_ok=True)
    (folder / link).symlink_to("nowhere")
    assert f"{folder / link} is a link to nowhere: which does not exist" in refusal(folder, root)


@pytest.mark.parametrize("target", [".", "..", "../../m", "../1", "loop"])
def test_a_loop_of_links_is_refused(target, root):
    folder = make(root / "m")
    (folder / "1" / "loop").symlink_to(target)
    assert "loop" in refusal(folder, root).removeprefix(str(folder / "1" / "loop"))


def test_a_loop_through_a_second_folder_is_refused(root):
    folder = make(root / "m")
    make(root / "other")
    (folder / "1" / "there").symlink_to(root / "other")
    (root / "other" / "back").symlink_to(folder / "1")
    assert "a loop" in refusal(folder, root)


def test_a_loop_in_a_folder_that_no_model_file_is_in_is_refused(root):
    """A link up to the model root, which is not a part of the package."""
    folder = make(root / "m")
    (folder / "1" / "up").symlink_to(root)
    assert "a loop" in refusal(folder, root)


def test_pipes_and_sockets_are_refused(root):
    folder = make(root / "m")
    os.mkfifo(folder / "pipe")
    assert f"{folder / 'pipe'} is neither a file nor a folder" in refusal(folder, root)
    (folder / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "socket"))
        assert "socket is neither a file nor a folder" in refusal(folder, root)


def test_a_config_that_is_a_device_is_refused_without_reading_it(root):
    folder = make(root / "m")
    (folder / "config.pbtxt").unlink()
    (folder / "config.pbtxt").symlink_to("/dev/zero")
    with pytest.raises(InvalidModel, match="neither a file nor a folder"):
        inspect(str(folder), [root, Path("/dev")])


def test_names_that_are_not_utf8_are_served_and_can_be_named(root):
    folder = make(root / "m")
    odd = os.fsencode(folder) + b"/1/\xff\n"
    Path(os.fsdecode(odd)).write_text("x")
    assert look(folder, root).content_key
    Path(os.fsdecode(odd + b"link")).symlink_to(os.fsdecode(b"\xfe"))
    text = refusal(folder, root)
    assert r"1/\xff" in text
    assert r"a link to \xfe" in text


def test_a_package_of_too_many_entries_is_refused(root):
    folder = make(root / "m", files=["1/model.py", *(f"data/{n}" for n in range(1000))])
    for number in range(MAX_ENTRIES // 1000):
        copy = folder / f"copy{number}"
        copy.mkdir()
        for name in range(1000):
            os.link(folder / "data" / str(name), copy / str(name))
    try:
        assert f"more than {MAX_ENTRIES} entries" in refusal(folder, root)
    finally:
        shutil.rmtree(folder)  # pytest would keep it


# --- permissions: root may read everything, so another user looks

_AS_NOBODY = """
import os, sys
from pathlib import Path
from adapter.errors import InvalidModel
from adapter.packages.inspection import inspect
if os.geteuid() == 0:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)
try:
    inspect(sys.argv[1], [Path(sys.argv[2])])
except InvalidModel as error:
    print(error)
"""


@pytest.fixture
def open_root():
    """A root that every user may look into; pytest's own folders are private."""
    with tempfile.TemporaryDirectory(prefix="inspection-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def _refusal_to_nobody(folder, root):
    command = [sys.executable, "-c", _AS_NOBODY, str(folder), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("name", "mode"),
    [("1/model.py", 0o000), ("config.pbtxt", 0o000), ("1", 0o000), ("1", 0o644), ("1", 0o311)],
)
def test_what_may_not_be_read_is_named(name, mode, open_root):
    folder = make(open_root / "m")
    assert _refusal_to_nobody(folder, open_root) == ""
    (folder / name).chmod(mode)
    text = _refusal_to_nobody(folder, open_root)
    (folder / name).chmod(0o755)
    assert f"{folder / name}" in text
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


def test_any_change_gives_another_key(root):
    folder = make(root / "m", files=["1/model.py", "2/model.py", "1/w/x"])
    (folder / "3").symlink_to("1")
    seen = {look(folder, root).content_key}
    file = folder / "1" / "model.py"
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
