"""Builds the parts from the settings. app.py connects them."""

import os
import platform
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from adapter.backend.embedded import EmbeddedTriton
from adapter.backend.memory import (
    ChosenMemory,
    HostMemory,
    NvmlMemory,
    TritonMetrics,
    host_limit_bytes,
)
from adapter.backend.sizes_file import FILE_NAME, LearnedFile
from adapter.backend.triton import TritonControl
from adapter.control.models import ModelControl
from adapter.control.ports import TimeLimits
from adapter.core.faults import Faults
from adapter.core.inflight import InflightBytes
from adapter.core.ledger import Ledger
from adapter.core.registry import Registry
from adapter.core.sizing import Sizes
from adapter.dataplane.grpc import GrpcDataPlane
from adapter.dataplane.http import HttpDataPlane
from adapter.dataplane.proxy.context import ProxyContext, connect_to
from adapter.dataplane.proxy.listener import ProxyListener
from adapter.dataplane.traced import TracedHttp, TracedRpc
from adapter.frontends.drain import Drain
from adapter.frontends.grpc.limits import message_limits
from adapter.frontends.grpc.services import ListenerServices
from adapter.frontends.http.connections import Connections
from adapter.packages.repository.staging import Packages
from adapter.packages.repository.uploads import payload
from adapter.packages.source.unpacking import Limits
from adapter.settings import Address, Settings
from adapter.settings.examples import examples_folder
from adapter.telemetry.log_stream import LogStream
from adapter.telemetry.metrics import Metrics, State
from adapter.telemetry.tracing import Tracing

# Triton's own default of --model-load-thread-count
TRITON_LOAD_THREADS = 4
_OTHER_DESCRIPTORS = 100
_SHARE_IN_FLIGHT = 4
_GATHERED_BYTES = 2**26
_FEWEST_CONNECTIONS, _MOST_CONNECTIONS = 16, 10_000


def build_embedded(
    settings: Settings, on_restart: Callable[[], Awaitable[None]], metrics: Metrics
) -> EmbeddedTriton | None:
    """Return None if Triton runs in another container."""
    if settings.triton != "embedded":
        return None
    return EmbeddedTriton(
        tritonserver=settings.tritonserver,
        repository=settings.repository,
        http=host_port(settings.triton_http),
        grpc=host_port(settings.triton_grpc),
        metrics=host_port(settings.triton_metrics),
        extra_args=settings.triton_args,
        start_timeout_seconds=settings.start_timeout_seconds,
        on_restart=on_restart,
        on_dropped=metrics.triton_log_dropped.inc,
    )


def build_triton(
    settings: Settings,
    faults: Faults,
    metrics: Metrics,
    repository: Path,
    tracing: Tracing | None,
) -> TritonControl:
    is_upload = settings.staging == "upload"
    real = [os.path.realpath(root) for root in model_roots(settings)]
    return TritonControl(
        faults,
        load_timeout_seconds=settings.load_timeout_seconds,
        call_timeout_seconds=settings.control_timeout_seconds,
        on_retry=lambda call: metrics.retries.labels(call).inc(),
        payload=(lambda name: payload(repository / name, real)) if is_upload else None,
        tracing=tracing,
    )


def build_memory(settings: Settings, embedded: EmbeddedTriton | None) -> ChosenMemory:
    host = None
    if embedded is not None:
        host = HostMemory(embedded.owners, settings.memory_limit or host_limit_bytes())
    page = TritonMetrics(
        lambda: embedded.metrics_address if embedded else str(settings.triton_metrics)
    )
    return ChosenMemory(settings.memory_source, host, page, NvmlMemory(lambda: page.uuids))


def build_packages(
    settings: Settings, embedded: EmbeddedTriton | None, repository: Path, roots: Sequence[Path]
) -> Packages:
    return Packages(
        repository,
        roots,
        staging="symlink" if settings.staging == "upload" else settings.staging,
        limits=Limits(max_unpacked_bytes=settings.max_unpacked_bytes),
        backends=embedded.backends if embedded else lambda: None,
    )


def build_sizes(settings: Settings) -> tuple[Sizes, LearnedFile | None]:
    """Return the learned sizes and their file; None for a private repository without one."""
    sizes = Sizes(settings.size_factor, settings.default_size or 0)
    path = settings.sizes_file
    if path is None and settings.repository is not None:
        path = settings.repository / FILE_NAME
    if path is None:
        return sizes, None
    file = LearnedFile(path)
    sizes.restore(file.load())
    return sizes, file


def build_control(
    settings: Settings,
    *,
    triton: TritonControl,
    packages: Packages,
    memory: ChosenMemory,
    embedded: EmbeddedTriton | None,
    metrics: Metrics,
) -> ModelControl:
    sizes, file = build_sizes(settings)
    return ModelControl(
        registry=Registry(),
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
        ),
        server=embedded,
        store=file,
        loads_again=settings.on_triton_restart == "reload",
        load_threads=embedded.load_threads if embedded else TRITON_LOAD_THREADS,
        max_abandoned=settings.max_abandoned_requests,
    )


def build_planes(settings: Settings, faults: Faults) -> tuple[HttpDataPlane, GrpcDataPlane]:
    seconds = settings.infer_timeout_seconds
    http = HttpDataPlane(
        faults, timeout_seconds=seconds, max_unpacked_bytes=gathered_limit(settings)
    )
    return http, GrpcDataPlane(
        faults, timeout_seconds=seconds, max_message_bytes=message_limits(settings).stream
    )


def traced_planes(
    http: HttpDataPlane, rpc: GrpcDataPlane, tracing: Tracing | None
) -> tuple[HttpDataPlane | TracedHttp, GrpcDataPlane | TracedRpc]:
    return (http, rpc) if tracing is None else (TracedHttp(http, tracing), TracedRpc(rpc, tracing))


def own_version() -> str:
    return version("triton-adapter")


def about(settings: Settings) -> dict[str, str]:
    """Describe this process, for the admin listener and the metrics."""
    return {
        "version": own_version(),
        "python": platform.python_version(),
        "triton": settings.triton,
    }


def metrics_state(
    control: ModelControl,
    memory: ChosenMemory,
    triton: TritonControl,
    is_ready: Callable[[], bool],
    settings: Settings,
) -> State:
    return State(
        models=control.registry.counts,
        ledger=control.memory.ledger.snapshot,
        memory=lambda: memory.last,
        triton_live=lambda: triton.live,
        ready=is_ready,
        abandoned=lambda: control.leases.abandoned,
        lost_lines=lambda: LogStream.lost,
        idle_seconds=lambda: control.registry.idle_seconds(time.monotonic()),
        about=about(settings),
    )


def build_proxy(
    settings: Settings,
    triton: Callable[[], str | None],
    services: ListenerServices,
    server: str,
    *,
    metrics: Metrics,
    drain: Drain,
    inflight: InflightBytes,
) -> ProxyListener:
    """`triton` returns Triton's address, once known; `server` is that of the fallback server."""
    proxy = ProxyListener(
        ProxyContext(
            services.policy,
            connect_to(triton),
            connect_to(lambda: server),
            timeout_seconds=settings.infer_timeout_seconds,
            max_message_bytes=settings.grpc_max_message_bytes,
            inflight=inflight,
        ),
        max_connections=connection_limit(settings),
        on_refused=metrics.connections_shed.labels(services.name, "refused").inc,
    )
    drain.then_refuse(proxy.hurry)
    metrics.connections.labels(services.name).set_function(lambda: proxy.connections)
    return proxy


def model_roots(settings: Settings) -> list[Path]:
    roots = list(settings.model_roots)
    if settings.examples:
        roots.append(examples_folder())
    if settings.single_model:
        roots.append(settings.single_model.parent)
    return roots


def build_connections(settings: Settings, metrics: Metrics) -> Connections:
    """Build the connection limit of the http listener."""
    shed = metrics.connections_shed
    connections = Connections(
        connection_limit(settings), lambda how: shed.labels("http", how).inc()
    )
    metrics.connections.labels("http").set_function(lambda: len(connections))
    return connections


def connection_limit(settings: Settings) -> int:
    """Return the connection limit of each listener. With all at their limit, descriptors are left
    for files, Triton's processes, memory readings and the admin listener: a connection of `http`
    takes two, with its connection to Triton; one of `grpc` or `grpc_data` takes four.
    """
    if settings.max_connections is not None:
        return settings.max_connections
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 + 4 * sum(address.kind != "off" for address in (settings.grpc, settings.grpc_data))
    bearable = (descriptors - _OTHER_DESCRIPTORS) // needed
    return min(max(bearable, _FEWEST_CONNECTIONS), _MOST_CONNECTIONS)


def inflight_limit(settings: Settings) -> int:
    """Return the limit of the bodies that are on their way to Triton, in bytes."""
    return settings.max_inflight_body_bytes or host_limit_bytes() // _SHARE_IN_FLIGHT


def gathered_limit(settings: Settings) -> int:
    """Return the limit of a body that is unpacked, or read whole as it holds a model's files."""
    return min(settings.max_body_bytes, _GATHERED_BYTES)


def host_port(address: Address) -> tuple[str, int]:
    return address.host, address.port
