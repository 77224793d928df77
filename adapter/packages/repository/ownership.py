"""The note in each of our folders in Triton's repository: whose it is, and what Triton serves.

It outlives the process. After a restart it says what to take over and what to clear away.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.core.memory import Bytes, Device
from adapter.core.model import ModelSource
from adapter.packages.source.backends import MARKER


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that Triton serves.

    The note has no room for what the request itself brought: then `can_load_again` is False, and
    `source` lacks it.
    """

    source: ModelSource
    can_load_again: bool
    content_key: str
    held: Bytes


@dataclass(frozen=True, slots=True)
class Ownership:
    """`owner` is Triton's name of the package's entry, `model_id` the caller's name of it.

    `load` and `along` are the package's placement. Only the entry's folder has them and `loaded`,
    which is None until Triton serves the model.
    """

    owner: str
    model_id: str
    load: tuple[str, ...] = ()
    along: tuple[str, ...] = ()
    loaded: Loaded | None = None


def note_ownership(folder: Path, ownership: Ownership) -> None:
    """In one step, so that a crash of this process leaves the old note or the new one.

    Nothing is flushed to the disk: a machine that loses its power has lost the models as well. A
    note that it damaged is none, and the folder then is for its operator to remove.
    """
    draft = folder / f"{MARKER}.new"
    draft.write_text(json.dumps(_written(ownership)))
    draft.rename(folder / MARKER)


def ownership_of(folder: Path) -> Ownership | None:
    """None for what is not ours; a link to a folder of ours is somebody else's."""
    marker = folder / MARKER
    if folder.is_symlink() or marker.is_symlink():
        return None
    try:
        found = json.loads(marker.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    match found:
        case {
            "owner": str(owner),
            "model_id": str(model_id),
            "load": list(load),
            "along": list(along),
        } if all(isinstance(name, str) for name in (*load, *along)):
            loaded = _loaded(found.get("loaded"))
            return Ownership(owner, model_id, tuple(load), tuple(along), loaded)
    return None


def _written(ownership: Ownership) -> dict[str, Any]:
    note: dict[str, Any] = {
        "owner": ownership.owner,
        "model_id": ownership.model_id,
        "load": ownership.load,
        "along": ownership.along,
    }
    if (loaded := ownership.loaded) is not None:
        note["loaded"] = {
            "url": loaded.source.url,
            "model_type": loaded.source.model_type,
            "schema": loaded.source.schema,
            "entry": loaded.source.entry,
            "declared_bytes": loaded.source.declared_bytes,
            "is_cached": loaded.source.is_cached,
            "can_load_again": loaded.can_load_again,
            "content_key": loaded.content_key,
            "held": dict(loaded.held),
        }
    return note


def _loaded(found: object) -> Loaded | None:
    """None for what is damaged, too: the folder is ours still, and is cleared away then."""
    match found:
        case {
            "url": str(url),
            "is_cached": bool(is_cached),
            "model_type": (str() | None) as model_type,
            "schema": (str() | None) as schema,
            "entry": (str() | None) as entry,
            "declared_bytes": (int() | None) as declared,
            "can_load_again": bool(can_load_again),
            "content_key": str(content_key),
            "held": dict(held),
        } if all(isinstance(count, int) and count >= 0 for count in held.values()):
            source = ModelSource(
                url, model_type, schema, entry, declared_bytes=declared, is_cached=is_cached
            )
            amounts = {Device(device): count for device, count in held.items()}
            return Loaded(source, can_load_again, content_key, amounts)
    return None
