"""Makes and removes a model's folder in Triton's repository; the only file here that writes."""

import asyncio
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adapter.core.model import ModelId, ModelSource, Package, TritonName
from adapter.errors import BackendError, InvalidRequest
from adapter.packages import inspection
from adapter.packages.config_text import without_name
from adapter.packages.contents import is_within, shown

# Says that a folder is ours. Written first and removed last, so a crash never disowns one.
MARKER = ".triton-adapter.json"


@dataclass(frozen=True, slots=True)
class StagedModel:
    name: TritonName
    model_id: ModelId
    url: str


class Packages:
    """Model packages under `model_roots`, and their folders in `repository`.

    All file work runs in a thread: a slow disk must not hold up a ping.
    """

    def __init__(self, repository: Path, model_roots: Sequence[Path]) -> None:
        self._repository = repository
        self._model_roots = tuple(model_roots)

    async def inspect(self, source: ModelSource) -> Package:
        """SourceMissing, InvalidRequest (a path not allowed) or InvalidModel (file and reason)."""
        return await asyncio.to_thread(self._inspect, source)

    async def place(
        self, name: TritonName, model_id: ModelId, source: ModelSource, package: Package
    ) -> None:
        """Replace what a former run left under this name; InvalidRequest if it is not ours.

        BackendError when the disk refuses; nothing of the new folder is left then.
        """
        marker = {"model_id": model_id, "url": source.url, "content_key": package.content_key}
        await asyncio.to_thread(self._place, name, json.dumps(marker), package)

    async def remove(self, name: TritonName) -> None:
        """Remove our folder of this name, if there is one. The caller's files stay."""
        await asyncio.to_thread(self._remove, name)

    async def staged(self) -> list[StagedModel]:
        """What is in the repository by our doing, by name."""
        return await asyncio.to_thread(self._staged)

    def _inspect(self, source: ModelSource) -> Package:
        package = inspection.inspect(source.url, self._model_roots)
        repository = os.path.realpath(self._repository)
        if is_within(package.root, repository) or is_within(repository, package.root):
            # The repository may lie in a model root. Its folders come and go with the models.
            raise InvalidRequest(
                f"url {shown(package.root)} and Triton's repository"
                f" {shown(repository)} must not hold each other"
            )
        return package

    def _place(self, name: TritonName, marker: str, package: Package) -> None:
        folder = self._repository / name
        if os.path.lexists(folder) and not _is_ours(folder):
            raise InvalidRequest(
                f"{folder} is in Triton's repository already and not of this adapter's making"
            )
        try:
            _clear(folder)
            folder.mkdir()
            try:
                _fill(folder, marker, package)
            except BaseException:
                shutil.rmtree(folder)
                raise
        except OSError as error:
            raise BackendError(f"cannot stage the model in {folder}: {error.strerror}") from error

    def _remove(self, name: TritonName) -> None:
        folder = self._repository / name
        try:
            _clear(folder)
        except OSError as error:
            raise BackendError(f"cannot remove {folder}: {error.strerror}") from error

    def _staged(self) -> list[StagedModel]:
        try:
            folders = sorted(self._repository.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BackendError(f"cannot list {self._repository}: {error.strerror}") from error
        found = (_read_marker(folder) for folder in folders if _is_ours(folder))
        return [model for model in found if model is not None]


def _is_ours(folder: Path) -> bool:
    """A real folder with a real marker: a link to such a folder is somebody else's."""
    marker = folder / MARKER
    return not folder.is_symlink() and marker.is_file() and not marker.is_symlink()


def _fill(folder: Path, marker: str, package: Package) -> None:
    """Links are absolute, so Triton must see the packages under the same paths."""
    (folder / MARKER).write_text(marker)
    with os.scandir(package.root) as entries:
        for entry in entries:
            if entry.name not in {MARKER, inspection.CONFIG}:
                (folder / entry.name).symlink_to(os.path.realpath(entry.path))
    (folder / inspection.CONFIG).write_bytes(without_name(package.config_text).encode())


def _clear(folder: Path) -> None:
    """Remove a folder of ours; links in it are removed, never followed."""
    if not _is_ours(folder):
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARKER:
            path.unlink(missing_ok=True)
    (folder / MARKER).unlink()
    folder.rmdir()


def _read_marker(folder: Path) -> StagedModel | None:
    """None for a marker that a crash left half written: such a model was never loaded."""
    try:
        marker = json.loads((folder / MARKER).read_bytes())
        return StagedModel(TritonName(folder.name), ModelId(marker["model_id"]), marker["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
