"""Builds control from the settings of an adapter and the parts around it."""

from collections.abc import Mapping
from dataclasses import dataclass

from adapter.app.parts import Control
from adapter.app.parts import build_control as build
from adapter.backend.embedded import EmbeddedTriton
from adapter.backend.memory import ChosenMemory
from adapter.backend.sizes_file import LearnedFile
from adapter.backend.triton import TritonControl
from adapter.control.ports import (
    MemorySettings,
    NoProcesses,
    StoreSettings,
    TimeLimits,
    World,
)
from adapter.control.ports import Settings as ControlSettings
from adapter.core import times
from adapter.core.record import OnExit
from adapter.core.sizes import Sizes
from adapter.packages.staging import Packages
from adapter.settings import Settings
from adapter.store.cache import ArtifactCache
from adapter.telemetry.metrics import Metrics

# An unload waits for requests in flight for half of this. SageMaker gives up after 360 s; a load
# may take 10 s more by default, so that an unload that a load waits for is over before it.
UNLOAD_SECONDS = 340.0
_LOADS = 2  # of calls at once, unless load_concurrency says otherwise


@dataclass(frozen=True, slots=True)
class Outside:
    """Holds what lies around a control."""

    triton: TritonControl
    packages: Packages
    memory: ChosenMemory
    embedded: EmbeddedTriton | None  # None if Triton runs in another container
    cache: ArtifactCache | None  # None without a store
    sizes: LearnedFile | None  # None if no sizes are kept
    load_threads: int  # loads that Triton runs at a time
    process_limits: Mapping[int, int]  # of MPS, by CUDA's number of the GPU


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
    sizes = Sizes(settings.size_factor)
    if outside.sizes is not None:
        sizes.restore(outside.sizes.load())
    return build(world, metrics, _read_settings(settings, outside), sizes)


def _read_settings(settings: Settings, outside: Outside) -> ControlSettings:
    """Return the settings of control, in its own words."""
    cache = outside.cache
    return ControlSettings(
        limits=TimeLimits(
            load=settings.load_timeout_seconds,
            unload=UNLOAD_SECONDS,
            stall=times.HANG_SECONDS,
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
            idle_unload_seconds=settings.idle_unload_seconds,
            revalidate_seconds=settings.revalidate_seconds,
            load_concurrency=settings.load_concurrency or _LOADS,
        ),
        on_exit=_ON_EXIT[settings.on_triton_restart],
        load_threads=outside.load_threads,
    )
