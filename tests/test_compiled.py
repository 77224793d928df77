"""The hot modules have two forms: Python, and compiled. `make compiled` runs this on both."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from adapter.runtime.form import FORM
from tests.test_architecture import ROOT

HOT = sorted(path.relative_to(ROOT).with_suffix("") for path in (ROOT / "adapter").rglob("*.pxd"))


def built(folder: Path) -> zipfile.ZipFile:
    [wheel] = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(wheel)


@pytest.mark.parametrize("path", HOT, ids=str)
def test_all_hot_modules_run_in_the_one_form_that_is_told(path):
    file = importlib.import_module(".".join(path.parts)).__file__
    assert file is not None
    assert file.endswith(".so" if FORM == "compiled" else ".py")


def test_a_command_that_a_test_starts_has_the_same_form():
    command = [sys.executable, "-m", "adapter", "version"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.endswith(f"({FORM})\n".encode())


def test_a_checkout_is_pure():
    assert [*(ROOT / "adapter").rglob("*.so")] == []
    assert (FORM == "compiled") == sys.prefix.endswith("-compiled")


@pytest.mark.parametrize("environ", [{"PURE": "1"}, {"CC": "/bin/false"}], ids=str)
def test_a_wheel_is_pure_without_a_compiler(environ, monkeypatch, tmp_path):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with built(tmp_path) as wheel:
        assert wheel.filename is not None
        assert wheel.filename.endswith("-py3-none-any.whl")
        assert [name for name in wheel.namelist() if name.endswith(".so")] == []


def test_where_the_compiled_form_is_wanted_no_compiler_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("PURE", "0")
    with pytest.raises(BaseException, match="false"):
        built(tmp_path)
    assert [*tmp_path.iterdir()] == []
