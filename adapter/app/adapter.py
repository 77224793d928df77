"""Starts the parts of an adapter in order, and stops them in reverse."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import NoReturn

from adapter.app.parts import TRITON_STOP_SECONDS, build_parts
from adapter.core.memory import NOT_MEASURED
from adapter.core.model import ModelSource, parse_model_id
from adapter.errors import BackendUnavailable
from adapter.frontends.access import SitePolicy
from adapter.frontends.admin.pages import Pages, application
from adapter.packages.roots import start_models
from adapter.runtime import background
from adapter.runtime.threads import REPOSITORY
from adapter.settings import Address, Loaded
from adapter.telemetry.tracing import Tracing
from adapter.triton import liveness
from adapter.triton.liveness import HangDetector
from adapter.triton.server.launch import RunFolder

log = logging.getLogger(__name__)


class Adapter:
    """Runs one adapter: `start` returns when it is ready, `stop` when all is closed."""

    def __init__(self, loaded: Loaded, tracing: Tracing | None = None) -> None:
        self.parts = build_parts(loaded, tracing)
        self.addresses = self.parts.listeners.addresses  # of each open listener, port 0 resolved
        self._settings = loaded.settings
        self._background: list[asyncio.Task[NoReturn]] = []

    # -- start --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the listeners, so that probes and /ping are answered, and then all the rest.

        Raises BackendUnavailable if Triton does not start or answer, and OSError for an address
        that is taken.
        """
        parts = self.parts
        measuring = background.measure_lag(parts.metrics.loop_lag.observe)
        self._background.append(background.begin("loop-lag", measuring))
        await self._open_listeners()
        polling = background.forever(parts.unready.poll, seconds=1)
        self._background.append(background.begin("unready-connections", polling))
        if parts.cache is not None:
            await parts.cache.open()
        if parts.listeners.open_to_others:
            names = ", ".join(parts.listeners.open_to_others)
            log.warning("adapter.open_to_others", extra={"listeners": names})
        http, grpc = await self._start_triton()
        self.connect(http, grpc)
        await self._wait_for_triton(http)
        self._watch_triton()
        await self._begin_work()
        parts.readiness.note_started()
        log.info(
            "adapter.started",
            extra={
                "triton": self._settings.triton,
                "triton_http": http,
                "triton_grpc": grpc,
                "repository": str(parts.repository),
                "memory_source": parts.memory.source,
                "memory_limit": self._sum_limits(),
            },
        )

    async def _open_listeners(self) -> None:
        """Open the listeners of operators, and those of callers."""
        parts = self.parts
        settings = self._settings
        await self._open_pages()
        for rest in parts.rest:
            await parts.listeners.open_http(rest.name, rest.address, rest.listener)
        grpc_addresses = {"grpc": settings.grpc}
        if settings.has_grpc_data:
            grpc_addresses["grpc_data"] = settings.grpc_data
        for name, address in grpc_addresses.items():
            proxy = partial(parts.rpc.proxy, name)
            await parts.listeners.open_grpc(name, address, parts.services[name], proxy)

    async def _open_pages(self) -> None:
        """Open the listeners of operators: `admin`, and `metrics` where that has its own."""
        parts = self.parts
        settings = self._settings
        pages_by_listener: list[tuple[str, Address, list[Pages]]] = [
            ("admin", settings.admin, [parts.probes, parts.admin])
        ]
        if settings.has_metrics:
            pages_by_listener = [
                ("admin", settings.admin, [parts.admin]),
                ("metrics", settings.metrics, [parts.probes]),
            ]
        for name, address, pages in pages_by_listener:
            sites = SitePolicy(address, settings.allowed_hosts, settings.token_at(address))
            await parts.listeners.open_probes(name, address, application(sites, *pages))

    async def _start_triton(self) -> tuple[str, str]:
        """Start Triton if it is embedded; return its addresses for HTTP and for gRPC."""
        embedded = self.parts.embedded
        if embedded is not None:
            await embedded.start()
            return embedded.http_address, embedded.grpc_address
        if self._settings.staging == "upload":
            await REPOSITORY.run(RunFolder.sweep)
            await REPOSITORY.run(self.parts.repository.mkdir, parents=True, exist_ok=True)
        return str(self._settings.triton_http), str(self._settings.triton_grpc)

    def connect(self, http: str, grpc: str) -> None:
        """Give all parts that call Triton its addresses."""
        parts = self.parts
        parts.triton.connect(grpc)
        parts.triton_http.connect(http, parts.http_key)
        parts.triton_grpc.connect(grpc)
        for rest in parts.rest:
            rest.heads.host = http

    async def _wait_for_triton(self, http: str) -> None:
        """Wait until Triton is live. Raises BackendUnavailable with a remedy."""
        try:
            await self.parts.triton.wait_live(self._settings.start_timeout_seconds)
        except BackendUnavailable as error:
            if self.parts.embedded is not None:
                raise
            hint = (
                f"start one there, with its HTTP at {http}, or say by --triton-grpc and "
                "--triton-http where it is; --triton=embedded starts one; "
                "see docs/triton.md#external-triton-is-another-process"
            )
            raise BackendUnavailable(f"{error}; {hint}", delivered=False) from error

    def _watch_triton(self) -> None:
        """Probe Triton for ever, and restart one of our own that hangs."""
        parts = self.parts
        monitoring = parts.triton.monitor()
        self._background.append(background.begin("triton-watch", monitoring))
        if parts.embedded is not None:
            hangs = HangDetector(parts.embedded, liveness.HANG_SECONDS, self._count_answers)
            polling = background.forever(hangs.poll, seconds=0)
            self._background.append(background.begin("triton-hang-watch", polling))

    def _count_answers(self) -> int:
        """Return how many probes and requests Triton has answered."""
        return self.parts.triton.answers + self.parts.metrics.traffic.answers

    async def _begin_work(self) -> None:
        """Take loads, and begin with those that are wanted from the start on."""
        parts = self.parts
        await parts.control.open()
        if not parts.control.state.devices():
            log.warning("memory.not_measured", extra={"reason": NOT_MEASURED})
        single = self._settings.single_model
        if single is not None and parts.single_model is not None:
            parts.readiness.note_loading(parts.single_model)
            source = ModelSource(str(single.folder), helpers=single.helpers)
            await parts.control.models.load(parts.single_model, source)
        await self._want_models()

    async def _want_models(self) -> None:
        """Have the models of load_at_start and preload loaded."""
        control = self.parts.control
        entries = self._settings.load_at_start
        roots = [*self._settings.all_roots, Path("/")]
        wanted = await REPOSITORY.run(start_models, entries, roots[0])
        if entries and not wanted:
            log.warning("adapter.nothing_to_load", extra={"load_at_start": [*entries]})
        control.desired.want(wanted)
        names = self._settings.preload
        control.desired.preload({parse_model_id(name): control.key_of(name) for name in names})

    def _sum_limits(self) -> int | None:
        """Return the bytes that models may have on all devices; None while none is known."""
        devices = self.parts.control.state.devices()
        return sum(device.limit_bytes for device in devices.values()) if devices else None

    # -- stop ---------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Report not ready, refuse new requests, answer those in flight, close in reverse order."""
        parts = self.parts
        has_started = parts.readiness.explain_not_started() is None
        parts.readiness.note_stopping()
        parts.drain.begin()
        if has_started:
            await parts.drain.wait_until_noticed()
        grace_seconds = self._settings.drain_timeout_seconds - self._settings.drain_min_seconds
        deadline = asyncio.get_running_loop().time() + grace_seconds
        closing = asyncio.gather(parts.control.drain(grace_seconds), parts.listeners.close())
        await asyncio.wait([closing], timeout=grace_seconds)
        for task in self._background:
            background.end(task)
        await parts.control.end_work()
        if parts.cache is not None:
            await parts.cache.close()
        await parts.memory.close()
        # requests still in flight get their 503 while there are connections to send it on
        await parts.triton_http.close()
        if parts.embedded is not None:
            remaining_seconds = deadline - asyncio.get_running_loop().time()
            more_seconds = min(max(remaining_seconds, 0.0), TRITON_STOP_SECONDS)
            await parts.embedded.stop(TRITON_STOP_SECONDS + more_seconds)
        await parts.triton_grpc.close()
        await closing
        # loads that the drain has ended are undone in an external Triton while it can be asked
        await parts.control.stop()
        await parts.triton.unload_uploaded()
        await parts.triton.close()
        if parts.upload_folder is not None:
            await REPOSITORY.run(parts.upload_folder.remove)
        await parts.listeners.close_probes()
        if parts.tracing is not None:
            await REPOSITORY.run(parts.tracing.close)
