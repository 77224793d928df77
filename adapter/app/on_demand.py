"""Builds what loads models for calls: the stores with their disk cache, and residency."""

from collections.abc import Mapping

from adapter.control.models import ModelControl
from adapter.control.residency import Options, Residency
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, parse_model_id
from adapter.settings import Settings
from adapter.store.cache import ArtifactCache
from adapter.telemetry.metrics import Metrics


class OnDemand:
    """Residency with its stores."""

    def __init__(
        self,
        settings: Settings,
        control: ModelControl,
        metrics: Metrics,
        cache: ArtifactCache,
    ) -> None:
        self._cache = cache
        self._preload = settings.preload
        options = Options(
            pin=settings.pin,
            idle_unload_seconds=settings.idle_unload_seconds,
            model_wait_seconds=settings.model_wait_seconds,
            on_demand_load_concurrency=settings.on_demand_load_concurrency,
            revalidate_seconds=settings.revalidate_seconds,
        )
        self.residency = Residency(control, cache, metrics, options, stores=cache.stores)

    def preload(self) -> Mapping[ModelId, ArtifactKey]:
        """Return the models of the setting of that name."""
        return {parse_model_id(name): self.residency.key_of(name) for name in self._preload}

    def notes(self) -> list[str]:
        """Return what is amiss with cache and stores."""
        found = (self._cache.why_lost, self._cache.why_unreachable())
        return [why for why in found if why is not None]

    async def open(self) -> None:
        """Take over what is on disk. Raises InvalidSettings if the cache cannot be used."""
        await self._cache.open()

    async def close(self) -> None:
        await self.residency.close()
        await self._cache.close()
