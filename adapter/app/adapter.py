"""Starts the parts of an adapter in order, and stops them in reverse."""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from adapter.app.backend import Stores, build_backend, build_cache
from adapter.app.listeners import Rpc, Shared, build_rest, headers_to_triton
from adapter.core import versions
from adapter.core.memory import NOT_MEASURED
from adapter.core.model import ModelId, ModelSource, parse_model_id
from adapter.core.triton_errors import Faults
from adapter.errors import BackendUnavailable
from adapter.frontends.access import Access, SitePolicy
from adapter.frontends.admin.models import Resident
from adapter.frontends.admin.pages import Admin, Pages, Probes, application
from adapter.frontends.admin.state import DebugState
from adapter.frontends.admin.store_models import ModelListing
from adapter.frontends.drain import Drain
from adapter.frontends.grpc.calls import MessageLimits
from adapter.frontends.http.server import bearable_connections
from adapter.frontends.listeners import Listeners
from adapter.frontends.repository import Repository
from adapter.frontends.unready import UnreadyConnections
from adapter.packages.roots import start_models
from adapter.runtime import background, clock
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.threads import REPOSITORY
from adapter.runtime.turns import Turns
from adapter.runtime.unread import Unread
from adapter.settings import Address, Loaded, for_programs
from adapter.telemetry.gauges import ModelCollector
from adapter.telemetry.gauges import State as Figures
from adapter.telemetry.log import LogStream
from adapter.telemetry.metrics import Metrics, about
from adapter.telemetry.tracing import Tracing
from adapter.triton import liveness
from adapter.triton.grpc import GrpcDataPlane
from adapter.triton.http import HttpDataPlane
from adapter.triton.liveness import HangDetector
from adapter.triton.memory.sources import host_limit_bytes
from adapter.triton.server.launch import RunFolder

log = logging.getLogger(__name__)

_STARTING = "starting"
# How long an embedded Triton may take to stop after a drain that took all its time; up to twice as
# long after a shorter one. SIGKILL comes 30 s after SIGTERM, and a drain takes 18 s at most.
_TRITON_SECONDS = 4.0
# For the 503 answers to requests that are still in flight at the end of a drain.
_ANSWER_SECONDS = 1.0
_SHARE_IN_FLIGHT = 4
# Answers of streams that wait for their callers: twice the largest one, by default.
_UNREAD_BYTES = 2**27
_ASKS_NO_STORE = (
    "; set on_demand to load models of a store by name; see docs/v2.md#models-of-a-store"
)
_STORE_LACKS_IT = ", and the store has no such key"


class Readiness:
    """Says whether the adapter has started and whether it is ready, and why not."""

    # `find_reasons` returns why a started adapter is not ready; the first one is reported
    def __init__(self, find_reasons: Callable[[], list[str]]) -> None:
        self._find_reasons = find_reasons
        self._phase = "starting: waiting for Triton"

    def starting(self, reason: str) -> None:
        """Report `reason`, which begins with "starting"."""
        self._phase = reason

    def started(self) -> None:
        self._phase = ""

    def stopping(self) -> None:
        self._phase = "stopping"

    def why_not_started(self) -> str | None:
        return self._phase if self._phase.startswith(_STARTING) else None

    def reasons(self) -> list[str]:
        """Return why the adapter is not ready; nothing when it is."""
        if self._phase:
            return [self._phase]
        return self._find_reasons()

    def why_not_ready(self) -> str | None:
        return next(iter(self.reasons()), None)

    def is_ready(self) -> bool:
        return self.why_not_ready() is None


class Adapter:
    """One adapter. `start` returns when it is ready for requests, `stop` when all is closed."""

    def __init__(self, loaded: Loaded, tracing: Tracing | None = None) -> None:
        self._loaded, self._tracing = loaded, tracing
        self._settings = settings = loaded.settings
        self._background: list[asyncio.Task[NoReturn]] = []
        self._metrics = Metrics(tracing.trace_id if tracing else None)
        self._metrics.load_timeout.set(settings.load_timeout_seconds)
        self._limits = MessageLimits.within(settings.max_body_bytes)
        self._listeners = self._build_listeners()
        self.addresses = self._listeners.addresses  # of each open listener, port 0 resolved
        cache = build_cache(settings, self._metrics)
        came_back = self._triton_came_back
        backend = build_backend(settings, self._metrics, tracing, came_back, cache=cache)
        self._embedded, self._private = backend.embedded, backend.private
        self._http_key = backend.http_key
        self._repository = backend.repository
        self._triton, self._reader, self._control = backend.triton, backend.memory, backend.control
        self._models = self._control.models
        self._registry = self._models.registry
        self._state = self._control.state
        self._triton_grpc: str | None = None
        self._catalogue = None if cache is None else cache.packages
        self._stores = None if cache is None else Stores(cache, self._registry)
        traffic, min_seconds = self._metrics.traffic, settings.drain_min_seconds
        self._drain = Drain(self._models, self._state, traffic, min_seconds)
        self._readiness = Readiness(self._find_reasons)
        self._unready = UnreadyConnections(self._readiness.is_ready)
        self._budget, self._turns = (budget := self._build_budget()), Turns()
        self._unread = Unread(
            budget, min(budget.share, _UNREAD_BYTES), self._metrics.streams_cut.inc
        )
        self._dataplane = self._build_dataplane(backend.faults)
        self._rpc = self._build_rpc(backend.faults)
        self._single = ModelId(settings.single_model.folder.name) if settings.single_model else None
        shared = self._build_shared(backend.faults)
        models = self._build_models()
        self._rest = build_rest(shared, self._dataplane, models)
        self._grpc = Rpc(shared, self._triton, self._limits)
        self._services = self._grpc.services(models)

    def _build_models(self) -> Repository:
        return Repository(
            self._models,
            self._triton.versions,
            self._settings.all_roots,
            takes_files=self._settings.inline_files == "on",
            stores=self._control.on_demand if self._settings.on_demand else None,
            hint=self._hint_of_store(),
        )

    def _build_rpc(self, faults: Faults) -> GrpcDataPlane:
        return GrpcDataPlane(
            faults,
            timeout_seconds=self._settings.infer_timeout_seconds,
            max_message_bytes=self._limits.stream,
            unread=self._unread,
            takes_cancels=lambda: versions.survives_cancels(self._triton.version),
            metadata=headers_to_triton(self._settings, "grpc"),
        )

    def _build_dataplane(self, faults: Faults) -> HttpDataPlane:
        return HttpDataPlane(
            faults,
            timeout_seconds=self._settings.infer_timeout_seconds,
            # as many as there may be callers over HTTP
            max_connections=self._max_connections() * (1 + self._settings.has_http_data),
            unread=self._unread,
            turns=self._turns,
            max_unpacked_bytes=self._settings.gathered_bytes,
            answered_nothing=self._control.leases.note_missing_outputs,
            headers=headers_to_triton(self._settings, "http"),
        )

    def _hint_of_store(self) -> str:
        if self._stores is None:
            return ""
        return _STORE_LACKS_IT if self._settings.on_demand else _ASKS_NO_STORE

    def _build_listeners(self) -> Listeners:
        settings = self._settings
        grace_seconds = settings.drain_timeout_seconds - settings.drain_min_seconds
        grace_seconds += _TRITON_SECONDS if settings.triton == "embedded" else 0.0
        grace_seconds += _ANSWER_SECONDS
        return Listeners(grace_seconds, self._limits.stream)

    def _find_reasons(self) -> list[str]:
        """Return why a started adapter is not ready."""
        found = [self._why_triton(), "draining" if self._drain.is_on else None]
        found.append(background.find_ended_task())
        found += self._state.reasons()
        if self._stores is not None:
            found.append(self._stores.why_not_ready())
        return [reason for reason in found if reason is not None]

    def _why_triton(self) -> str | None:
        return self._triton.why_not_explicit if self._triton.live else "Triton does not answer"

    def _max_connections(self) -> int:
        """Return how many connections of callers each listener may have."""
        settings = self._settings
        return bearable_connections(
            http_listeners=1 + settings.has_http_data,
            grpc_listeners=sum(one.kind != "off" for one in (settings.grpc, settings.grpc_data)),
        )

    def _build_shared(self, faults: Faults) -> Shared:
        settings = self._settings
        return Shared(
            settings=settings,
            metrics=self._metrics,
            tracing=self._tracing,
            models=self._models,
            state=self._state,
            stores=self._control.on_demand,
            mesh_books=self._control.mesh,
            drain=self._drain,
            unready=self._unready,
            budget=self._budget,
            turns=self._turns,
            rpc=self._rpc,
            faults=faults,
            is_ready=self._readiness.is_ready,
            max_connections=self._max_connections(),
            single_model=self._single,
        )

    def _build_budget(self) -> ByteBudget:
        given, cut = self._settings.max_inflight_body_bytes, self._metrics.bodies_cut
        budget = ByteBudget(
            given or host_limit_bytes() // _SHARE_IN_FLIGHT,
            on_cut=lambda reason: cut.labels(reason.value).inc(),
        )
        self._metrics.body_bytes.set_function(lambda: budget.held)
        return budget

    async def _open_listeners(self) -> None:
        models = ModelCollector(self._registry, self._state.held)
        self._metrics.bind(self._figures(), models)
        settings, listeners = self._settings, self._listeners
        await self._open_pages()
        for rest in self._rest:
            await listeners.open_http(rest.name, rest.address, rest.listener)
        for name, address in (("grpc", settings.grpc), ("grpc_data", settings.grpc_data)):
            # one address may be given to both; then `grpc` serves them
            if name == "grpc" or address != settings.grpc or address.is_any_port:
                make = partial(self._grpc.proxy, name, lambda: self._triton_grpc)
                await listeners.open_grpc(name, address, self._services[name], make)

    async def _open_pages(self) -> None:
        """Open the listeners of operators: `admin`, and `metrics` where that has its own."""
        settings, probes, admin = self._settings, self._build_probes(), self._build_admin()
        opened: list[tuple[str, Address, list[Pages]]] = [
            ("admin", settings.admin, [probes, admin])
        ]
        if settings.has_metrics:
            opened = [("admin", settings.admin, [admin]), ("metrics", settings.metrics, [probes])]
        for name, address, pages in opened:
            sites = SitePolicy(address, settings.allowed_hosts, settings.token_at(address))
            await self._listeners.open_probes(name, address, application(sites, *pages))

    def _build_probes(self) -> Probes:
        return Probes(
            self._state,
            self._metrics,
            why_not_live=background.find_ended_task,
            why_not_started=self._readiness.why_not_started,
            why_not_ready=self._readiness.why_not_ready,
            notes=self._notes,
        )

    def _notes(self) -> list[str]:
        """Return what is amiss while the adapter is ready all the same."""
        notes = self._stores.notes() if self._stores else []
        return [*self._state.notes(), *notes]

    def _build_admin(self) -> Admin:
        state = DebugState(
            self._models,
            self._state,
            self._metrics.history,
            about=about(self._settings.triton),
            health=self._health,
        )
        return Admin(
            state,
            Resident(self._registry, self._state),
            ModelListing(
                self._registry,
                self._state,
                self._metrics.history,
                self._catalogue,
                is_by_name=self._settings.on_demand,
            ),
            self._models,
            access=Access("admin", token=self._settings.token_at(self._settings.admin)),
            drain=self._drain,
            drain_seconds=self._settings.drain_timeout_seconds,
            config=for_programs(self._loaded),
        )

    def _health(self) -> dict[str, Any]:
        reasons = self._readiness.reasons()
        return {
            "is_ready": not reasons,
            "reasons": reasons,
            "notes": self._notes(),
            "is_triton_live": self._triton.live,
            "is_draining": self._drain.is_on,
        }

    def _figures(self) -> Figures:
        """Return what metrics read at a scrape."""
        return Figures(
            models=self._registry.counts,
            devices=lambda: self._state.devices(self._reader.last),
            gpu_unread=lambda: self._reader.is_gpu_unread,
            triton_live=lambda: self._triton.live,
            ready=self._readiness.is_ready,
            abandoned=lambda: self._state.requests.abandoned,
            lost_lines=lambda: LogStream.lost,
            wanted=self._state.count_wanted,
            idle_seconds=lambda: self._registry.longest_idle_seconds(clock.monotonic()),
            about=about(self._settings.triton),
        )

    async def start(self) -> None:
        """Start the listeners, so that probes and /ping are answered, and then all the rest."""
        measuring = background.measure_lag(self._metrics.loop_lag.observe)
        self._background.append(background.begin("loop-lag", measuring))
        await self._open_listeners()
        polling = background.forever(self._unready.poll, seconds=1)
        self._background.append(background.begin("unready-connections", polling))
        if self._stores is not None:
            await self._stores.open()
        if found := self._listeners.open_to_others:
            log.warning("adapter.open_to_others", extra={"listeners": ", ".join(found)})
        if self._embedded is not None:
            await self._embedded.start()
            http, grpc = self._embedded.http_address, self._embedded.grpc_address
        else:
            if self._settings.staging == "upload":
                await REPOSITORY.run(RunFolder.sweep)
                await REPOSITORY.run(self._repository.mkdir, parents=True, exist_ok=True)
            http, grpc = str(self._settings.triton_http), str(self._settings.triton_grpc)
        self._connect(http, grpc)
        await self._wait_for_triton(http)
        monitoring = self._triton.monitor(self._triton_came_back)
        self._background.append(background.begin("triton-watch", monitoring))
        if self._embedded is not None:
            hangs = HangDetector(self._embedded, liveness.HANG_SECONDS, self._answers)
            self._background.append(
                background.begin("triton-hang-watch", background.forever(hangs.poll, seconds=0))
            )
        await self._begin_work()
        self._readiness.started()
        log.info(
            "adapter.started",
            extra={
                "triton": self._settings.triton,
                "triton_http": http,
                "triton_grpc": grpc,
                "repository": str(self._repository),
                "memory_source": self._reader.source,
                "memory_limit": self._sum_limits(),
            },
        )

    def _sum_limits(self) -> int | None:
        """Return the bytes that models may have on all devices; None while none is known."""
        devices = self._state.devices()
        return sum(device.limit_bytes for device in devices.values()) if devices else None

    async def _begin_work(self) -> None:
        """Take loads, and begin with those that are wanted from the start on."""
        await self._control.open()
        if not self._state.devices():
            log.warning("memory.not_measured", extra={"reason": NOT_MEASURED})
        single = self._settings.single_model
        if self._single is not None and single is not None:
            self._readiness.starting(f"starting: loading {self._single!r}")
            source = ModelSource(str(single.folder), helpers=single.helpers)
            await self._models.load(self._single, source)
        await self._begin_wanted()

    async def _begin_wanted(self) -> None:
        entries, roots = self._settings.load_at_start, [*self._settings.all_roots, Path("/")]
        wanted = await REPOSITORY.run(start_models, entries, roots[0])
        if entries and not wanted:
            log.warning("adapter.nothing_to_load", extra={"load_at_start": [*entries]})
        self._control.desired.want(wanted)
        names = self._settings.preload
        self._control.desired.preload(
            {parse_model_id(name): self._control.key_of(name) for name in names}
        )

    async def _wait_for_triton(self, http: str) -> None:
        try:
            await self._triton.wait_live(self._settings.start_timeout_seconds)
        except BackendUnavailable as error:
            if self._embedded is not None:
                raise
            hint = (
                f"start one there, with its HTTP at {http}, or say by --triton-grpc and "
                "--triton-http where it is; --triton=embedded starts one; "
                "see docs/triton.md#external-triton-is-another-process"
            )
            raise BackendUnavailable(f"{error}; {hint}", delivered=False) from error

    def _connect(self, http: str, grpc: str) -> None:
        self._triton.connect(grpc)
        self._triton_grpc = grpc
        self._dataplane.connect(http, self._http_key)
        for rest in self._rest:
            rest.heads.host = http
        self._rpc.connect(grpc)

    async def stop(self) -> None:
        """Report not ready, refuse new requests, answer those in flight, close in reverse order."""
        was_started = self._readiness.why_not_started() is None
        self._readiness.stopping()
        self._drain.begin()
        if was_started:
            await self._drain.noticed()
        grace_seconds = self._settings.drain_timeout_seconds - self._settings.drain_min_seconds
        end = asyncio.get_running_loop().time() + grace_seconds
        closing = asyncio.gather(self._control.drain(grace_seconds), self._listeners.close())
        await asyncio.wait([closing], timeout=grace_seconds)
        for task in self._background:
            background.end(task)
        await self._control.end_work()
        if self._stores is not None:
            await self._stores.close()
        await self._reader.close()
        # requests still in flight get their 503 while there are connections to send it on
        await self._dataplane.close()
        if self._embedded is not None:
            left = end - asyncio.get_running_loop().time()
            await self._embedded.stop(_TRITON_SECONDS + min(max(left, 0.0), _TRITON_SECONDS))
        await self._rpc.close()
        await closing
        await self._triton.unload_uploaded()
        await self._triton.close()
        await self._control.stop()
        if self._private is not None:
            await REPOSITORY.run(self._private.remove)
        await self._listeners.close_probes()
        if self._tracing is not None:
            await REPOSITORY.run(self._tracing.close)

    def _answers(self) -> int:
        return self._triton.answers + self._metrics.traffic.answers

    async def _triton_came_back(self) -> None:
        await self._control.note_triton_back()
