"""The composition root: builds every object, starts them in order, stops them in reverse."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from adapter.assembly import (
    about,
    build_connections,
    build_control,
    build_embedded,
    build_memory,
    build_packages,
    build_planes,
    build_proxy,
    build_triton,
    gathered_limit,
    inflight_limit,
    metrics_state,
    model_roots,
    traced_planes,
)
from adapter.backend.liveness import HangDetector
from adapter.backend.tritonserver import RunFolder
from adapter.core.calls import RpcDataPlane, V2DataPlane
from adapter.core.faults import Faults
from adapter.core.inflight import InflightBytes
from adapter.core.model import ModelId, ModelSource
from adapter.core.oom import Classifier
from adapter.errors import AdapterError
from adapter.frontends.admin import Admin
from adapter.frontends.drain import Drain
from adapter.frontends.grpc.limits import message_limits
from adapter.frontends.grpc.services import GrpcServices
from adapter.frontends.http.fast_path import FastPath
from adapter.frontends.http.head import Heads
from adapter.frontends.http.inference import Inferences
from adapter.frontends.http.middleware import HttpMiddleware, Serve
from adapter.frontends.http.observer import Clock, Observer, path_segments
from adapter.frontends.http.sagemaker import SageMaker
from adapter.frontends.http.server import HttpListener
from adapter.frontends.http.v2 import V2
from adapter.frontends.listeners import Listeners
from adapter.frontends.traced import TracedCalls, traced
from adapter.runtime import background
from adapter.runtime.threads import REPOSITORY
from adapter.settings import Loaded, for_programs
from adapter.telemetry.metrics import Metrics
from adapter.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

# How long an embedded Triton may take to stop after a drain that took all its time; up to twice as
# long after a shorter one. SIGKILL comes 30 s after SIGTERM, and a drain takes 18 s at most.
_TRITON_SECONDS = 4.0
# For the 503 answers to requests that are still in flight at the end of a drain.
_ANSWER_SECONDS = 1.0


class Adapter:
    """One adapter. `start` returns when it is ready for requests, `stop` when all is closed.

    `addresses`: where each open listener really is, port 0 resolved.
    """

    def __init__(self, loaded: Loaded, tracing: Tracing | None = None) -> None:
        self._loaded, self._tracing = loaded, tracing
        self._settings = settings = loaded.settings
        self._listeners = self._build_listeners()
        self.addresses = self._listeners.addresses
        self._triton_grpc: str | None = None
        self._phase = "starting: waiting for Triton"
        self._metrics = Metrics()
        faults = Faults(Classifier(settings.oom_patterns))
        self._embedded = build_embedded(settings, self._triton_came_back, self._metrics)
        is_private = settings.staging == "upload" and settings.repository is None
        self._private = RunFolder() if is_private else None
        self._repository = self._choose_repository()
        self._triton = build_triton(settings, faults, self._metrics, self._repository, tracing)
        self._memory = build_memory(settings, self._embedded)
        roots = model_roots(settings)
        packages = build_packages(settings, self._embedded, self._repository, roots)
        self._control = build_control(
            settings,
            triton=self._triton,
            packages=packages,
            memory=self._memory,
            embedded=self._embedded,
            metrics=self._metrics,
        )
        self._drain = Drain(self._control, self._metrics.traffic, settings.drain_min_seconds)
        self._dataplane, self._rpc = build_planes(settings, faults)
        http, rpc = traced_planes(self._dataplane, self._rpc, tracing)
        self._single = ModelId(settings.single_model.name) if settings.single_model else None
        self._inflight = InflightBytes(inflight_limit(settings))
        inferences = self._build_inferences(http)
        self._sagemaker = self._build_sagemaker(inferences)
        self._v2 = self._build_v2(http, inferences, roots)
        self._heads = self._build_heads()
        self._http = self._build_http()
        self._services = self._build_services(rpc, faults, roots)
        self._background: list[asyncio.Task[NoReturn]] = []

    def _build_listeners(self) -> Listeners:
        settings = self._settings
        grace_seconds = settings.drain_timeout_seconds - settings.drain_min_seconds
        interceptors = [TracedCalls(self._tracing)] if self._tracing else []
        grace = _TRITON_SECONDS if settings.triton == "embedded" else 0.0
        most = message_limits(settings).stream
        return Listeners(grace_seconds + grace + _ANSWER_SECONDS, most, interceptors)

    def _build_inferences(self, dataplane: V2DataPlane) -> Inferences:
        return Inferences(
            self._control,
            dataplane,
            load_wait_seconds=self._settings.load_wait_seconds,
            max_body_bytes=self._settings.max_body_bytes,
            default_model=self._single,
            inflight=self._inflight,
        )

    def _build_sagemaker(self, inferences: Inferences) -> SageMaker:
        return SageMaker(
            self._control,
            inferences,
            is_ready=self._is_ready,
            max_control_body_bytes=self._settings.max_control_body_bytes,
        )

    def _build_heads(self) -> Heads:
        return Heads(
            self._metrics.traffic.served,
            default_model=self._single,
            max_body_bytes=self._settings.max_body_bytes,
        )

    def _build_http(self) -> HttpListener:
        observer = Observer(self._metrics)
        serve: Serve = HttpMiddleware(self._route, observer).serve
        if self._tracing is not None:
            serve = traced(serve, self._tracing)
        return HttpListener(
            serve,
            FastPath(self._control, self._dataplane, observer, Clock(), self._inflight),
            self._heads,
            observer,
            drain=self._drain,
            connections=build_connections(self._settings, self._metrics),
        )

    def _choose_repository(self) -> Path:
        if self._embedded is not None:
            return self._embedded.repository
        if self._private is not None:
            return self._private.path / "repository"
        assert self._settings.repository is not None  # noqa: S101 - settings resolve it
        return self._settings.repository

    def _build_v2(
        self, dataplane: V2DataPlane, inferences: Inferences, roots: Sequence[Path]
    ) -> V2:
        settings = self._settings
        return V2(
            self._control,
            dataplane,
            inferences,
            self._triton.versions,
            roots,
            load_wait_seconds=settings.load_wait_seconds,
            max_body_bytes=gathered_limit(settings),
            max_control_body_bytes=settings.max_control_body_bytes,
            passthrough=frozenset(settings.passthrough),
        )

    def _build_services(
        self, dataplane: RpcDataPlane, faults: Faults, roots: Sequence[Path]
    ) -> GrpcServices:
        return GrpcServices(
            control=self._control,
            is_traced=self._tracing is not None,
            triton=self._triton,
            dataplane=dataplane,
            faults=faults,
            metrics=self._metrics,
            settings=self._settings,
            roots=roots,
            is_ready=self._is_ready,
        )

    async def start(self) -> None:
        """Start the listeners, so that probes and /ping are answered, and then all the rest."""
        await self._open_listeners()
        if self._embedded is not None:
            await self._embedded.start()
            http, grpc = self._embedded.http_address, self._embedded.grpc_address
        else:
            if self._settings.staging == "upload":
                await REPOSITORY.run(RunFolder.sweep)
                await REPOSITORY.run(self._repository.mkdir, parents=True, exist_ok=True)
            http, grpc = str(self._settings.triton_http), str(self._settings.triton_grpc)
        self._connect(http, grpc)
        await self._triton.wait_live(self._settings.start_timeout_seconds)
        monitoring = self._triton.monitor(self._triton_came_back)
        self._background.append(background.begin("triton-watch", monitoring))
        if self._embedded is not None and (seconds := self._settings.triton_hang_seconds):
            hangs = HangDetector(self._embedded, seconds, self._answers)
            self._background.append(
                background.begin("triton-hang-watch", background.forever(hangs.poll, seconds=0))
            )
        await self._control.open()
        self._background.append(background.begin("control-watch", self._control.run_housekeeping()))
        if self._single is not None:
            self._phase = f"starting: loading {self._single!r}"
            await self._control.load(self._single, ModelSource(str(self._settings.single_model)))
        self._phase = ""
        log.info(
            "adapter.started",
            extra={
                "triton": self._settings.triton,
                "triton_http": http,
                "triton_grpc": grpc,
                "repository": str(self._repository),
                "memory_source": self._memory.source,
                "memory_limit": self._control.memory.ledger.snapshot().limit_bytes,
            },
        )

    def _connect(self, http: str, grpc: str) -> None:
        self._triton.connect(grpc)
        self._triton_grpc = grpc
        self._dataplane.connect(http)
        if (
            self._tracing is None
        ):  # with tracing aiohttp serves each inference, which gets its spans there
            self._heads.host = http
        self._rpc.connect(grpc)

    async def stop(self) -> None:
        """Report not ready, refuse new requests, answer those in flight, close in reverse order."""
        was_started = self._why_not_started() is None
        self._phase = "stopping"
        self._drain.begin()
        if was_started:
            await self._drain.noticed()
        grace_seconds = self._settings.drain_timeout_seconds - self._settings.drain_min_seconds
        end = asyncio.get_running_loop().time() + grace_seconds
        closing = asyncio.gather(self._control.drain(grace_seconds), self._listeners.close())
        await asyncio.wait([closing], timeout=grace_seconds)
        for task in self._background:
            background.end(task)
        await self._memory.close()
        # requests still in flight get their 503 while there are connections to send it on
        await self._dataplane.close()
        if self._embedded is not None:
            left = end - asyncio.get_running_loop().time()
            await self._embedded.stop(_TRITON_SECONDS + min(max(left, 0.0), _TRITON_SECONDS))
        await self._rpc.close()
        await closing
        await self._triton.unload_uploaded()
        await self._triton.close()
        if self._private is not None:
            await REPOSITORY.run(self._private.remove)
        await self._listeners.close_probes()
        if self._tracing is not None:
            await REPOSITORY.run(self._tracing.close)

    def _answers(self) -> int:
        return self._triton.answers + self._metrics.traffic.answers

    def _why_not_started(self) -> str | None:
        return self._phase if self._phase.startswith("starting") else None

    def _why_not_ready(self) -> str | None:
        if self._phase or not self._triton.live:
            return self._phase or "Triton does not answer"
        if self._drain.is_on:
            return "draining"
        return background.why_ended() or self._control.why_stuck()

    def _is_ready(self) -> bool:
        return self._why_not_ready() is None

    async def _triton_came_back(self) -> None:
        if self._control.is_open:
            try:
                await self._control.triton_restarted()
            except AdapterError as error:  # gone again; the next return calls this again
                log.warning("triton.unreachable", extra={"reason": str(error)})

    async def _open_listeners(self) -> None:
        self._metrics.bind(
            metrics_state(self._control, self._memory, self._triton, self._is_ready, self._settings)
        )
        admin = Admin(
            self._control,
            self._metrics,
            why_not_live=background.why_ended,
            why_not_started=self._why_not_started,
            why_not_ready=self._why_not_ready,
            drain=self._drain,
            drain_seconds=self._settings.drain_timeout_seconds,
            about=about(self._settings),
            config=for_programs(self._loaded),
        )
        settings, listeners, services = self._settings, self._listeners, self._services
        await listeners.open_probes("admin", settings.admin, admin.application())
        await listeners.open_http("http", settings.http, self._http)
        make = partial(build_proxy, settings, lambda: self._triton_grpc, metrics=self._metrics)
        make = partial(make, drain=self._drain, inflight=self._inflight)
        everything = services.everything
        await listeners.open_grpc(
            "grpc", settings.grpc, everything.services, partial(make, everything)
        )
        if (
            settings.grpc_data != settings.grpc or settings.grpc.is_any_port
        ):  # else `grpc` serves both
            some, address = services.inference, settings.grpc_data
            await listeners.open_grpc("grpc_data", address, some.services, partial(make, some))

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        is_v2 = path_segments(request.raw_path)[0] == "v2"
        return await (self._v2 if is_v2 else self._sagemaker).handle(request)
