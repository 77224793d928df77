"""Builds the stores with their disk cache."""

import os
from pathlib import Path

from adapter.core.residency.waiting import room_seconds
from adapter.packages.source.unpacking import Limits
from adapter.settings import Settings
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.opening import open_store
from adapter.telemetry.metrics import Metrics


def build_cache(settings: Settings, metrics: Metrics) -> ArtifactCache | None:
    """Return None without a store. The store of the name "" is model_store.

    Raises InvalidSettings for a store that cannot be one here.
    """
    stores, seconds = {}, settings.store_timeout_seconds
    if settings.model_store is not None:
        stores[""] = open_store("model_store", settings.model_store, seconds)
    for endpoint in settings.endpoints:
        name = f"endpoints, {endpoint.name}"
        stores[endpoint.name] = open_store(name, endpoint.models, seconds)
    if not stores:
        return None
    folder = CacheFolder(settings.cache_dir or _default_folder())
    cache = ArtifactCache(
        stores,
        folder,
        limit_bytes=settings.cache_limit,
        concurrency=settings.fetch_concurrency,
        limits=Limits(max_unpacked_bytes=settings.max_unpacked_bytes),
        room_seconds=room_seconds(settings.model_wait_seconds),
        on_evicted=lambda reason: metrics.endpoint_evictions.labels("disk", reason).inc(),
        on_room=metrics.history.disk_has_room,
    )
    metrics.endpoint_cache_bytes.set_function(lambda: cache.used_bytes)
    metrics.endpoint_cache_limit_bytes.set_function(lambda: cache.limit_bytes)
    return cache


def _default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base, "triton-adapter")
