"""What becomes of a staged folder on its way to Triton, and of a request's files on theirs."""

import json
import os

import pytest

from adapter.core.model import ModelId, ModelSource, TritonName, private_name
from adapter.errors import InvalidModel, InvalidRequest, InvalidSettings
from adapter.packages.staging import Packages
from adapter.packages.uploads import (
    MAX_UPLOAD_BYTES,
    config_text,
    payload,
    write_package,
)
from adapter.settings import load_settings
from tests.packages.models import write_adding, write_ensemble
from tests.trees import write_python_model


@pytest.fixture
def staged(tmp_path):
    return write_python_model(tmp_path / "staged")


def test_files_travel_without_config_and_ours(staged, tmp_path):
    (staged / "labels.txt").write_text("cat")
    (staged / ".triton-adapter.json").write_text("{}")
    (staged / ".unpacked" / "1").mkdir(parents=True)
    (staged / ".unpacked" / "1" / "model.py").write_text("twice")
    (staged / "1" / ".unpacked").mkdir()
    (staged / "1" / ".unpacked" / "own").write_bytes(b"")
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "weights").write_bytes(b"123")
    (staged / "2").symlink_to(tmp_path / "elsewhere")
    files = payload(staged, [str(staged.parent)]).files
    assert set(files) == {
        *("file:1/model.py", "file:1/.unpacked/own"),
        *("file:labels.txt", "file:2/deep/weights"),
    }
    assert files["file:2/deep/weights"] == b"123"
    assert files["file:labels.txt"] == b"cat"


def test_config_travels_as_json_unrenamed(staged):
    config = json.loads(payload(staged, [str(staged.parent)]).config)
    assert config["backend"] == "python"
    assert config["input"] == [{"name": "IN", "data_type": "TYPE_FP32", "dims": ["-1"]}]


def test_field_lost_by_json_is_refused(staged):
    (staged / "config.pbtxt").write_text('backend: "python"\nfuture_field: 7\n')
    with pytest.raises(InvalidModel, match=r"lost: staged/config.pbtxt:2: field 'future_field'"):
        payload(staged, [str(staged.parent)])


def test_an_ensemble_is_refused(staged):
    (staged / "config.pbtxt").write_text('platform: "ensemble"')
    with pytest.raises(InvalidModel, match=r"staged/config.pbtxt: an ensemble cannot be uploaded"):
        payload(staged, [str(staged.parent)])


def test_more_than_a_message_holds_is_refused_unread(staged):
    with (staged / "1" / "weights").open("wb") as file:
        file.truncate(MAX_UPLOAD_BYTES)
    with pytest.raises(InvalidModel, match=rf"^staged: \d+ bytes .* at most {MAX_UPLOAD_BYTES}"):
        payload(staged, [str(staged.parent)])


def test_name_that_is_not_utf_8_is_refused(staged):
    (staged / "1" / os.fsdecode(b"a\xff")).touch()
    with pytest.raises(InvalidModel, match=r"staged/1/a\\xff: its name is not UTF-8"):
        payload(staged, [str(staged.parent)])


def test_what_cannot_be_read_is_named(staged):
    (staged / "1" / "gone").symlink_to("nowhere")
    with pytest.raises(InvalidModel, match=r"1/gone: No such file"):
        payload(staged, [str(staged.parent)])


def test_unknown_fields_are_named_all_at_once():
    with pytest.raises(InvalidRequest, match=r": input\.nam, inputs, z$"):
        config_text({"z": 1, "inputs": [], "input": [{"nam": 1}, {"nam": 2}]})


@pytest.mark.parametrize(
    "given",
    [{"\ud800": 1}, {"name": "\ud800"}, {"parameters": {"\ud800": {"string_value": "x"}}}],
)
def test_half_surrogate_pair_in_config_is_callers_mistake(given):
    with pytest.raises(InvalidRequest, match=r"^config"):
        config_text(given)


def test_time_of_written_file_tells_its_content(tmp_path):
    for name, content in {"a": b"one", "b": b"one", "c": b"two"}.items():
        source = ModelSource("request:x", files=(("1/f", content),))
        write_package(tmp_path / name, source)
    times = {name: (tmp_path / name / "1" / "f").stat().st_mtime for name in "abc"}
    assert times["a"] == times["b"] != times["c"]


async def prepared(tmp_path, source):
    (tmp_path / "repository").mkdir(exist_ok=True)
    packages = Packages(tmp_path / "repository", [tmp_path])
    package = await packages.prepare(TritonName("m"), ModelId("m"), source)
    return packages, package


async def test_equal_files_of_requests_have_one_content_key(tmp_path):
    model = write_python_model(tmp_path / "source") / "1" / "model.py"
    keys = []
    for last in (b"#", b"#", b";"):  # of the same size each
        files = (("1/model.py", model.read_bytes() + last),)
        source = ModelSource("request:x", config='backend: "python"', files=files)
        packages, package = await prepared(tmp_path, source)
        keys.append(package.content_key)
        await packages.remove(TritonName("m"))
    assert keys[0] == keys[1] != keys[2]


async def test_config_of_request_replaces_the_folders(tmp_path, staged):
    before = (staged / "config.pbtxt").read_text()
    source = ModelSource(str(staged), config='backend: "python" max_batch_size: 8')
    packages, package = await prepared(tmp_path, source)
    await packages.place(TritonName("m"), ModelId("m"), package)
    placed = tmp_path / "repository" / "m"
    assert "max_batch_size: 8" in (placed / "config.pbtxt").read_text()
    assert (placed / "1").resolve() == staged / "1"
    await packages.remove(TritonName("m"))
    assert not placed.exists()
    assert (staged / "config.pbtxt").read_text() == before


async def test_config_of_request_is_that_of_entry(tmp_path):
    """A config that Triton showed has the private names of the steps."""
    package = tmp_path / "shop" / "all"
    write_adding(package / "step", 1)
    write_ensemble(package / "whole", "step")
    before = {path: path.read_bytes() for path in package.rglob("config.pbtxt")}
    config = before[package / "whole" / "config.pbtxt"].decode()
    shown = config.replace('"step"', f'"{private_name(TritonName("other"), "step")}"')
    assert shown != config
    source = ModelSource(str(package.parent), config=f"{shown}metric_tags {{ key: 'new' }}")
    packages, found = await prepared(tmp_path, source)
    await packages.place(TritonName("m"), ModelId("m"), found)
    placed = (tmp_path / "repository" / "m" / "config.pbtxt").read_text()
    assert "metric_tags { key: 'new' }" in placed
    assert f'model_name: "{private_name(TritonName("m"), "step")}"' in placed
    assert before == {path: path.read_bytes() for path in package.rglob("config.pbtxt")}


async def test_requests_config_may_name_no_foreign_step(tmp_path):
    write_adding(tmp_path / "shop" / "step", 1)
    write_ensemble(tmp_path / "shop" / "whole", "step")
    config = (tmp_path / "shop" / "whole" / "config.pbtxt").read_text()
    source = ModelSource(str(tmp_path / "shop"), config=config.replace('"step"', '"other"'))
    with pytest.raises(InvalidModel, match="step 'other', which is not in the package"):
        await prepared(tmp_path, source)


async def test_a_config_is_none_for_a_lone_file(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"x")
    source = ModelSource(str(tmp_path / "model.onnx"), config='backend: "onnxruntime"')
    with pytest.raises(InvalidModel, match=r"model.onnx: it is not a folder"):
        await prepared(tmp_path, source)


def test_upload_needs_no_shared_repository():
    given = {"staging": "upload", "triton": "embedded"}
    with pytest.raises(InvalidSettings, match=r"flag --staging: .* needs triton=external"):
        load_settings(given, {}, None)
    assert load_settings({"staging": "upload"}, {}, None).settings.repository is None
