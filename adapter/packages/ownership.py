"""Which folders in Triton's repository are ours, and whose they are."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from adapter.packages.files import MARKER


@dataclass(frozen=True, slots=True)
class Ownership:
    """`owner` is Triton's name of the package's entry, `model_id` the caller's name of it.

    `load` and `along` are the package's placement; only the entry's folder has them.
    """

    owner: str
    model_id: str
    load: tuple[str, ...] = ()
    along: tuple[str, ...] = ()


def note_ownership(folder: Path, ownership: Ownership) -> None:
    """In one step, so that a crash leaves the old note or the new one."""
    draft = folder / f"{MARKER}.new"
    draft.write_text(json.dumps(asdict(ownership)))
    draft.rename(folder / MARKER)


def ownership_of(folder: Path) -> Ownership | None:
    """None for what is not ours; a link to a folder of ours is somebody else's."""
    marker = folder / MARKER
    if folder.is_symlink() or marker.is_symlink():
        return None
    try:
        found = json.loads(marker.read_bytes())
        load, along = tuple(found["load"]), tuple(found["along"])
        return Ownership(found["owner"], found["model_id"], load, along)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def clear(folder: Path, keep: str = "") -> None:
    """Empty a folder of ours, and remove it unless something is kept.

    Links in it are removed, never followed. The note goes last, so a crash never disowns a folder.
    """
    for path in folder.iterdir():
        if path.name in {keep, MARKER}:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not (folder / keep).exists() or not keep:
        (folder / MARKER).unlink()
        folder.rmdir()


def clear_others(repository: Path, owner: str) -> None:
    """Clear the folders of a package beside the entry's own."""
    known = ownership_of(repository / owner)
    for other in {*known.load, *known.along} - {owner} if known is not None else ():
        folder = repository / other
        theirs = ownership_of(folder)
        if theirs is not None and theirs.owner == owner:
            clear(folder)
