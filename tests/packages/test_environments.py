"""Python models that bring an environment of their own in an archive, on a real Triton."""

import glob
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.processes import descendants, is_alive, tritonserver
from tests.running import (
    COMPLETE,
    EMBEDDED,
    Client,
    RunningAdapter,
    embedded_adapter,
    wait_until,
)
from tests.trees import CONFIG, infer_body, write_python_model

pytestmark = pytest.mark.triton

_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PLACE = """\
parameters {
  key: "EXECUTION_ENV_PATH"
  value { string_value: "$$TRITON_MODEL_DIRECTORY/%s" }
}
"""
_ACTIVATE = """\
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$here/bin:$PATH"
"""


def make_environment(folder: Path, module: str) -> Path:
    """A venv that may be moved, has `module` alone, and for all else looks into this one."""
    command = [sys.executable, "-m", "venv", "--copies", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    (folder / "bin" / "activate").write_text(_ACTIVATE)
    packages = folder / "lib" / _VERSION / "site-packages"
    (packages / f"{module}.py").write_text("VALUE = 42.0\n")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def packed(environment: Path, package: Path) -> str:
    with tarfile.open(package / "env.tar.gz", "w:gz") as writing:
        writing.add(environment, ".")
    return "env.tar.gz"


def as_a_folder(environment: Path, package: Path) -> str:
    shutil.copytree(environment, package / "env", symlinks=True)
    return "env"


def archive(tmp_path: Path, module: str, put: Callable[[Path, Path], str]) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    name = put(make_environment(tmp_path / "made", module), package)
    write_python_model(
        package,
        imports=f"import {module}",
        answer=f"values = 0 * values + {module}.VALUE",
        config=CONFIG + _PLACE % name,
    )
    (tmp_path / "root").mkdir()
    written = tmp_path / "root" / "model.tar.gz"
    with tarfile.open(written, "w:gz") as writing:
        writing.add(package, ".")
    return written


def unpacked_by_triton(module: str) -> list[str]:
    """Where Triton's python backend has unpacked it: always below /tmp, where others come and go
    meanwhile, which a Path's `glob` takes for an error.
    """
    place = f"/tmp/python_env_*/*/lib/{_VERSION}/site-packages/{module}.py"
    return glob.glob(place)  # noqa: PTH207


def serve_once(client: Client, url: Path) -> None:
    loaded = client.load("m", url)
    assert loaded.status == 200, loaded.body
    answer = client.post("/models/m/invoke", infer_body(1.0)).json()
    assert answer["outputs"][0]["data"] == [42.0]


@pytest.fixture
def module(tmp_path: Path) -> str:
    """The name of a module that only the environment of this test has."""
    return f"only_{abs(hash(tmp_path)):x}"


@pytest.mark.parametrize(
    ("put", "folders"), [(as_a_folder, 0), (packed, 1)], ids=["folder", "archive"]
)
def test_environment_is_used_and_goes_with_triton(
    tmp_path: Path, module: str, put: Callable[[Path, Path], str], folders: int
) -> None:
    """Triton unpacks an archive once for a path and a time of change, and keeps that over an
    unload.
    """
    url = archive(tmp_path, module, put)
    with (
        embedded_adapter(f"--model-roots={url.parent}", COMPLETE) as adapter,
        closing(adapter.client()) as client,
    ):
        for _ in range(2):
            serve_once(client, url)
            assert client.delete("/models/m").status == 200
            assert [*adapter.repository.iterdir()] == []
            assert len(unpacked_by_triton(module)) == folders
    assert unpacked_by_triton(module) == []


def test_a_killed_triton_leaves_no_environment_behind(tmp_path: Path, module: str) -> None:
    url = archive(tmp_path, module, packed)
    with (
        tempfile.TemporaryDirectory(prefix="python_env_", dir="/tmp") as others,
        embedded_adapter(f"--model-roots={url.parent}", COMPLETE) as adapter,
        closing(adapter.client()) as client,
    ):
        serve_once(client, url)
        assert client.delete("/models/m").status == 200  # no process is in it any more
        assert len(unpacked_by_triton(module)) == 1
        os.kill(tritonserver(adapter), signal.SIGKILL)
        adapter.wait_for("triton.restarted")
        assert unpacked_by_triton(module) == []
        assert Path(others).exists()


def test_killed_adapters_environment_goes_at_next_start(tmp_path: Path, module: str) -> None:
    url = archive(tmp_path, module, packed)
    adapter = RunningAdapter(*EMBEDDED, f"--model-roots={url.parent}", COMPLETE)
    try:
        adapter.wait_for("adapter.started")
        with closing(adapter.client()) as client:
            serve_once(client, url)
        assert len(unpacked_by_triton(module)) == 1
        family = descendants(adapter.process.pid)
    finally:
        adapter.stop(signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, family)), 60, "no process is left")
    # from here on any adapter that starts removes the environment, one of another test too
    with embedded_adapter():
        assert unpacked_by_triton(module) == []


def wheel_of(folder: Path, name: str) -> None:
    """Pack an installed distribution as it would come from an index."""
    found = importlib.metadata.distribution(name)
    tag = f"{name}-{found.version}-cp3{sys.version_info.minor}-cp3{sys.version_info.minor}"
    with zipfile.ZipFile(folder / f"{tag}-linux_x86_64.whl", "w") as writing:
        for file in found.files or ():
            if ".." not in file.parts and file.suffix != ".pyc" and file.name != "direct_url.json":
                writing.write(file.locate(), str(file))


def stub_of_sklearn(folder: Path) -> None:
    about = "scikit_learn-1.0.dist-info"
    with zipfile.ZipFile(folder / "scikit_learn-1.0-py3-none-any.whl", "w") as writing:
        writing.writestr("sklearn/__init__.py", "VALUE = 42.0\n")
        writing.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: scikit-learn\nVersion: 1.0\n"
        )
        writing.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        writing.writestr(f"{about}/RECORD", "")


@pytest.mark.nightly
def test_the_lines_of_the_page_make_an_environment(tmp_path: Path) -> None:
    """With pip's index in a folder: numpy as it is installed here, and a stand-in for sklearn."""
    [lines] = [b.text for b in blocks(ROOT / "docs/packages.md") if "test_environments" in b.note]
    index = tmp_path / "index"
    index.mkdir()
    wheel_of(index, "numpy")
    stub_of_sklearn(index)
    model = write_python_model(
        tmp_path / "my-model",
        imports="import sklearn",
        answer="values = 0 * values + sklearn.VALUE",
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}

    with (
        embedded_adapter(f"--model-roots={tmp_path}", COMPLETE) as adapter,
        closing(adapter.client()) as client,
    ):
        refused = client.load("m", model)
        assert refused.status == 400
        assert "docs/packages.md#python-environments" in refused.json()["error"]
        subprocess.run(["bash", "-eu", "-c", lines], cwd=tmp_path, env=environment, check=True)
        serve_once(client, tmp_path / "my-model.tar.gz")
