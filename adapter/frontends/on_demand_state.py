"""What /debug/state says of the models that calls load."""

from collections.abc import Collection
from typing import Any

from adapter.control.residency import Residency
from adapter.control.residency.entries import Entry
from adapter.core.model import ModelId
from adapter.core.residency.state import ResidencyState


def on_demand_state(
    residency: Residency | None,
    text: str = "",
    most: int | None = None,
    listed: Collection[ModelId] = (),
) -> dict[str, Any] | None:
    """Return None without a store. `text` must be in a model's name. `most`: of the models that are
    not resident; of the others those of `listed` are told then.
    """
    if residency is None:
        return None
    (count, size_bytes), disk = residency.unused(), residency.disk()
    entries = [entry for entry in residency.entries if text in entry.model_id.casefold()]
    if most is not None:
        coming = [each for each in entries if each.state is not ResidencyState.RESIDENT][:most]
        entries = coming + [
            each
            for each in entries
            if each.state is ResidencyState.RESIDENT and each.model_id in listed
        ]
    return {
        "on_disk": {"models": count, "bytes": size_bytes},
        "disk": {
            "models": disk.artifacts,
            "bytes": disk.size_bytes,
            "fetching_bytes": disk.fetching_bytes,
            "free_bytes": disk.free_bytes,
            "limit_bytes": disk.limit_bytes,
        },
        "waiting": residency.entries.waiting,
        "evictions": dict(residency.eviction.evictions),
        "models": [_shown(residency, entry) for entry in entries],
    }


def _shown(residency: Residency, entry: Entry) -> dict[str, Any]:
    return {
        "model_id": entry.model_id,
        "key": str(entry.key),
        "state": entry.state.value,
        "percent": entry.progress.percent,
        "done_bytes": entry.progress.done_bytes,
        "total_bytes": entry.progress.total_bytes,
        "waiting": entry.waiting,
        "is_pinned": residency.eviction.is_pinned(entry.model_id),
        "is_outdated": entry.is_outdated,
    }
