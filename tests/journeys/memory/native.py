"""Packages whose backend takes memory in tritonserver itself, which no python model does."""

import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("native.c")
_CONFIG = """
backend: "native"
input { name: "IN" data_type: TYPE_FP32 dims: 1 }
output { name: "OUT" data_type: TYPE_FP32 dims: 1 }
instance_group { kind: KIND_CPU }
"""


def build_native_backend(folder: Path) -> Path:
    """Build the backend, and return its library."""
    library = folder / "libtriton_native.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE], check=True)
    return library


def write_native_model(folder: Path, library: Path, **parameters: int) -> Path:
    """Write a package that brings its backend along; `parameters` as in native.c."""
    (folder / "1").mkdir(parents=True)
    lines = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'
        for name, value in parameters.items()
    ]
    (folder / "config.pbtxt").write_text(_CONFIG + "".join(lines))
    shutil.copy(library, folder)
    return folder
