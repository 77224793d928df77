"""The Python environment that a python model brings in its folder, by EXECUTION_ENV_PATH."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tritonclient.grpc.model_config_pb2 import ModelConfig

from adapter.packages.source import formats
from adapter.packages.source.contents import shown

_HERE = "$$TRITON_MODEL_DIRECTORY/"
_NUMPY = re.compile(r"numpy-(\d+)(\.[^-]*)?\.dist-info")


def odd_environment(folder: Path, tree: formats.Tree, config: ModelConfig) -> Iterator[str]:
    """Warn of a numpy that Triton's python backend cannot work with. What is packed is not read."""
    given = config.parameters.get("EXECUTION_ENV_PATH")
    place = "" if given is None else given.string_value
    if not place.startswith(_HERE):
        return
    name = place.removeprefix(_HERE)
    for python, packages in (_below(tree, PurePosixPath(name, "lib")) or {}).items():
        installed = (packages or {}).get("site-packages") if python.startswith("python") else None
        for found in filter(None, map(_NUMPY.fullmatch, installed or {})):
            if int(found[1]) > 1:
                yield (
                    f"{shown(folder / name)}: has numpy {found[1]}{found[2] or ''}; with Triton"
                    ' 2.51 each inference fails then: "output tensor shape does not match size of'
                    " output\". Make it with: pip install 'numpy<2'"
                )


def _below(tree: formats.Tree | None, path: PurePosixPath) -> formats.Tree | None:
    for part in path.parts:
        tree = (tree or {}).get(part)
    return tree
