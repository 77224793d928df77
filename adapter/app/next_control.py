"""Builds adapter/next for an adapter."""

from adapter.app.parts import Outside
from adapter.next.control.ports import (
    MemorySettings,
    NoProcesses,
    StoreSettings,
    TimeLimits,
    World,
)
from adapter.next.control.ports import Settings as ControlSettings
from adapter.next.core.record import OnExit
from adapter.next.core.sizes import Sizes
from adapter.next.parts import Control
from adapter.next.parts import build_control as build
from adapter.settings import Settings
from adapter.telemetry.metrics import Metrics

_LOADS = 2  # of calls at once, unless load_concurrency says otherwise
_ON_EXIT = {"auto": None, "forget": OnExit.FORGET, "reload": OnExit.RELOAD}


def build_control(settings: Settings, outside: Outside, metrics: Metrics) -> Control:
    """Build control around what lies outside of it."""
    embedded = outside.embedded
    world = World(
        outside.triton,
        outside.packages,
        outside.memory,
        server=embedded,
        processes=embedded.processes if embedded else NoProcesses(),
        sizes=outside.sizes,
        artifacts=outside.cache,
    )
    sizes = Sizes(settings.size_factor, settings.default_size or 0)
    if outside.sizes is not None:
        sizes.restore(outside.sizes.load())
    return build(world, metrics, _read_settings(settings, outside), sizes)


def _read_settings(settings: Settings, outside: Outside) -> ControlSettings:
    """Return the settings of control, in its own words."""
    cache = outside.cache
    return ControlSettings(
        limits=TimeLimits(
            load=settings.load_timeout_seconds,
            unload=settings.unload_timeout_seconds,
            stall=settings.unload_stall_seconds,
            warm_up=settings.infer_timeout_seconds if settings.warm_up == "zeros" else None,
            model_wait=settings.model_wait_seconds,
        ),
        memory=MemorySettings(
            limit_bytes=settings.memory_limit,
            headroom_of=settings.memory_reserve.of,
            process_limits=outside.process_limits,
            places_gpus=settings.gpu_placement == "most_free",
            mesh_default_bytes=settings.modelmesh_default_size,
        ),
        stores=StoreSettings(
            names=cache.stores if cache else frozenset(),
            pin=settings.pin,
            policy=settings.eviction,
            min_residency_seconds=settings.min_residency_seconds,
            idle_unload_seconds=settings.idle_unload_seconds,
            revalidate_seconds=settings.revalidate_seconds,
            load_concurrency=settings.load_concurrency or _LOADS,
        ),
        on_exit=_ON_EXIT[settings.on_triton_restart],
        load_threads=outside.load_threads,
    )
