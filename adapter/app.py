"""The composition root: builds every object, starts them in order, stops them in reverse."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from aiohttp import web

from adapter.backend.embedded import EmbeddedTriton
from adapter.backend.memory import HostMemory, NoMemory, host_limit_bytes
from adapter.backend.triton import TritonControl
from adapter.backend.tritonserver import RunFolder
from adapter.control import ModelControl, TimeLimits
from adapter.core.faults import Faults
from adapter.core.ledger import Ledger
from adapter.core.model import ModelId, ModelSource
from adapter.core.oom import Classifier
from adapter.core.registry import Registry
from adapter.core.sizing import Sizes
from adapter.dataplane.http import HttpDataPlane
from adapter.errors import AdapterError
from adapter.examples import examples_folder
from adapter.frontends.admin import Admin
from adapter.frontends.http import HttpEdge, path_segments
from adapter.frontends.sagemaker import SageMaker
from adapter.frontends.v2 import V2Repository
from adapter.metrics import Metrics, State
from adapter.packages.staging import Packages
from adapter.packages.unpacking import Limits
from adapter.packages.uploads import payload
from adapter.settings import Door, Loaded, Settings

log = logging.getLogger(__name__)


class Adapter:
    """One adapter. `start` returns when it is ready for work, `stop` when nothing is left of it.

    `addresses`: where each open door really is, port 0 resolved.
    """

    def __init__(self, settings: Settings) -> None:
        self.addresses: dict[str, str] = {}
        self._settings = settings
        self._phase = "starting: waiting for Triton"
        self._metrics = Metrics()
        faults = Faults(Classifier(settings.oom_patterns))
        self._triton = self._build_triton(faults)
        self._embedded = self._build_embedded() if settings.triton == "embedded" else None
        is_private = settings.staging == "upload" and settings.repository is None
        self._private = RunFolder() if is_private else None
        self._repository = self._choose_repository()
        self._roots = self._model_roots()
        self._control = self._build_control()
        self._dataplane = HttpDataPlane(faults, timeout_seconds=settings.infer_timeout_seconds)
        self._single = ModelId(settings.single_model.name) if settings.single_model else None
        self._sagemaker = SageMaker(
            self._control,
            self._dataplane,
            is_well=lambda: self._why_not_ready() is None,
            max_body_bytes=settings.max_body_bytes,
            max_control_body_bytes=settings.max_control_body_bytes,
            default_model=self._single,
        )
        self._v2 = V2Repository(
            self._control,
            self._triton.versions,
            self._roots,
            max_body_bytes=settings.max_body_bytes,
            max_control_body_bytes=settings.max_control_body_bytes,
        )
        self._runners: list[web.BaseRunner] = []
        self._watch: asyncio.Task[None] | None = None

    def _build_triton(self, faults: Faults) -> TritonControl:
        settings = self._settings
        is_upload = settings.staging == "upload"
        return TritonControl(
            faults,
            load_timeout_seconds=settings.load_timeout_seconds,
            call_timeout_seconds=settings.control_timeout_seconds,
            on_retry=lambda call: self._metrics.retries.labels(call).inc(),
            payload=(lambda name: payload(self._repository / name)) if is_upload else None,
        )

    def _choose_repository(self) -> Path:
        if self._embedded is not None:
            return self._embedded.repository
        if self._private is not None:
            return self._private.path / "repository"
        assert self._settings.repository is not None  # noqa: S101 - settings resolve it
        return self._settings.repository

    def _build_embedded(self) -> EmbeddedTriton:
        settings = self._settings
        return EmbeddedTriton(
            tritonserver=settings.tritonserver,
            repository=settings.repository,
            http=_host_port(settings.triton_http),
            grpc=_host_port(settings.triton_grpc),
            metrics=_host_port(settings.triton_metrics),
            extra_args=settings.triton_args,
            start_timeout_seconds=settings.start_timeout_seconds,
            on_restart=self._triton_came_back,
        )

    def _model_roots(self) -> list[Path]:
        roots = list(self._settings.model_roots)
        if self._settings.examples:
            roots.append(examples_folder())
        if self._settings.single_model:
            roots.append(self._settings.single_model.parent)
        return roots

    def _build_control(self) -> ModelControl:
        settings, embedded = self._settings, self._embedded
        limit = settings.memory_limit
        memory: HostMemory | NoMemory = NoMemory()
        if settings.memory_source == "host" and embedded is not None:
            limit = limit or host_limit_bytes()
            memory = HostMemory(embedded.process_ids, limit)
        headroom = settings.memory_reserve.of(limit) if limit else 0
        control = ModelControl(
            registry=Registry(),
            ledger=Ledger(limit, headroom),
            sizes=Sizes(),
            triton=self._triton,
            packages=Packages(
                self._repository,
                self._roots,
                staging="symlink" if settings.staging == "upload" else settings.staging,
                limits=Limits(max_unpacked_bytes=settings.max_unpacked_bytes),
                backends=embedded.backends if embedded else lambda: None,
            ),
            memory=memory,
            metrics=self._metrics,
            limits=TimeLimits(
                settings.load_timeout_seconds,
                settings.unload_timeout_seconds,
                settings.unload_stall_seconds,
            ),
            processes=embedded,
        )
        self._metrics.watch(
            State(
                models=control.registry.counts,
                ledger=control.ledger.snapshot,
                memory=lambda: memory.last,
                triton_live=lambda: self._triton.live,
            )
        )
        return control

    async def start(self) -> None:
        """Doors first, so that probes and /ping are answered from the beginning."""
        await self._open_doors()
        if self._embedded is not None:
            await self._embedded.start()
            http, grpc = self._embedded.http_address, self._embedded.grpc_address
        else:
            if self._settings.staging == "upload":
                await asyncio.to_thread(RunFolder.sweep)
                await asyncio.to_thread(self._repository.mkdir, parents=True, exist_ok=True)
            http, grpc = str(self._settings.triton_http), str(self._settings.triton_grpc)
        self._triton.connect(grpc)
        self._dataplane.connect(http)
        await self._triton.wait_live(self._settings.start_timeout_seconds)
        self._watch = asyncio.create_task(self._triton.watch(self._triton_came_back))
        await self._control.purge()
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
                "memory_limit": self._control.ledger.limit_bytes,
            },
        )

    async def stop(self) -> None:
        """Answer what is in flight, take nothing new, close in reverse order."""
        self._phase = "stopping"
        await asyncio.gather(
            self._control.drain(self._settings.drain_timeout_seconds),
            *(runner.cleanup() for runner in self._runners),  # each waits for its requests
        )
        if self._watch is not None:
            self._watch.cancel()
        await self._dataplane.close()
        await self._triton.unload_uploaded()
        await self._triton.close()
        if self._embedded is not None:
            await self._embedded.stop()
        if self._private is not None:
            await asyncio.to_thread(self._private.remove)

    def _why_not_started(self) -> str | None:
        return self._phase if self._phase.startswith("starting") else None

    def _why_not_ready(self) -> str | None:
        return self._phase or (None if self._triton.live else "Triton does not answer")

    async def _triton_came_back(self) -> None:
        if self._control.is_open:
            try:
                await self._control.reconcile()
            except AdapterError as error:  # gone again; the next return brings us back here
                log.warning("triton.unreachable", extra={"reason": str(error)})

    async def _open_doors(self) -> None:
        admin = Admin(
            self._control,
            self._metrics,
            why_not_started=self._why_not_started,
            why_not_ready=self._why_not_ready,
            about={"version": version("triton-adapter"), "triton": self._settings.triton},
        )
        edge = HttpEdge(self._route, self._metrics, "sagemaker")
        patience = self._settings.drain_timeout_seconds
        probes = web.AppRunner(admin.application(), access_log=None, shutdown_timeout=patience)
        await self._open("admin", self._settings.admin, probes)
        calls = web.ServerRunner(edge.server(), shutdown_timeout=patience)
        await self._open("http", self._settings.http, calls)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        is_v2 = path_segments(request)[0] == "v2"
        return await (self._v2 if is_v2 else self._sagemaker).handle(request)

    async def _open(self, name: str, door: Door, runner: web.BaseRunner) -> None:
        if door.kind == "off":
            return
        await runner.setup()
        self._runners.append(runner)
        if door.kind == "unix":
            await web.UnixSite(runner, door.path).start()
            address = str(door)
        else:
            await web.TCPSite(runner, door.host, door.port).start()
            address = str(Door("tcp", door.host, runner.addresses[0][1]))
        self.addresses[name] = address
        log.info("adapter.listening", extra={"door": name, "address": address})


async def serve(loaded: Loaded, on_started: Callable[[Adapter], None] | None = None) -> int:
    """Run until SIGTERM or SIGINT. 0 when drained, 1 when it could not start."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    adapter: Adapter | None = None
    stopping = asyncio.create_task(asked.wait())
    try:
        adapter = Adapter(loaded.settings)
        starting = asyncio.create_task(adapter.start())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        else:
            starting.result()
            if on_started is not None:
                on_started(adapter)
        await stopping
    except (AdapterError, OSError) as error:
        log.error("adapter.failed", extra={"reason": str(error)})  # noqa: TRY400 - no bug
        sys.stderr.write(f"triton-adapter: {error}\n")
        return 1
    finally:
        stopping.cancel()
        log.info("adapter.stopping")
        if adapter is not None:
            await adapter.stop()
        log.info("adapter.stopped")
    return 0


def _host_port(door: Door) -> tuple[str, int]:
    return door.host, door.port
