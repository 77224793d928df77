"""Builds Triton's side and the control plane."""

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adapter.backend.embedded import EmbeddedTriton
from adapter.backend.memory import build_memory
from adapter.backend.memory.choice import ChosenMemory
from adapter.backend.sizes_file import FILE_NAME, LearnedFile
from adapter.backend.triton import TritonControl
from adapter.backend.tritonserver import RunFolder
from adapter.control.models import ModelControl
from adapter.control.ports import TimeLimits
from adapter.core.faults import Faults
from adapter.core.ledger import Ledger
from adapter.core.oom import Classifier
from adapter.core.registry import Registry
from adapter.core.sizing import Sizes
from adapter.packages.repository.staging import Packages
from adapter.packages.repository.uploads import payload
from adapter.packages.source.unpacking import Limits
from adapter.runtime import clock
from adapter.settings import Settings, secret_variables
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.tracing import Tracing

# Triton's own default of --model-load-thread-count
_LOAD_THREADS = 4
# Triton's own default of --http-max-input-size
_INPUT_BYTES = 2**26
_LOADS_AGAIN = {"auto": None, "forget": False, "reload": True}


@dataclass(frozen=True, slots=True)
class Backend:
    """`embedded` is None if Triton runs in another container. `private`: the folder that holds the
    repository of an upload, which ends with the adapter; None where the repository is shared.
    """

    embedded: EmbeddedTriton | None
    private: RunFolder | None
    repository: Path
    faults: Faults
    triton: TritonControl
    memory: ChosenMemory
    control: ModelControl


def build_backend(
    settings: Settings,
    metrics: Metrics,
    tracing: Tracing | None,
    on_restart: Callable[[], Awaitable[None]],
    *,
    cache: Path | None,
) -> Backend:
    """`on_restart` is called when the embedded Triton is live again. `cache` is the folder of what
    comes from the stores.
    """
    embedded = _build_embedded(settings, metrics, on_restart)
    is_private = settings.staging == "upload" and settings.repository is None
    private = RunFolder() if is_private else None
    repository = _choose_repository(settings, embedded, private)
    faults = Faults(Classifier(settings.oom_patterns), str(repository))
    roots = [*settings.all_roots, *([cache] if cache else [])]
    triton = _build_triton(settings, faults, repository, metrics, roots=roots, tracing=tracing)
    page, limit = str(settings.triton_metrics), settings.memory_limit
    memory = build_memory(settings.memory_source, embedded, limit, page)
    packages = _build_packages(settings, embedded, repository, cache)
    control = _build_control(settings, embedded, packages, triton, memory, metrics=metrics)
    return Backend(embedded, private, repository, faults, triton, memory, control)


def _build_embedded(
    settings: Settings, metrics: Metrics, on_restart: Callable[[], Awaitable[None]]
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
        on_dropped=metrics.triton_log_dropped.inc,
        on_exit=lambda reason: metrics.history.triton_ended(f"Triton has ended: {reason}"),
        # by AIP_MODE Triton would open its own port for Vertex AI, and no other
        withheld={*secret_variables(settings.endpoint_keys), "AIP_MODE"},
        newer_args=_newer_args(settings),
    )


def _newer_args(settings: Settings) -> dict[str, str]:
    """Return the options that lift limits of newer Tritons (docs/triton.md, Versions)."""
    most = min(max(settings.max_body_bytes, _INPUT_BYTES), 2**31 - 1)
    given = {"--http-max-input-size": str(most)}
    if "shared_memory" in settings.passthrough:
        given["--allow-client-shm"] = "true"
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

    def tell(is_live: bool) -> None:
        if is_live:
            metrics.history.triton_back()
        else:
            metrics.history.triton_silent()

    return TritonControl(
        faults,
        load_timeout_seconds=settings.load_timeout_seconds,
        on_retry=lambda call: metrics.retries.labels(call).inc(),
        on_live=tell,
        payload=(lambda name: payload(repository / name, real)) if is_upload else None,
        tracing=tracing,
    )


def _build_control(
    settings: Settings,
    embedded: EmbeddedTriton | None,
    packages: Packages,
    triton: TritonControl,
    memory: ChosenMemory,
    *,
    metrics: Metrics,
) -> ModelControl:
    sizes = Sizes(settings.size_factor, settings.default_size or 0)
    # a private repository without a sizes_file learns anew
    path = settings.sizes_file or (settings.repository and settings.repository / FILE_NAME)
    file = LearnedFile(path) if path else None
    if file is not None:
        sizes.restore(file.load())
    return ModelControl(
        registry=Registry(clock.now),
        ledger=Ledger(settings.memory_limit, settings.memory_reserve.of),
        sizes=sizes,
        triton=triton,
        packages=packages,
        memory=memory,
        metrics=metrics,
        limits=TimeLimits(
            load=settings.load_timeout_seconds,
            unload=settings.unload_timeout_seconds,
            stall=settings.unload_stall_seconds,
            recovery=settings.memory_recovery_seconds,
            warm_up=settings.infer_timeout_seconds if settings.warm_up == "zeros" else None,
        ),
        server=embedded,
        store=file,
        loads_again=_LOADS_AGAIN[settings.on_triton_restart],
        load_threads=embedded.load_threads if embedded else _LOAD_THREADS,
        max_abandoned=settings.max_abandoned_requests,
    )


def _build_packages(
    settings: Settings, embedded: EmbeddedTriton | None, repository: Path, cache: Path | None
) -> Packages:
    return Packages(
        repository,
        settings.all_roots,
        staging="symlink" if settings.staging == "upload" else settings.staging,
        limits=Limits(max_unpacked_bytes=settings.max_unpacked_bytes),
        backends=embedded.backends if embedded else lambda: None,
        cache=cache,
    )
