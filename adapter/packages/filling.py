"""Fills one folder in Triton's repository with what a model of a package is to show there."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from adapter.core.model import ModelPart
from adapter.packages.config_text import rename_steps, with_parameters, without_name
from adapter.packages.inspection import CONFIG

Staging = Literal["symlink", "hardlink", "copy"]


def fill(
    folder: Path,
    part: ModelPart,
    renamed: Mapping[str, str],
    parameters: Mapping[str, str],
    staging: Staging,
) -> None:
    """`renamed` leads from a name within the package to Triton's. The disk's OSError comes through.

    `parameters` are added to the model's config.
    """
    for made in part.folders:
        (folder / made).mkdir()
    for link in part.links:
        path = folder / link.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _show(path, link.target, staging)
    if part.config_text is not None:
        text = rename_steps(without_name(part.config_text), renamed)
        (folder / CONFIG).write_bytes(with_parameters(text, parameters).encode())


def _show(path: Path, target: str, staging: Staging) -> None:
    """Relative links also work where the two folders are mounted together elsewhere."""
    if staging == "symlink":
        path.symlink_to(os.path.relpath(target, os.path.realpath(path.parent)))
        return
    copy = _hard_link if staging == "hardlink" else shutil.copy2
    if Path(target).is_dir():
        shutil.copytree(target, path, copy_function=copy)
    else:
        copy(target, path)


def _hard_link(source: str, target: str | Path) -> None:
    """To what a link leads to: a relative one would lead elsewhere from the repository."""
    os.link(os.path.realpath(source), target)
