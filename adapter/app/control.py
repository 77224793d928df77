"""Says the settings of an adapter in control's own words."""

from collections.abc import Collection, Mapping

from adapter.control.ports import MemorySettings, StoreSettings, TimeLimits
from adapter.control.ports import Settings as ControlSettings
from adapter.core import times
from adapter.core.record import OnExit
from adapter.settings import Settings

# An unload waits for requests in flight for half of this. SageMaker gives up after 360 s; a load
# may take 10 s more by default, so that an unload that a load waits for is over before it.
UNLOAD_SECONDS = 340.0
_LOADS = 2  # of calls at once, unless load_concurrency says otherwise
_ON_EXIT = {"auto": None, "forget": OnExit.FORGET, "reload": OnExit.RELOAD}


def read_control_settings(
    settings: Settings,
    *,
    store_names: Collection[str],
    load_threads: int,  # loads that Triton runs at a time
    process_limits: Mapping[int, int],  # of MPS, by CUDA's number of the GPU
) -> ControlSettings:
    """Return the settings of control, in its own words."""
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
            process_limits=process_limits,
            places_gpus=settings.gpu_placement == "most_free",
            mesh_default_bytes=settings.modelmesh_default_size,
        ),
        stores=StoreSettings(
            names=frozenset(store_names),
            pin=settings.pin,
            idle_unload_seconds=settings.idle_unload_seconds,
            revalidate_seconds=settings.revalidate_seconds,
            load_concurrency=settings.load_concurrency or _LOADS,
        ),
        on_exit=_ON_EXIT[settings.on_triton_restart],
        load_threads=load_threads,
    )
