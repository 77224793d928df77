"""What `triton-adapter inspect` says of a package, and that it leaves no trace."""

import json
import os
import subprocess
import sys
import tarfile
import tempfile

import pytest

from adapter.cli import inspect as inspecting
from adapter.cli.main import main
from tests.fakes.nvml import FakeGpu, FakeNvml
from tests.trees import CONFIG, write_python_model

ENSEMBLE = """\
name: "both"
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [ { model_name: "double" model_version: -1
  input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }
"""
SCHEMA = '{"inputs": [{"name": "A", "datatype": "FP32", "shape": [-1, 3]}]}'


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """The folder for temporary files, empty at first."""
    (folder := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def packages(tmp_path):
    (folder := tmp_path / "packages").mkdir()
    return folder


@pytest.fixture
def inspect(capsys, scratch):
    def run(*argv):
        code = main(("inspect", *map(str, argv)), {})
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def report(inspect):
    """What --json says of a good package."""

    def run(*argv):
        code, out, err = inspect(*argv, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def several(folder):
    """An ensemble of one step, and a model that nothing refers to."""
    write_python_model(folder / "double")
    (folder / "both").mkdir()
    (folder / "both" / "config.pbtxt").write_text(ENSEMBLE)
    (folder / "plain" / "1").mkdir(parents=True)
    (folder / "plain" / "1" / "model.onnx").write_text("onnx")
    return folder


def packed(folder):
    path = folder.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    return path


def snapshot(folder):
    """Everything below: kind, time of change, content."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {
        path: (status.st_mode, status.st_mtime_ns, path.is_file() and path.read_bytes())
        for path, status in found.items()
    }


def models(report):
    return {model["own_name"]: model for model in report["models"]}


def test_folder_is_shown_as_it_would_be_staged(inspect, packages):
    folder = write_python_model(packages / "m", config="# mine\n" + CONFIG)
    (folder / "3").mkdir()
    (folder / "3" / "model.py").write_text("class TritonPythonModel: pass")
    (folder / "labels.txt").write_text("a")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    assert inspect(folder) == (
        0,
        f"""\
package   {folder}
name      m
disk      {size} bytes
declared  no size
backends  python
GPUs      as gpu_placement says

m
  entry: answers to the caller
  backend   python
  versions  1, 3
  config    the caller's file, unchanged
  staged
    1 -> 1
    3 -> 3
    config.pbtxt
    labels.txt -> labels.txt
""",
        "",
    )


@pytest.mark.parametrize("url", ["s3://bucket/m", "gs://bucket/m", "https://host/m"])
def test_inspect_refuses_url_as_a_load_does(inspect, url):
    code, out, err = inspect(url)
    assert (code, out) == (1, "")
    assert f"url '{url}' is neither an absolute path nor a file:/// URL; models of a bucket" in err


def test_file_url_is_taken_as_load_takes_it(inspect, packages):
    folder = write_python_model(packages / "m")
    assert inspect(folder.as_uri())[1].splitlines()[1:] == inspect(folder)[1].splitlines()[1:]


def test_changed_config_is_shown_as_diff(inspect, packages):
    folder = write_python_model(packages / "m", config='name: "old"\n' + CONFIG)

    lines = inspect(folder)[1].splitlines()

    assert "  config    the caller's file, changed as below" in lines
    diff = [line.removeprefix("  | ") for line in lines if line.startswith("  | ")]
    assert diff[:4] == ["--- config.pbtxt", "+++ m/config.pbtxt", "@@ -1,4 +1,4 @@", '-name: "old"']


def test_declared_bytes_and_warnings_are_told(inspect, packages):
    declared = 'parameters { key: "memory_bytes" value { string_value: "3GiB" } }\nnovel: 1\n'
    folder = write_python_model(packages / "m", config=CONFIG + declared)

    out = inspect(folder)[1]

    assert "\ndeclared  3.0 GiB\n" in out
    assert f"\nwarning   {folder}/config.pbtxt:6: field 'novel' is not known" in out


def test_each_model_has_part_name_and_backend(report, packages):
    found = report(several(packages / "shop"), "--entry=both")

    parts = models(found)
    assert list(parts) == ["plain", "double", "both"]
    assert [part["role"] for part in parts.values()] == ["helper", "step", "entry"]
    assert [part["backend"] for part in parts.values()] == ["onnxruntime", "python", None]
    assert [part["is_ensemble"] for part in parts.values()] == [False, False, True]
    assert [part["config_from"] for part in parts.values()] == ["triton", "file", "changed"]
    assert (parts["plain"]["name"], parts["both"]["name"]) == ("plain", "shop")
    assert parts["both"]["staged"] == {"1/": None, "config.pbtxt": None}
    assert "+++ shop/config.pbtxt" in parts["both"]["config_diff"]
    assert parts["double"]["name"] in parts["both"]["config_text"]
    assert found["backends"] == ["onnxruntime", "python"]


def test_archive_is_shown_by_paths_within_it(report, packages):
    found = report(packed(several(packages / "shop")), "--name=shop")

    assert found["is_archive"] is True
    parts = models(found)
    assert parts["double"]["staged"] == {"1": "shop/double/1", "config.pbtxt": None}
    assert parts["both"]["config_diff"][0] == "--- shop/both/config.pbtxt"
    assert parts["both"]["staged"] == {"1/": None, "config.pbtxt": None}


def test_lone_file_is_shown_by_its_name(inspect, packages):
    """Triton completes its config."""
    (file := packages / "net.onnx").write_text("onnx")

    out = inspect(file)[1]

    assert "    1/\n      model.onnx -> net.onnx\n" in out
    assert "  config    none: Triton completes it from the model file\n" in out


def test_the_hints_count_as_in_a_load(report, packages, tmp_path):
    (file := packages / "net.bin").write_text("weights")
    (schema := tmp_path / "schema.json").write_text(SCHEMA)

    found = report(file, "--model-type=pytorch:2", f"--schema={schema}", "--name=a b")

    [model] = found["models"]
    assert (found["model_name"], model["name"]) == ("a b", "ta.u.a_20b")
    assert (model["config_from"], model["config_diff"]) == ("made", [])
    assert model["config_text"].startswith('backend: "pytorch"\ninput [\n  { name: "A"')
    assert model["staged"] == {"1/": None, "1/model.pt": "net.bin", "config.pbtxt": None}


def test_link_out_of_package_is_shown_in_full(report, packages):
    folder = write_python_model(packages / "m")
    (packages / "labels.txt").write_text("a")
    (folder / "labels").symlink_to("../labels.txt")

    [model] = report(folder)["models"]

    assert model["staged"]["labels"] == str(packages / "labels.txt")


def test_links_may_lead_to_where_model_roots_are(inspect, packages, tmp_path):
    folder = write_python_model(packages / "m")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "w").write_text("a")
    (folder / "w").symlink_to(tmp_path / "far" / "w")

    code, _, err = inspect(folder)
    assert (code, "is outside the model roots" in err) == (1, True)
    roots = (f"--model-roots={packages}", f"--model-roots={tmp_path / 'far'}")
    assert inspect(folder, *roots)[0] == 0
    code, _, err = inspect(folder, f"--model-roots={tmp_path / 'far'}")
    assert (code, "is outside the model roots" in err) == (1, True)


@pytest.mark.parametrize("name", [".", "1/..", "link"])
def test_a_path_may_be_relative_or_a_link(report, packages, monkeypatch, tmp_path, name):
    folder = write_python_model(packages / "m")
    (folder.parent / "m" / "link").symlink_to(tmp_path / "other" / "m")
    write_python_model(tmp_path / "other" / "m")
    if name != "link":
        (folder / "link").unlink()
    monkeypatch.chdir(folder)

    found = report(name)

    assert found["model_name"] == ("link" if name == "link" else "m")
    assert found["models"][0]["staged"]["1"] == "1"


def test_name_other_than_utf8_is_shown_and_found(report, packages):
    folder = write_python_model(packages / os.fsdecode(b"m\xff"))
    (folder / os.fsdecode(b"w\xff")).write_text("a")

    found = report(folder)

    assert found["path"].endswith("m\\xff")
    assert found["models"][0]["staged"]["w\\xff"] == "w\\xff"


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["none"], "SourceMissing", "does not exist"),
        (["empty"], "InvalidModel", "holds no files"),
        (["shop", "--entry=pipe"], "InvalidModel", "the entry 'pipe' is not in the package"),
        (["shop", "--model-roots=/usr"], "InvalidRequest", "is outside the model roots"),
        ([".."], "InvalidRequest", "must not hold each other"),
    ],
)
def test_programs_get_reason_and_code_of_load(inspect, packages, argv, code, words):
    (packages / "empty").mkdir()
    several(packages / "shop")

    status, out, err = inspect(packages / argv[0], *argv[1:], "--json")

    assert (status, err) == (1, "")
    found = json.loads(out)
    assert set(found) == {"error", "code"}
    assert found["code"] == code
    assert words in found["error"]


def test_archive_error_hides_the_removed_folder(inspect, packages, scratch):
    folder = write_python_model(packages / "m", config="backend: [\n")

    archive = packed(folder)
    code, _, err = inspect(archive, "--name=m")

    assert code == 1
    assert err.startswith(f"triton-adapter: {archive}/m/config.pbtxt:1:")
    assert str(scratch) not in err


@pytest.mark.parametrize("entry", ["both", "none"])
@pytest.mark.parametrize("pack", [packed, lambda folder: folder], ids=["archive", "folder"])
def test_nothing_is_changed_and_nothing_is_left(inspect, packages, scratch, entry, pack):
    path = pack(several(packages / "shop"))
    before = snapshot(packages)

    assert inspect(path, f"--entry={entry}")[0] == (entry == "none")

    assert snapshot(packages) == before
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("is_archive", [False, True])
def test_fault_in_code_names_callers_file(inspect, packages, is_archive):
    folder = write_python_model(packages / "m")
    (folder / "1" / "model.py").write_text("x = 1\ndef x(:\n")
    path = packed(folder) if is_archive else folder
    inside = "m/1" if is_archive else "1"

    code, out, err = inspect(path)

    assert (code, out) == (1, "")
    assert err.startswith(f"triton-adapter: {path}/{inside}/model.py:2: SyntaxError: invalid")


def test_code_of_unserved_versions_is_not_read(inspect, packages):
    folder = write_python_model(packages / "m", version="2")
    (folder / "1").mkdir()
    (folder / "1" / "model.py").write_text("def x(:")
    assert inspect(folder)[0] == 0


def test_code_for_own_python_is_only_warned_of(inspect, packages):
    python = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/env.tar.gz" } }'
    folder = write_python_model(packages / "m", config=CONFIG + python)
    (folder / "1" / "model.py").write_text("def x(:")

    code, out, _ = inspect(folder)

    assert code == 0
    assert "Triton runs it with the Python of EXECUTION_ENV_PATH" in out


def test_imports_missing_in_tritons_python_are_warned_of(inspect, packages):
    folder = write_python_model(packages / "m")
    (folder / "1" / "model.py").write_text(
        "import json, nothing_there.is_it\nfrom neither_there import x\n"
        "import numpy as np\nimport triton_python_backend_utils, __main__\n"
        "from . import mine\nimport beside, above\n"
        "try:\n    import maybe_there\nexcept ImportError:\n    pass\n"
        "class TritonPythonModel:\n    def execute(self, requests):\n        import later\n"
    )
    (folder / "1" / "beside.py").touch()
    (folder / "above").mkdir()

    code, out, _ = inspect(folder)

    warned = [line for line in out.splitlines() if line.startswith("warning ")]
    assert (code, len(warned)) == (0, 2)
    assert f"{folder}/1/model.py:1: imports nothing_there, which" in warned[0]
    assert f"{folder}/1/model.py:2: imports neither_there, which" in warned[1]
    assert warned[0].endswith("docs/packages.md#python-environments")


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_imports_for_another_python_are_not_checked(
    inspect, packages, monkeypatch, *, is_elsewhere
):
    python = 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/env.tar.gz" } }'
    folder = write_python_model(
        packages / "m",
        imports="import nothing_there",
        config=CONFIG if is_elsewhere else CONFIG + python,
    )
    if is_elsewhere:
        monkeypatch.setattr(inspecting, "wheel_folder", lambda: None)

    code, out, _ = inspect(folder)

    assert (code, "nothing_there" in out) == (0, False)


@pytest.mark.parametrize(
    ("visible", "group", "said"),
    [
        (0, "kind: KIND_GPU", ["asks for GPUs, and this machine shows none"]),
        (2, "gpus: [0, 2, 7]", ["asks for GPU 2, 7; this machine shows 2, from 0 on"]),
        (2, "gpus: [0, 1]", []),
        (2, "kind: KIND_GPU", []),
        (0, "kind: KIND_CPU", []),
        (None, "gpus: [7]", []),
    ],
)
def test_gpus_that_are_not_visible_are_warned_of(
    report, packages, monkeypatch, *, visible, group, said
):
    monkeypatch.setattr(inspecting, "count_gpus", lambda: visible)
    config = f"{CONFIG}instance_group [{{ {group} }}]"
    folder = write_python_model(packages / "m", config=config)
    assert report(folder)["warnings"] == [f"instance_group {text}" for text in said]


def test_the_driver_says_how_many_gpus_are_visible(monkeypatch):
    monkeypatch.setattr(inspecting, "pynvml", FakeNvml(FakeGpu("a"), FakeGpu("b")))
    assert inspecting.count_gpus() == 2


def test_it_imports_neither_the_servers_nor_the_settings(packages):
    script = (
        "import sys; from adapter.cli.main import main; code = main(sys.argv[1:], {}); "
        "heavy = {'pydantic', 'yaml', 'aiohttp', 'uvloop'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    folder = write_python_model(packages / "m")

    done = subprocess.run(
        [sys.executable, "-c", script, "inspect", folder],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
