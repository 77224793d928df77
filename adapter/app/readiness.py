"""Says whether an adapter has started, whether it is ready, and what is amiss while it is."""

from collections.abc import Sized
from typing import Any

from adapter.control.state import State
from adapter.frontends.drain import Drain
from adapter.runtime import background
from adapter.store.cache import ArtifactCache
from adapter.triton.client import TritonControl

_STARTING = "starting"  # the first word of a phase before the end of the start


class StoreHealth:
    """Says what the disk cache and its stores lack."""

    def __init__(self, cache: ArtifactCache, models: Sized) -> None:
        self._cache = cache
        self._models = models

    def explain_not_ready(self) -> str | None:
        """Return why no call can be answered: no model is here, and none can be fetched."""
        is_empty = not len(self._models) and not self._cache.disk().artifacts
        return self._explain_full_disk("no model can be fetched") if is_empty else None

    def notes(self) -> list[str]:
        """Return what is amiss with cache and stores, beside the reason for not being ready."""
        disk_reason = None
        if self.explain_not_ready() is None:
            effect = "no model can be fetched before another leaves the disk"
            disk_reason = self._explain_full_disk(effect)
        reasons = (self._cache.lost_reason, self._cache.unreachable_reason, disk_reason)
        return [reason for reason in reasons if reason is not None]

    def _explain_full_disk(self, effect: str) -> str | None:
        """Return why the disk takes no more, with the effect and a remedy; None if it does."""
        reason = self._cache.full_reason
        advice = "free some, or set cache_dir to another disk; see docs/stores.md#the-disk"
        return reason and f"{effect}: {reason}; {advice}"


class Readiness:
    """Follows the start of an adapter; says from then on whether it is ready, and why not."""

    def __init__(
        self,
        *,
        triton: TritonControl,
        state: State,
        drain: Drain,
        stores: StoreHealth | None,  # None without a store
    ) -> None:
        self._triton = triton
        self._state = state
        self._drain = drain
        self._stores = stores
        self._phase = "starting: waiting for Triton"  # "" between start and stop

    def note_loading(self, name: str) -> None:
        """Report that the start waits for a model."""
        self._phase = f"starting: loading {name!r}"

    def note_started(self) -> None:
        """Report that the start is over."""
        self._phase = ""

    def note_stopping(self) -> None:
        """Report that the adapter stops."""
        self._phase = "stopping"

    def explain_not_started(self) -> str | None:
        """Return what the start waits for; None once it is over."""
        return self._phase if self._phase.startswith(_STARTING) else None

    def explain_not_ready(self) -> str | None:
        """Return the first reason for which the adapter is not ready; None if it is."""
        return next(iter(self.reasons()), None)

    def is_ready(self) -> bool:
        """Return whether the adapter can serve requests."""
        return self.explain_not_ready() is None

    def reasons(self) -> list[str]:
        """Return why the adapter is not ready; nothing when it is."""
        if self._phase:
            return [self._phase]
        reasons = [
            self._explain_triton(),
            "draining" if self._drain.is_on else None,
            background.find_ended_task(),
            *self._state.reasons(),
            self._stores.explain_not_ready() if self._stores is not None else None,
        ]
        return [reason for reason in reasons if reason is not None]

    def notes(self) -> list[str]:
        """Return what is amiss while the adapter is ready all the same."""
        store_notes = self._stores.notes() if self._stores is not None else []
        return [*self._state.notes(), *store_notes]

    def describe(self) -> dict[str, Any]:
        """Return what /debug/state shows of readiness: the reasons against it, the notes, and
        whether Triton is live and the adapter is draining.
        """
        reasons = self.reasons()
        return {
            "is_ready": not reasons,
            "reasons": reasons,
            "notes": self.notes(),
            "is_triton_live": self._triton.live,
            "is_draining": self._drain.is_on,
        }

    def _explain_triton(self) -> str | None:
        """Return why Triton takes no loads; None if it does."""
        return self._triton.why_not_explicit if self._triton.live else "Triton does not answer"
