"""Makes and removes the folders of a package in Triton's repository. Only here it is written to."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from adapter.core.model import (
    ModelId,
    ModelPart,
    ModelSource,
    Package,
    Placement,
    Role,
    TritonName,
)
from adapter.core.names import is_safe
from adapter.errors import BackendError, InvalidModel, InvalidRequest
from adapter.packages.archives import archive_at, unpack
from adapter.packages.config_text import rename_steps, with_parameters, without_name
from adapter.packages.contents import is_within, shown
from adapter.packages.ensemble import private_name
from adapter.packages.files import UNPACKED, refuse_missing_backends
from adapter.packages.inspection import CONFIG, inspect
from adapter.packages.location import resolve
from adapter.packages.ownership import (
    Ownership,
    clear,
    clear_others,
    note_ownership,
    ownership_of,
)
from adapter.packages.unpacking import Limits
from adapter.packages.uploads import write_package

# By this parameter Python code learns the name in Triton of a model that could not keep its own.
PARAMETER = "triton_adapter.model."

Staging = Literal["symlink", "hardlink", "copy"]


@dataclass(frozen=True, slots=True)
class StagedModel:
    """What an earlier run left. `name` is the entry's."""

    name: TritonName
    model_id: ModelId
    placement: Placement


class Packages:
    """Model packages under `model_roots`, and their folders in `repository`.

    All file work runs in a thread: a slow disk must not hold up a ping. `backends` are those of
    this Triton, None where that is not known.
    """

    def __init__(
        self,
        repository: Path,
        model_roots: Sequence[Path],
        *,
        staging: Staging = "symlink",
        limits: Limits | None = None,
        backends: Callable[[], frozenset[str] | None] = lambda: None,
    ) -> None:
        self._repository = repository
        self._roots = [os.path.realpath(root) for root in model_roots]
        self._staging = staging
        self._limits = limits or Limits()
        self._backends = backends
        self._claims = threading.Lock()

    async def prepare(self, name: TritonName, model_id: ModelId, source: ModelSource) -> Package:
        """Look at the package; unpack it first when it is an archive, write what a request brings.

        SourceMissing, InvalidRequest (a path not allowed) or InvalidModel (file and reason).
        After an error `remove` clears what was unpacked.
        """
        return await asyncio.to_thread(self._prepare, name, model_id, source)

    async def place(self, name: TritonName, model_id: ModelId, package: Package) -> Placement:
        """Stage every model of the package.

        BackendError when the disk refuses, InvalidRequest when a name in the repository is
        somebody else's; `remove` clears what there is then.
        """
        return await asyncio.to_thread(self._place, name, model_id, package)

    async def remove(self, name: TritonName) -> None:
        """Remove the package's folders, if there are any. The caller's files stay."""
        await asyncio.to_thread(self._remove, name)

    async def staged(self) -> list[StagedModel]:
        """What is in the repository by our doing, by name."""
        return await asyncio.to_thread(self._staged)

    # -- looking ----------------------------------------------------------------------------

    def _prepare(self, name: TritonName, model_id: ModelId, source: ModelSource) -> Package:
        if source.schema is not None:
            source = replace(source, schema=str(resolve(source.schema, self._roots)))
        path, roots, known_as = self._located(name, model_id, source)
        try:
            package = inspect(source, path, roots)
        except InvalidModel as error:  # callers know the archive, not where it was unpacked
            text = str(error).replace(str(path), known_as).replace(UNPACKED, Path(known_as).name)
            raise InvalidModel(text) from error
        refuse_missing_backends(package, self._backends())
        return package

    def _located(
        self, name: TritonName, model_id: ModelId, source: ModelSource
    ) -> tuple[Path, list[str], str]:
        """Where the package lies, the roots that it must not leave, and what callers call it."""
        if source.files:
            return *self._written(name, model_id, source, None), "the request"
        path = resolve(source.url, self._roots)
        self._refuse_repository(path)
        if (archive := archive_at(path)) is None:
            if source.config is not None:
                return *self._written(name, model_id, source, path), shown(path)
            return path, self._roots, shown(path)
        if source.config is not None:
            raise InvalidRequest(f"config is for a folder; {shown(archive)} is an archive")
        target = self._claim(name, Ownership(name, model_id)) / UNPACKED
        unpack(archive, target, self._limits)
        real = os.path.realpath(target)
        return Path(real), [real], shown(archive)

    def _written(
        self, name: TritonName, model_id: ModelId, source: ModelSource, package: Path | None
    ) -> tuple[Path, list[str]]:
        """A folder with what the request brought, besides what `package` has."""
        target = self._claim(name, Ownership(name, model_id)) / UNPACKED
        try:
            write_package(target, source, package)
        except OSError as error:
            raise _disk_error(target, error) from error
        real = os.path.realpath(target)
        return Path(real), [real] if package is None else [*self._roots, real]

    def _refuse_repository(self, path: Path) -> None:
        """The repository may lie in a model root; its folders come and go with the models."""
        repository, package = os.path.realpath(self._repository), str(path)
        if is_within(package, repository) or is_within(repository, package):
            raise InvalidRequest(
                f"url {shown(package)} and Triton's repository {shown(repository)}"
                " must not hold each other"
            )

    # -- staging ----------------------------------------------------------------------------

    def _place(self, name: TritonName, model_id: ModelId, package: Package) -> Placement:
        folder = os.path.realpath(self._repository / name)
        kept = UNPACKED if is_within(package.root, folder) else ""
        with self._claims:  # two packages may want the same name for a helper
            names = self._names(name, package)
            along = tuple(names[p.own_name] for p in package.parts if p.role is Role.STEP)
            load = tuple(names[p.own_name] for p in package.parts if p.role is not Role.STEP)
            clear_others(self._repository, name)
            # the entry's own folder first: it says which others there will be
            self._claim(name, Ownership(name, model_id, load, along), keep=kept)
            for other in {*load, *along} - {name}:
                self._claim(other, Ownership(name, model_id))
        renamed = {own: str(given) for own, given in names.items() if own != given}
        helpers = {p.own_name for p in package.parts if p.role is Role.HELPER}
        try:
            for part in package.parts:
                # Python code asks by text: a folder's name that is none cannot be meant
                asked = [own for own in sorted(helpers | part.mentions) if _is_text(own)]
                told = {PARAMETER + own: renamed[own] for own in asked if own in renamed}
                self._fill(self._repository / names[part.own_name], part, renamed, told)
        except OSError as error:
            raise _disk_error(self._repository / name, error) from error
        return Placement(load, along)

    def _names(self, name: TritonName, package: Package) -> dict[str, TritonName]:
        """Own names to Triton's. A helper keeps its own where nobody has it yet."""
        names: dict[str, TritonName] = {}
        for part in package.parts:
            if part.role is Role.ENTRY:
                names[part.own_name] = name
            elif (
                part.role is Role.HELPER
                and part.own_name not in {name, *names.values()}
                and self._is_free(part.own_name)
            ):
                names[part.own_name] = TritonName(part.own_name)
            else:
                names[part.own_name] = private_name(name, part.own_name)
        return names

    def _is_free(self, own_name: str) -> bool:
        return is_safe(own_name) and not os.path.lexists(self._repository / own_name)

    def _claim(self, name: str, ownership: Ownership, keep: str = "") -> Path:
        """Our folder of that name, emptied of what an earlier run left in it but for `keep`."""
        folder = self._repository / name
        known = ownership_of(folder)
        if known is None and os.path.lexists(folder):
            raise InvalidRequest(
                f"{folder} is in Triton's repository already and not of this adapter's making"
            )
        if known is not None and known.owner != ownership.owner:
            raise InvalidRequest(
                f"{name!r} is the name of a model in the package {known.model_id!r}"
            )
        try:
            if known is not None:
                clear(folder, keep=keep)
            folder.mkdir(exist_ok=True)
            note_ownership(folder, ownership)
        except OSError as error:
            if known is None:
                shutil.rmtree(folder, ignore_errors=True)
            raise _disk_error(folder, error) from error
        return folder

    def _fill(
        self, folder: Path, part: ModelPart, renamed: Mapping[str, str], told: Mapping[str, str]
    ) -> None:
        for made in part.folders:
            (folder / made).mkdir()
        for link in part.links:
            path = folder / link.path
            path.parent.mkdir(parents=True, exist_ok=True)
            self._show(path, link.target)
        if part.config_text is not None:
            text = rename_steps(without_name(part.config_text), renamed)
            (folder / CONFIG).write_bytes(with_parameters(text, told).encode())

    def _show(self, path: Path, target: str) -> None:
        """Relative links also work where the two folders are mounted together elsewhere."""
        if self._staging == "symlink":
            path.symlink_to(os.path.relpath(target, os.path.realpath(path.parent)))
            return
        copy = _hard_link if self._staging == "hardlink" else shutil.copy2
        if Path(target).is_dir():
            shutil.copytree(target, path, copy_function=copy)
        else:
            copy(target, path)

    # -- removing ---------------------------------------------------------------------------

    def _remove(self, name: TritonName) -> None:
        """The entry's folder goes last: what was unpacked lies in it, and others link there."""
        entry = self._repository / name
        known = ownership_of(entry)
        if known is None or known.owner != name:
            return
        try:
            clear_others(self._repository, name)
            clear(entry)
        except OSError as error:
            raise BackendError(f"cannot remove model {name!r}: {error.strerror}") from error

    def _staged(self) -> list[StagedModel]:
        return [
            StagedModel(
                TritonName(known.owner),
                ModelId(known.model_id),
                Placement(
                    tuple(map(TritonName, known.load)) or (TritonName(known.owner),),
                    tuple(map(TritonName, known.along)),
                ),
            )
            for folder, known in self._ours()
            if known.owner == folder.name
        ]

    def _ours(self) -> list[tuple[Path, Ownership]]:
        try:
            folders = sorted(self._repository.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BackendError(f"cannot list {self._repository}: {error.strerror}") from error
        found = ((folder, ownership_of(folder)) for folder in folders)
        return [(folder, known) for folder, known in found if known is not None]


def _is_text(name: str) -> bool:
    return name.encode("utf-8", "replace").decode() == name


def _hard_link(source: str, target: str | Path) -> None:
    """To what a link leads to: a relative one would lead elsewhere from the repository."""
    os.link(os.path.realpath(source), target)


def _disk_error(folder: Path, error: OSError) -> BackendError:
    # copytree collects what went wrong as (source, target, reason)
    reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
    return BackendError(f"cannot stage the model in {folder}: {reason}")
