"""Builds Triton's side, the control plane, and the stores with their disk cache."""

import os
import secrets
from collections.abc import Awaitable, Callable, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from adapter.app.control import read_control_settings
from adapter.app.parts import Control, build_control
from adapter.control.ports import NoProcesses, World
from adapter.core.oom import Classifier
from adapter.core.sizes import Sizes
from adapter.core.triton_errors import Faults
from adapter.core.triton_input import HTTP_KEY_HEADER
from adapter.packages.sizes_file import FILE_NAME, LearnedFile
from adapter.packages.staging import Packages
from adapter.packages.unpack import Limits
from adapter.packages.uploads import payload
from adapter.settings import Settings, secret_variables
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.stores import open_store
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.tracing import Tracing
from adapter.triton.client import TritonControl
from adapter.triton.memory.nvml import MPS_VARIABLE, mps_limits
from adapter.triton.memory.sources import ChosenMemory, NvmlMemory, build_memory
from adapter.triton.server.launch import RunFolder
from adapter.triton.server.server import EmbeddedTriton

# Triton's own default of --model-load-thread-count
_LOAD_THREADS = 4
# Triton's own default of --http-max-input-size
_INPUT_BYTES = 2**26
# So long a fetch waits for room on disk, or half of the time that its callers wait.
_MOST_ROOM_SECONDS = 10.0
# How long a store may be silent, and how long requests to it are tried again. A call waits 55 s for
# its model by default, and most of that should remain for fetch and load.
STORE_SECONDS = 20.0
# Models that are fetched from one store at a time. One alone takes a large object by several
# connections, so more share the same network, and each call waits longer.
_FETCHES = 4
# Answers of a stream that Triton keeps for its caller; without a bound it keeps all of them.
_RESPONSES = 64
# What a page in a browser could otherwise send to an embedded Triton's HTTP port.
_RESTRICTED_API = "--http-restricted-api"
_RESTRICTED = "model-repository,shared-memory,trace,logging"


@dataclass(frozen=True, slots=True)
class Backend:
    """Triton's side of one adapter."""

    embedded: EmbeddedTriton | None  # None if Triton runs in another container
    http_key: str  # of the restricted calls at an embedded Triton's HTTP port
    private: RunFolder | None  # holds the repository of uploads; None if Triton shares the disk
    repository: Path
    faults: Faults
    triton: TritonControl
    memory: ChosenMemory
    control: Control


def build_backend(
    settings: Settings,
    metrics: Metrics,
    tracing: Tracing | None,
    on_restart: Callable[[], Awaitable[None]],
    *,
    cache: ArtifactCache | None,
) -> Backend:
    """Build Triton's side and the control plane.

    `on_restart` is called when the embedded Triton is live again.
    """
    http_key = secrets.token_hex(16)
    embedded = _build_embedded(settings, metrics, on_restart, http_key)
    is_private = settings.staging == "upload" and settings.repository is None
    private = RunFolder() if is_private else None
    repository = _choose_repository(settings, embedded, private)
    faults = Faults(Classifier(settings.oom_patterns), str(repository))
    folder = cache.root if cache else None
    roots = [*settings.all_roots, *([folder] if folder else [])]
    triton = _build_triton(settings, faults, repository, metrics, roots=roots, tracing=tracing)
    page, limit = str(settings.triton_metrics), settings.memory_limit
    memory = build_memory(settings.memory_source, embedded, limit, page)
    # a private repository is gone after the run, and its sizes are
    sizes_file = LearnedFile(settings.repository / FILE_NAME) if settings.repository else None
    sizes = Sizes(settings.size_factor)
    if sizes_file is not None:
        sizes.restore(sizes_file.load())
    world = World(
        triton,
        _build_packages(settings, embedded, repository, folder),
        memory,
        server=embedded,
        processes=embedded.processes if embedded else NoProcesses(),
        sizes=sizes_file,
        artifacts=cache,
    )
    control_settings = read_control_settings(
        settings,
        store_names=cache.stores if cache else (),
        load_threads=embedded.load_threads if embedded else _LOAD_THREADS,
        process_limits=mps_limits(os.environ.get(MPS_VARIABLE, "")),
    )
    control = build_control(world, metrics, control_settings, sizes)
    return Backend(
        embedded,
        http_key if embedded is not None else "",
        private,
        repository,
        faults,
        triton,
        memory,
        control,
    )


def _build_embedded(
    settings: Settings,
    metrics: Metrics,
    on_restart: Callable[[], Awaitable[None]],
    http_key: str,
) -> EmbeddedTriton | None:
    if settings.triton != "embedded":
        return None
    return EmbeddedTriton(
        tritonserver=settings.tritonserver,
        repository=settings.repository,
        http=settings.triton_http.host_port,
        grpc=settings.triton_grpc.host_port,
        metrics=settings.triton_metrics.host_port,
        extra_args=settings.triton_args,
        start_timeout_seconds=settings.start_timeout_seconds,
        on_restart=on_restart,
        on_exit=lambda reason: metrics.history.triton_ended(f"Triton has ended: {reason}"),
        withheld=secret_variables(settings.endpoint_keys),
        newer_args=_newer_args(settings, http_key),
        has_gpus=_has_gpus,
    )


async def _has_gpus() -> bool:
    nvml = NvmlMemory(tuple)
    await nvml.read()
    return bool(nvml.has_gpus)


def _newer_args(settings: Settings, http_key: str) -> dict[str, str]:
    """Return options that only newer Tritons know: those that lift limits of theirs
    (docs/triton.md, Versions), and the one that takes loads and the like from the adapter alone.
    """
    most = min(max(settings.max_body_bytes, _INPUT_BYTES), 2**31 - 1)
    given = {"--http-max-input-size": str(most), "--grpc-max-response-pool-size": str(_RESPONSES)}
    if "shared_memory" in settings.passthrough:
        given["--allow-client-shm"] = "true"
    # two options that name the same API end Triton: the operator's own is used alone
    if not any(each.startswith(_RESTRICTED_API) for each in settings.triton_args):
        given[_RESTRICTED_API] = f"{_RESTRICTED}:{HTTP_KEY_HEADER}={http_key}"
    return given


def _choose_repository(
    settings: Settings, embedded: EmbeddedTriton | None, private: RunFolder | None
) -> Path:
    if embedded is not None:
        return embedded.repository
    if private is not None:
        return private.path / "repository"
    assert settings.repository is not None  # noqa: S101 - settings resolve it
    return settings.repository


def _build_triton(
    settings: Settings,
    faults: Faults,
    repository: Path,
    metrics: Metrics,
    *,
    roots: Sequence[Path],
    tracing: Tracing | None,
) -> TritonControl:
    real = [os.path.realpath(root) for root in roots]
    is_upload = settings.staging == "upload"

    def note_live(is_live: bool) -> None:
        if is_live:
            metrics.history.triton_back()
        else:
            metrics.history.triton_silent()

    return TritonControl(
        faults,
        load_timeout_seconds=settings.load_timeout_seconds,
        on_retry=lambda call: metrics.retries.labels(call).inc(),
        on_live=note_live,
        payload=(lambda name: payload(repository / name, real)) if is_upload else None,
        tracing=tracing,
    )


def _build_packages(
    settings: Settings, embedded: EmbeddedTriton | None, repository: Path, cache: Path | None
) -> Packages:
    return Packages(
        repository,
        settings.all_roots,
        staging="symlink" if settings.staging == "upload" else settings.staging,
        limits=Limits(),
        backends=embedded.backends if embedded else lambda: None,
        cache=cache,
    )


def build_cache(settings: Settings, metrics: Metrics) -> ArtifactCache | None:
    """Build the disk cache of the stores; return None without a store.

    model_store has the name "". Raises InvalidSettings for a store that cannot be one here.
    """
    stores = {}
    if settings.model_store is not None:
        stores[""] = open_store("model_store", settings.model_store, STORE_SECONDS)
    for endpoint in settings.endpoints:
        name = f"endpoints, {endpoint.name}"
        stores[endpoint.name] = open_store(name, endpoint.models, STORE_SECONDS)
    if not stores:
        return None
    folder = CacheFolder(settings.cache_dir or _default_folder())
    cache = ArtifactCache(
        stores,
        folder,
        limit_bytes=settings.cache_limit,
        concurrency=_FETCHES,
        limits=Limits(),
        room_seconds=min(_MOST_ROOM_SECONDS, settings.model_wait_seconds / 2),
        on_evicted=lambda reason: metrics.endpoint_evictions.labels("disk", reason).inc(),
        on_room=metrics.history.disk_has_room,
    )
    metrics.endpoint_cache_bytes.set_function(lambda: cache.used_bytes)
    metrics.endpoint_cache_limit_bytes.set_function(lambda: cache.limit_bytes)
    return cache


def _default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base, "triton-adapter")


class Stores:
    """Says what the disk cache and its stores lack, and opens and closes them."""

    def __init__(self, cache: ArtifactCache, models: Sized) -> None:
        self._cache = cache
        self._models = models

    def why_not_ready(self) -> str | None:
        """Return why no call can be answered: no model is here, and none can be fetched."""
        is_empty = not len(self._models) and not self._cache.disk().artifacts
        return self._why_full("no model can be fetched") if is_empty else None

    def notes(self) -> list[str]:
        """Return what is amiss with cache and stores, beside the reason for not being ready."""
        full = None
        if self.why_not_ready() is None:
            full = self._why_full("no model can be fetched before another leaves the disk")
        found = (self._cache.lost_reason, self._cache.unreachable_reason, full)
        return [why for why in found if why is not None]

    def _why_full(self, what: str) -> str | None:
        why = self._cache.full_reason
        advice = "free some, or set cache_dir to another disk; see docs/stores.md#the-disk"
        return why and f"{what}: {why}; {advice}"

    async def open(self) -> None:
        """Take over what is on disk. Raises InvalidSettings if the cache cannot be used."""
        await self._cache.open()

    async def close(self) -> None:
        """End the fetches."""
        await self._cache.close()
