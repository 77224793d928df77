"""Completes the wheel: the API as JSON, and the compiled form of the hot modules.

A module is hot if it has a .pxd, its C types, beside it. Without a C compiler the wheel is pure:
the same modules as Python. PURE=0 makes that an error, PURE=1 does not compile.
"""

import contextlib
import json
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_API = "adapter/frontends/openapi.json"
_DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": False,  # what mypy reads says nothing of C
    "binding": False,
    "nonecheck": True,  # an attribute of None is an AttributeError, as in Python
}


class Completed(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # adapter/frontends/openapi.py reads the YAML of a checkout, which stays pure
        self._folder = Path(tempfile.mkdtemp())
        document = yaml.safe_load((Path(self.root) / "docs" / "openapi.yaml").read_text("utf-8"))
        written = self._folder / "openapi.json"
        written.write_text(json.dumps(document) + "\n", "utf-8")
        build_data["force_include"][str(written)] = _API
        if os.environ.get("PURE") != "1":
            self._compile(build_data)

    def finalize(self, *_: Any) -> None:
        if hasattr(self, "_folder"):
            shutil.rmtree(self._folder)

    def _compile(self, build_data: dict[str, Any]) -> None:
        try:
            modules = compiled(Path(self.root), self._folder)
        except Exception as error:
            if os.environ.get("PURE") == "0":
                raise
            self.app.display_warning(f"the hot modules do not compile, the wheel is pure: {error}")
            return
        build_data["force_include"] |= {str(path): name for name, path in modules.items()}
        build_data["pure_python"], build_data["infer_tag"] = False, True


def compiled(root: Path, folder: Path) -> dict[str, Path]:
    """Compile all hot modules into an empty folder; return where each is, by its path in the wheel.
    Raise unless every one was compiled for this interpreter.
    """
    from Cython.Build import cythonize  # noqa: PLC0415 - an editable build does without
    from setuptools import Distribution, Extension  # noqa: PLC0415

    with contextlib.chdir(root):
        sources = sorted(path.with_suffix(".py") for path in Path("adapter").rglob("*.pxd"))
        extensions = cythonize(
            # without paths of this machine: the same bytes are built anywhere
            [Extension(_module(each), [str(each)], extra_compile_args=["-g0"]) for each in sources],
            build_dir=str(folder / "c"),
            compiler_directives=_DIRECTIVES,
            quiet=True,
        )
        command = Distribution({"ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "objects")
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    names = [str(each.with_suffix(suffix)) for each in sources]
    return {name: (folder / "lib" / name).resolve(strict=True) for name in names}


def _module(source: Path) -> str:
    return ".".join(source.with_suffix("").parts)
