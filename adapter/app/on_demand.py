"""Builds what loads models for calls: the stores with their disk cache, and residency."""

from collections.abc import Mapping

from adapter.control.models import ModelControl
from adapter.control.residency import Options, Residency
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, parse_model_id
from adapter.settings import Settings
from adapter.store.cache import ArtifactCache
from adapter.telemetry.metrics import Metrics

_LOADS = 2  # at once, unless load_concurrency says otherwise


class OnDemand:
    """Residency with its stores."""

    def __init__(
        self,
        settings: Settings,
        control: ModelControl,
        metrics: Metrics,
        cache: ArtifactCache,
    ) -> None:
        self._cache, self._registry = cache, control.registry
        self._preload = settings.preload
        options = Options(
            pin=settings.pin,
            idle_unload_seconds=settings.idle_unload_seconds,
            model_wait_seconds=settings.model_wait_seconds,
            load_concurrency=settings.load_concurrency or _LOADS,
            revalidate_seconds=settings.revalidate_seconds,
        )
        self.residency = Residency(control, cache, metrics, options, stores=cache.stores)

    def preload(self) -> Mapping[ModelId, ArtifactKey]:
        """Return the models of the setting of that name."""
        return {parse_model_id(name): self.residency.key_of(name) for name in self._preload}

    def why_not_ready(self) -> str | None:
        """Return why no call can be answered: nothing is here, and nothing can be fetched."""
        is_empty = not self._registry and not self._cache.artifacts
        return self._why_full("no model can be fetched") if is_empty else None

    def notes(self) -> list[str]:
        """Return what is amiss with cache and stores, beside the reason for not being ready."""
        full = None
        if self.why_not_ready() is None:
            full = self._why_full("no model can be fetched before another leaves the disk")
        found = (self._cache.why_lost, self._cache.why_unreachable(), full)
        return [why for why in found if why is not None]

    def _why_full(self, what: str) -> str | None:
        why = self._cache.why_full
        return why and f"{what}: {why}; free some, or name another disk by cache_dir"

    async def open(self) -> None:
        """Take over what is on disk. Raises InvalidSettings if the cache cannot be used."""
        await self._cache.open()

    async def close(self) -> None:
        await self.residency.close()
        await self._cache.close()
