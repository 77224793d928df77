"""Stages packages in Triton's repository and removes them again."""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from adapter.core.memory import Bytes
from adapter.core.model import (
    LinkKind,
    ModelId,
    ModelSource,
    Package,
    Placement,
    Role,
    StagedModel,
    TritonName,
    is_safe_name,
    private_name,
)
from adapter.errors import BackendError, InvalidModel, InvalidRequest
from adapter.packages.archive_kinds import archive_at
from adapter.packages.backends import refuse_missing_backends
from adapter.packages.config_parameters import staged_content_types
from adapter.packages.contents import UNPACKED, is_within
from adapter.packages.inspect import inspect
from adapter.packages.messages import cut, invalid_model, shown
from adapter.packages.repository import (
    Loaded,
    Ownership,
    Staging,
    claim,
    claim_entry,
    clear,
    clear_others,
    disk_error,
    empty,
    fill,
    kept_folder,
    link_tree,
    note_ownership,
    note_unloaded,
    ownership_of,
    sweep,
)
from adapter.packages.roots import Inside, resolve
from adapter.packages.unpack import Limits
from adapter.packages.unpacking_process import UnpackingProcess
from adapter.packages.uploads import write_package
from adapter.runtime.threads import LOOKUPS, REPOSITORY, UNPACKS, WALKS

_log = logging.getLogger(__name__)

# By this parameter Python code learns the name in Triton of a model that could not keep its own.
PARAMETER = "triton_adapter.model."
_KILL_SECONDS = 5.0  # a process that waits for a disk may not end

IsTaken = Callable[[TritonName], bool]


@dataclass(frozen=True, slots=True)
class _Location:
    """The real path of a package, or of its archive."""

    path: Path
    is_archive: bool


class Packages:
    """Stages model packages under `model_roots` as folders in `repository`.

    All file work runs in threads: a slow disk must not delay a ping.
    """

    def __init__(
        self,
        repository: Path,
        model_roots: Sequence[Path],
        *,
        staging: Staging = "symlink",
        backends: Callable[[], frozenset[str] | None] = lambda: None,  # Triton's; None: unknown
        cache: Path | None = None,  # the folder of cached packages, and of no others
    ) -> None:
        """Stage packages that lie below `model_roots` in `repository`, which Triton reads."""
        self._repository = repository
        self._roots = [os.path.realpath(root) for root in model_roots]
        self._staging = staging
        self._backends = backends
        self._cache = None if cache is None else os.path.realpath(cache)
        self._notes = threading.Lock()

    async def prepare(self, name: TritonName, model_id: ModelId, source: ModelSource) -> Package:
        """Inspect the package; first unpack an archive, or write the files of a request.

        Raises SourceMissing, InvalidRequest (a path not allowed) or InvalidModel (file and reason).
        After an error `remove` clears what was unpacked.
        """
        source = await self._with_real_schema(source)
        if source.kept:
            put_back = partial(link_tree, Path(source.kept))
            path = await UNPACKS.run_to_end(self._fill_unpacked, name, model_id, put_back)
            roots = [*self._roots, str(path)]
            return await WALKS.run(self._inspect, source, path, roots, shown(Path(source.url)))
        if source.files:
            write = partial(write_package, source=source)
            path = await UNPACKS.run_to_end(self._fill_unpacked, name, model_id, write)
            return await WALKS.run(self._inspect, source, path, [str(path)], "the request")
        location = await LOOKUPS.run(self._find, source)
        path = location.path
        if location.is_archive:
            unpacked = await self._unpack_archive(name, model_id, path)
            return await WALKS.run(self._inspect, source, unpacked, [str(unpacked)], shown(path))
        if source.is_cached:  # the package must stay in its own folder
            roots = [str(path.parent)]
            return await WALKS.run(self._inspect, source, path, roots, shown(model_id))
        return await WALKS.run(self._inspect, source, path, self._roots, shown(path))

    async def has_changed(self, source: ModelSource, content_key: str, since: float) -> bool:
        """Return whether the files are others than those of `content_key`; of an archive whether
        it was written or put there since then (time.time). What came with the load request, or
        from a store, never changes. Raises as `prepare` does.
        """
        is_of_request = bool(source.files) or source.config is not None
        if is_of_request or source.is_cached or not content_key:
            return False
        location = await LOOKUPS.run(self._find, source)
        if location.is_archive:
            # mv, cp -p and rsync -t keep the modification time, which may be before the load
            return (await LOOKUPS.run(location.path.stat)).st_ctime > since
        source = await self._with_real_schema(source)
        known_as = shown(location.path)
        package = await WALKS.run(self._inspect, source, location.path, self._roots, known_as)
        return package.content_key != content_key

    async def place(
        self,
        name: TritonName,
        model_id: ModelId,
        package: Package,
        gpu: int | None = None,
        *,
        is_taken: IsTaken = lambda _: False,  # by a model that has no folder yet
    ) -> Placement:
        """Stage every model of the package; `gpu` is the number of the only one that they may use.

        Raises BackendError on a disk error, InvalidRequest if a name in the repository is taken by
        a folder that is not the adapter's; `remove` clears what was staged by then.
        """
        kinds = {link.kind for part in package.parts for link in part.links}
        has_links_alone = self._staging == "symlink" and kinds <= {LinkKind.SHOWN}
        threads = REPOSITORY if has_links_alone else UNPACKS
        return await threads.run_to_end(self._place, name, model_id, package, gpu, is_taken)

    async def confirm(
        self, name: TritonName, source: ModelSource, content_key: str, held: Bytes
    ) -> None:
        """Note that Triton serves the model now, for `staged` after a restart.

        To be called again when `held` changes. Raises BackendError on a disk error; does nothing if
        the model's folder is gone.
        """
        await REPOSITORY.run_to_end(self._confirm, name, source, content_key, held)

    async def remove(self, name: TritonName) -> None:
        """Remove the package's folders, if there are any. The caller's files stay."""
        await REPOSITORY.run(self._remove, name)

    async def set_aside(self, name: TritonName) -> str:
        """Put aside what was unpacked of the package, or written for it, so that it outlasts the
        removal of the package. Return the path for ModelSource.kept; "" if all files are the
        caller's. Raises BackendError on a disk error.
        """
        try:
            return await UNPACKS.run_to_end(self._link_unpacked_aside, name)
        except BaseException:  # the caller does not learn where files were linked already
            await self.discard(str(kept_folder(self._repository / name)))
            raise

    async def discard(self, kept: str) -> None:
        """Remove what `set_aside` has put aside, if anything."""
        if kept:
            await REPOSITORY.run(partial(shutil.rmtree, kept, ignore_errors=True))

    async def staged(self) -> list[StagedModel]:
        """Return the packages that an earlier run left in the repository, by name. To be called
        before all else: it removes folders that a killed process was making or removing.
        """
        return await REPOSITORY.run(self._list_staged)

    # -- inspection -------------------------------------------------------------------------

    async def _with_real_schema(self, source: ModelSource) -> ModelSource:
        """Return the source with the real path of its schema, if it has one."""
        if source.schema is None:
            return source
        schema = await LOOKUPS.run(resolve, source.schema, self._roots)
        return replace(source, schema=str(schema))

    def _inspect(
        self, source: ModelSource, path: Path, roots: Sequence[str], known_as: str
    ) -> Package:
        """Inspect a package. Messages name it `known_as` in place of its path. Raise InvalidModel
        for its faults, also if this Triton lacks a backend of it.
        """

        def for_caller(text: str) -> str:
            """Return a text with the archive, which callers know, in place of where it was
            unpacked.
            """
            return text.replace(str(path), known_as).replace(UNPACKED, Path(known_as).name)

        try:
            package = inspect(source, path, roots, self._roots)
            refuse_missing_backends(package, self._backends())
        except InvalidModel as error:
            error.args = (for_caller(str(error)),)
            raise
        return replace(package, warnings=tuple(map(for_caller, package.warnings)))

    def _find(self, source: ModelSource) -> "_Location":
        """Return the package or archive that the url of a source names. Raise InvalidRequest or
        SourceMissing if it may not be used or is not there, InvalidModel if it cannot be read. No
        folder is walked.
        """
        if source.is_cached:
            return _Location(resolve(source.url, [self._cache or os.devnull]), is_archive=False)
        path = resolve(source.url, self._roots)
        if self._is_cached(str(path)):
            raise InvalidRequest(f"url {shown(path)} is in the cache of the adapter")
        self._refuse_repository(path)
        try:
            archive = archive_at(path)
        except OSError as error:
            raise invalid_model(error.filename or path, str(error.strerror)) from error
        if archive is not None and source.config is not None:
            raise InvalidRequest(f"config is for a folder; {shown(archive)} is an archive")
        return _Location(archive or path, is_archive=archive is not None)

    def _is_cached(self, path: str) -> bool:
        """Return whether a real path is in the cache of packages."""
        return self._cache is not None and is_within(path, self._cache)

    async def _unpack_archive(self, name: TritonName, model_id: ModelId, archive: Path) -> Path:
        """Unpack the archive, and return the folder. After cancellation nothing is written."""
        unpacking = UnpackingProcess()
        unpacked = UNPACKS.run_to_end(self._run_unpacking, name, model_id, archive, unpacking)
        work = asyncio.ensure_future(unpacked)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            unpacking.kill()
            work.cancel()
            await asyncio.wait({work}, timeout=_KILL_SECONDS)
            raise

    def _run_unpacking(
        self, name: TritonName, model_id: ModelId, archive: Path, unpacking: UnpackingProcess
    ) -> Path:
        """Unpack an archive into the entry's folder by a process; return the folder with its
        content.
        """
        target = self._claim_entry(name, model_id) / UNPACKED
        with Inside(self._roots).open_entry(str(archive)) as content:
            unpacking.run(archive, target, Limits(), content)
        return Path(os.path.realpath(target))

    def _fill_unpacked(
        self, name: TritonName, model_id: ModelId, write: Callable[[Path], object]
    ) -> Path:
        """Claim the entry's folder, and write files of the package to a folder in it, which is
        returned.
        """
        target = self._claim_entry(name, model_id) / UNPACKED
        try:
            write(target)
        except OSError as error:
            raise disk_error(target, error) from error
        return Path(os.path.realpath(target))

    def _link_unpacked_aside(self, name: TritonName) -> str:
        """Link what was unpacked into the package's kept folder, and return that folder; empty
        where nothing was unpacked.
        """
        kept = kept_folder(self._repository / name)
        try:
            return str(kept) if link_tree(self._repository / name / UNPACKED, kept) else ""
        except OSError as error:
            raise disk_error(kept, error) from error

    def _claim_entry(self, name: TritonName, model_id: ModelId) -> Path:
        """Make the folder of a package's entry ours and empty, for files that are unpacked in it;
        return it.
        """
        with self._notes:
            return claim_entry(self._repository, Ownership(name, model_id))

    def _refuse_repository(self, path: Path) -> None:
        """Raise InvalidRequest for a package within Triton's repository or around it: the folders
        there come and go.
        """
        repository = os.path.realpath(self._repository)
        package = str(path)
        if is_within(package, repository) or is_within(repository, package):
            raise InvalidRequest(
                f"url {shown(package)} and Triton's repository {shown(repository)}"
                " must not hold each other"
            )

    # -- staging ----------------------------------------------------------------------------

    def _place(
        self,
        name: TritonName,
        model_id: ModelId,
        package: Package,
        gpu: int | None,
        is_taken: IsTaken,
    ) -> Placement:
        """Claim the folders of a package's models and neighbours, and fill them, in a thread."""
        folder = os.path.realpath(self._repository / name)
        kept = UNPACKED if is_within(package.root, folder) else ""
        with self._notes:  # two packages may want the same name for a helper
            # what an earlier try has placed is cleared first, so that its names are free again
            entry = claim_entry(self._repository, Ownership(name, model_id), keep=kept)
            names = self._choose_names(name, package, is_taken)
            along = tuple(names[p.own_name] for p in package.parts if p.role is Role.STEP)
            load = tuple(names[p.own_name] for p in package.parts if p.role is not Role.STEP)
            neighbours = [
                part for part in package.neighbours if part.own_name not in names.values()
            ]
            beside = {p.own_name: p for p in neighbours if self._can_stage_beside(name, p.own_name)}
            # the note of the entry says which other folders there will be
            owner = Ownership(name, model_id, load, along, gpu=gpu, beside=tuple(beside))
            claim(entry, owner, keep=kept)
            for other in {*load, *along} - {name}:
                claim(self._repository / other, Ownership(name, model_id))
            for neighbour in beside:
                claim(self._repository / neighbour, Ownership(name, model_id, is_model=False))
        renamed = {own: str(given) for own, given in names.items() if own != given}
        helpers = {p.own_name for p in package.parts if p.role is Role.HELPER}
        is_cached = self._is_cached(package.root)
        roots = [str(Path(package.root).parent)] if is_cached else self._roots
        inside = Inside([*roots, folder])
        staging = self._staging
        try:
            for part in package.parts:
                # Python code names models by text: a folder name that is not text cannot be meant
                asked = [own for own in sorted(helpers | part.mentions) if _is_text(own)]
                parameters = {PARAMETER + own: renamed[own] for own in asked if own in renamed}
                place = self._repository / names[part.own_name]
                fill(place, part, renamed, parameters, staging=staging, inside=inside, gpu=gpu)
            for neighbour, part in beside.items():
                fill(self._repository / neighbour, part, {}, {}, staging=staging, inside=inside)
        except OSError as error:
            raise disk_error(self._repository / name, error) from error
        left_out = [part.own_name for part in neighbours if part.own_name not in beside]
        warnings = [self._explain_left_out(package, own) for own in left_out]
        if warnings:
            _log.warning("model.package_odd", extra={"model_id": model_id, "warnings": warnings})
        # nothing is odd where the code asks for the name that the parameter tells, so no log line
        warnings += [
            self._explain_made_name(package, own, renamed[own])
            for own in sorted(helpers & renamed.keys())
        ]
        return Placement(load, along, tuple(beside), tuple(warnings))

    def _explain_left_out(self, package: Package, folder: str) -> str:
        """Return a warning that code of the package does not find a folder beside its models."""
        return (
            f"{shown(package.root)}: code of its models does not find the folder {cut(folder)!r}"
            f" beside them: {self._describe_holder(folder)}"
        )

    def _explain_made_name(self, package: Package, own_name: str, name: str) -> str:
        """Return a warning that a model, which code calls, has another name than in its package."""
        return (
            f"{shown(package.root)}: its model {cut(own_name)!r} is called {name!r} in Triton:"
            f" {self._describe_holder(own_name)}; code finds the name in the parameter"
            f" {PARAMETER}{cut(own_name)}"
        )

    def _describe_holder(self, own_name: str) -> str:
        """Return which model has a name of a package in Triton's repository, or that none can."""
        if not is_safe_name(own_name):
            return "Triton takes no such name"
        if self._is_free(own_name):
            return "a model that is being loaded has this name"
        holder = ownership_of(self._repository / own_name)
        if holder is None:
            return "another folder of Triton's repository has this name"
        return f"the model {holder.model_id!r} has this name"

    def _can_stage_beside(self, name: TritonName, own_name: str) -> bool:
        """Return whether the name of a neighbour is free, or has been taken for it before."""
        if self._is_free(own_name):
            return True
        known = ownership_of(self._repository / own_name) if is_safe_name(own_name) else None
        return known is not None and known.owner == name and not known.is_model

    def _choose_names(
        self, name: TritonName, package: Package, is_taken: IsTaken
    ) -> dict[str, TritonName]:
        """Return the name in Triton of each model of a package, by its own name. The entry has
        `name`, a helper its own name if that is free, and any other model a made name.
        """
        names: dict[str, TritonName] = {}
        for part in package.parts:
            if part.role is Role.ENTRY:
                names[part.own_name] = name
            elif (
                part.role is Role.HELPER
                and part.own_name not in {name, *names.values()}
                and self._is_free(part.own_name)
                and not is_taken(TritonName(part.own_name))
            ):
                names[part.own_name] = TritonName(part.own_name)
            else:
                names[part.own_name] = private_name(name, part.own_name)
        return names

    def _is_free(self, own_name: str) -> bool:
        """Return whether Triton takes a name and no folder of its repository has it."""
        return is_safe_name(own_name) and not os.path.lexists(self._repository / own_name)

    # -- staged packages ---------------------------------------------------------------------

    def _confirm(
        self, name: TritonName, source: ModelSource, content_key: str, held: Bytes
    ) -> None:
        """Write the note that Triton serves a model, if its folder is still there and ours."""
        entry = self._repository / name
        with self._notes:
            known = ownership_of(entry)
            if known is None or known.owner != name:
                return
            # a source taken from a note is as incomplete as the note
            is_whole = known.loaded is None or known.loaded.can_load_again
            is_all_there = source.config is None and not source.files and not source.kept
            can_load_again = is_whole and is_all_there
            loaded = Loaded(source, can_load_again, content_key, held)
            try:
                note_ownership(entry, replace(known, loaded=loaded))
            except FileNotFoundError:
                return  # the model was removed meanwhile
            except OSError as error:
                raise disk_error(entry, error) from error

    def _remove(self, name: TritonName) -> None:
        """Remove the folders of a package, the entry's last: others link to the unpacked files in
        it. Names are freed under the lock, as another package may be waiting to take them.
        """
        entry = self._repository / name
        known = ownership_of(entry)
        if known is None or known.owner != name:
            return
        try:
            with self._notes:
                note_unloaded(entry)
                clear_others(self._repository, name)
            empty(entry)  # without the lock: it may have gigabytes
            with self._notes:
                clear(entry)
        except OSError as error:
            raise BackendError(f"cannot remove model {name!r}: {error.strerror}") from error

    def _list_staged(self) -> list[StagedModel]:
        """Clear away what a killed run left half made; return the packages that have a note of
        their own.
        """
        try:
            sweep(self._repository)
            folders = sorted(self._repository.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise BackendError(f"cannot list {self._repository}: {error.strerror}") from error
        owned = ((folder.name, ownership_of(folder)) for folder in folders)
        return [
            _read_staged_model(known, self._repository / name)
            for name, known in owned
            if known and known.owner == name
        ]


def _read_staged_model(known: Ownership, folder: Path) -> StagedModel:
    """Return a package that an earlier run left, from the note in its folder."""
    name = TritonName(known.owner)
    model_id = ModelId(known.model_id)
    placement = Placement(
        tuple(map(TritonName, known.load)) or (name,),
        tuple(map(TritonName, known.along)),
        known.beside,
    )
    if (loaded := known.loaded) is None:
        return StagedModel(name, model_id, placement)
    return StagedModel(
        name,
        model_id,
        placement,
        is_loaded=True,
        gpu=known.gpu,
        source=loaded.source,
        can_load_again=loaded.can_load_again,
        content_key=loaded.content_key,
        held=loaded.held,
        content_types=staged_content_types(folder),
    )


def _is_text(name: str) -> bool:
    """Return whether a folder name consists of characters, and not of other bytes."""
    return name.encode("utf-8", "replace").decode() == name
