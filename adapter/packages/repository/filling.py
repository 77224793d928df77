"""Fills a model's folder in Triton's repository with links, folders and the edited config."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from adapter.core.model import ModelPart
from adapter.packages.config.text import rename_steps, with_parameters, without_name
from adapter.packages.source.confined import Inside
from adapter.packages.source.inspection import CONFIG

Staging = Literal["symlink", "hardlink", "copy"]


def fill(
    folder: Path,
    part: ModelPart,
    renamed: Mapping[str, str],
    parameters: Mapping[str, str],
    *,
    staging: Staging,
    inside: Inside,
) -> None:
    """Fill the folder. `renamed` maps names within the package to Triton's; `parameters` are added
    to the model's config.

    Raises InvalidModel for a file that by now leads out of `inside`, and the OSError of the disk.
    """
    for made in part.folders:
        (folder / made).mkdir()
    for link in part.links:
        path = folder / link.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _show(path, link.target, staging, inside)
    if part.config_text is not None:
        text = rename_steps(without_name(part.config_text), renamed)
        (folder / CONFIG).write_bytes(with_parameters(text, parameters).encode())


def _show(path: Path, target: str, staging: Staging, inside: Inside) -> None:
    """Link or copy `target`, which may have changed since the inspection. Relative links also work
    where the two folders are mounted together elsewhere.
    """
    if staging == "symlink":
        with inside.at(target) as found:
            path.symlink_to(os.path.relpath(found.real, os.path.realpath(path.parent)))
        return
    for name, found in inside.tree(target):
        shown_as = path / name
        if found.is_folder:
            shown_as.mkdir()
        elif staging == "copy":
            shutil.copy2(found.by_descriptor, shown_as)
        else:  # without src_dir_fd the link in /proc itself would be linked
            descriptor = found.descriptor
            os.link(found.by_descriptor, shown_as, src_dir_fd=descriptor, follow_symlinks=True)
