"""Builds every part of an adapter once, in the order of need. Nothing below reads Settings."""

import asyncio
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from grpc import GenericRpcHandler

from adapter.app.listeners import Rest, Rpc, Shared, access_at, build_rest, headers_to_triton
from adapter.app.readiness import Readiness, StoreHealth
from adapter.control.desired import Desired
from adapter.control.eviction import Eviction
from adapter.control.leases import AtWork, Leases
from adapter.control.loader import Loader, LoadSlots, StoreFiles
from adapter.control.memory import Memory
from adapter.control.models import Models
from adapter.control.on_demand import OnDemand
from adapter.control.operations import Journal, Operations
from adapter.control.ports import (
    MemorySettings,
    NoProcesses,
    SizeStore,
    StoreSettings,
    TimeLimits,
    World,
)
from adapter.control.ports import Settings as ControlSettings
from adapter.control.readings import Readings
from adapter.control.state import State, StoreState
from adapter.control.triton import (
    LoadTurns,
    RequestFailures,
    TritonStatus,
    TritonWatcher,
)
from adapter.control.unloader import Unloader
from adapter.control.updates import Updates
from adapter.core import times, versions
from adapter.core.artifacts import ArtifactKey
from adapter.core.blame import Blame
from adapter.core.forgotten import ForgottenModels
from adapter.core.ledger import Ledger
from adapter.core.mesh_books import MeshBooks
from adapter.core.model import ModelId
from adapter.core.oom import Classifier
from adapter.core.record import OnExit, Step
from adapter.core.registry import Registry
from adapter.core.sizes import Sizes
from adapter.core.triton_errors import Faults
from adapter.core.triton_input import HTTP_KEY_HEADER
from adapter.core.victims import Cost
from adapter.core.wanted import Wanted
from adapter.errors import AdapterError, InvalidRequest
from adapter.frontends.access import Access
from adapter.frontends.admin.actions import ModelActions
from adapter.frontends.admin.models import Resident
from adapter.frontends.admin.pages import Admin, Probes
from adapter.frontends.admin.state import DebugState
from adapter.frontends.admin.store_models import ModelListing
from adapter.frontends.drain import Drain
from adapter.frontends.grpc.calls import MessageLimits
from adapter.frontends.http.server import bearable_connections
from adapter.frontends.listeners import Listeners
from adapter.frontends.repository import Repository
from adapter.frontends.unready import UnreadyConnections
from adapter.packages.sizes_file import FILE_NAME, LearnedFile
from adapter.packages.staging import Packages
from adapter.packages.unpack import Limits
from adapter.packages.uploads import payload
from adapter.runtime import background, clock
from adapter.runtime.byte_budget import ByteBudget
from adapter.runtime.clock import Changes
from adapter.runtime.turns import Turns
from adapter.runtime.unread import Unread
from adapter.settings import Loaded, Settings, for_programs, secret_variables
from adapter.store.cache import ArtifactCache
from adapter.store.cache_folder import CacheFolder
from adapter.store.stores import open_store
from adapter.telemetry.gauges import ModelCollector, ScrapedState
from adapter.telemetry.log import LogStream
from adapter.telemetry.metrics import Metrics, about
from adapter.telemetry.tracing import Tracing
from adapter.triton.client import TritonControl
from adapter.triton.grpc import GrpcDataPlane
from adapter.triton.http import HttpDataPlane
from adapter.triton.memory.host import host_limit_bytes
from adapter.triton.memory.nvml import MPS_VARIABLE, NvmlMemory, mps_limits
from adapter.triton.memory.sources import ChosenMemory, build_memory
from adapter.triton.server.launch import RunFolder
from adapter.triton.server.server import EmbeddedTriton

# How long an embedded Triton may take to stop after a drain that took all its time; up to twice as
# long after a shorter one. SIGKILL comes 30 s after SIGTERM, and a drain takes 18 s at most.
TRITON_STOP_SECONDS = 4.0
# For the 503 answers to requests that are still in flight at the end of a drain.
_ANSWER_SECONDS = 1.0
# An unload waits for requests in flight for half of this. SageMaker gives up after 360 s; a load
# may take 10 s more by default, so that an unload that a load waits for is over before it.
UNLOAD_SECONDS = 340.0
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
_LOADS = 2  # of calls at once, unless load_concurrency says otherwise
# Answers of a stream that Triton keeps for its caller; without a bound it keeps all of them.
_RESPONSES = 64
_SHARE_IN_FLIGHT = 4
# Answers of streams that wait for their callers: twice the largest one, by default.
_UNREAD_BYTES = 2**27
# What a page in a browser could otherwise send to an embedded Triton's HTTP port.
_RESTRICTED_API = "--http-restricted-api"
_RESTRICTED = "model-repository,shared-memory,trace,logging"
_ON_EXIT = {"auto": None, "forget": OnExit.FORGET, "reload": OnExit.RELOAD}
_ASKS_NO_STORE = (
    "; set on_demand to load models of a store by name; see docs/v2.md#models-of-a-store"
)
_STORE_LACKS_IT = ", and the store has no such key"


@dataclass(slots=True, eq=False)
class Housekeeping:
    """Polls memory, books loads by late readings, and saves package sizes for the next run."""

    readings: Readings
    loader: Loader
    ledger: Ledger
    sizes: SizeStore | None
    _saved: object = field(init=False)

    def __post_init__(self) -> None:
        self._saved = self.ledger.sizes.as_dict()

    async def run(self) -> NoReturn:
        """Do all of this periodically, and never return."""
        await background.forever(
            self.readings.poll,
            self.loader.book_late,
            self.save,
            seconds=times.PAUSE_SECONDS / 4,
            expected=AdapterError,
        )

    async def save(self) -> None:
        """Save the sizes of packages, if they have changed."""
        data = self.ledger.sizes.as_dict()
        if self.sizes is not None and data != self._saved:
            await self.sizes.save(data)
            self._saved = data


@dataclass(slots=True, eq=False)
class Control:
    """Holds the parts that frontends, probes and pages ask, and runs those that work by
    themselves.
    """

    registry: Registry
    ledger: Ledger
    operations: Operations
    leases: Leases
    memory: Memory
    readings: Readings
    slots: LoadSlots
    mesh: MeshBooks
    models: Models
    on_demand: OnDemand | None  # None without a store
    eviction: Eviction
    updates: Updates | None
    desired: Desired
    watcher: TritonWatcher
    status: TritonStatus
    housekeeping: Housekeeping
    state: State
    changes: Changes
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def open(self) -> None:
        """Adopt what an earlier run has left, and begin the work that nobody asks for."""
        await self.watcher.open()
        works = {
            "housekeeping": self.housekeeping.run(),
            "watcher": self.watcher.run(),
            "eviction": self.eviction.run(),
            "desired": self.desired.run(),
        }
        if self.updates is not None:
            works["updates"] = self.updates.run()
        self._tasks = [background.begin(name, work) for name, work in works.items()]

    def key_of(self, name: str) -> ArtifactKey:
        """Return the key that `name` is, ENDPOINT/KEY or KEY. Raises InvalidRequest."""
        if self.on_demand is None:
            raise InvalidRequest(f"there is no store for {name!r}")
        return self.on_demand.key_of(name)

    async def drain(self, limit_seconds: float) -> None:
        """Start nothing any more; wait for what is in progress, then end the loads among it."""
        self.close()
        await self.operations.drain(limit_seconds)
        self.operations.end_all_loads()
        with suppress(AdapterError):  # a disk error must not keep the adapter from stopping
            await self.housekeeping.save()

    def close(self) -> None:
        """Accept no more operations."""
        self.desired.close()
        if self.updates is not None:
            self.updates.close()
        self.models.close()

    async def end_work(self) -> None:
        """End the work that nobody asks for."""
        for task in self._tasks:
            background.end(task)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def stop(self) -> None:
        """Wait, for a bounded time, until what `drain` has ended is undone; end all tasks."""
        await self.operations.drain(times.UNDO_SECONDS)
        await self.end_work()


@dataclass(frozen=True, slots=True)
class Parts:
    """Holds what an adapter starts, asks for its state, and stops."""

    metrics: Metrics
    tracing: Tracing | None
    cache: ArtifactCache | None  # of the stores; None without one
    embedded: EmbeddedTriton | None  # None if Triton runs in another container
    upload_folder: RunFolder | None  # with the repository of uploads; None if Triton shares a disk
    repository: Path
    triton: TritonControl
    triton_http: HttpDataPlane
    triton_grpc: GrpcDataPlane
    http_key: str  # of the restricted calls at an embedded Triton's HTTP port
    memory: ChosenMemory
    control: Control
    drain: Drain
    readiness: Readiness
    unready: UnreadyConnections
    single_model: ModelId | None  # served at /invocations
    listeners: Listeners
    probes: Probes
    admin: Admin
    rest: Sequence[Rest]
    rpc: Rpc
    services: Mapping[str, Sequence[GenericRpcHandler]]  # of each gRPC listener


def build_parts(loaded: Loaded, tracing: Tracing | None) -> Parts:
    """Build all parts of an adapter by its settings. Nothing is started or opened.

    Raises InvalidSettings for a store that cannot be one here.
    """
    settings = loaded.settings
    metrics = Metrics(tracing.trace_id if tracing else None)
    metrics.load_timeout.set(settings.load_timeout_seconds)

    # where files and models are
    cache = _build_cache(settings, metrics)
    http_key = secrets.token_hex(16)
    embedded = _build_embedded(settings, metrics, http_key)
    upload_folder = _build_upload_folder(settings)
    repository = _choose_repository(settings, embedded, upload_folder)
    sizes_file = LearnedFile(settings.repository / FILE_NAME) if settings.repository else None

    # Triton, and what is read of it
    faults = Faults(Classifier(settings.oom_patterns), str(repository))
    roots = [*settings.all_roots, *([cache.root] if cache else [])]
    triton = _build_triton(settings, faults, repository, metrics, roots=roots, tracing=tracing)
    memory = build_memory(settings.memory_source, embedded, str(settings.triton_metrics))

    # control
    world = World(
        triton=triton,
        packages=_build_packages(settings, embedded, repository, cache),
        memory=memory,
        server=embedded,
        processes=embedded.processes if embedded else NoProcesses(),
        sizes=sizes_file,
        artifacts=cache,
    )
    control_settings = _read_control_settings(
        settings,
        store_names=cache.stores if cache else (),
        load_threads=embedded.load_threads if embedded else _LOAD_THREADS,
        process_limits=mps_limits(os.environ.get(MPS_VARIABLE, "")),
    )
    sizes = _restore_sizes(settings, sizes_file)
    control = build_control(world, metrics, control_settings, sizes)
    models = control.models
    state = control.state
    registry = models.registry

    # readiness and shutdown
    drain = Drain(models, state, metrics.traffic, settings.drain_min_seconds)
    readiness = Readiness(
        triton=triton,
        state=state,
        drain=drain,
        stores=StoreHealth(cache, registry) if cache else None,
    )
    unready = UnreadyConnections(readiness.is_ready)

    # limits that all callers share
    limits = MessageLimits.within(settings.max_body_bytes)
    budget = _build_budget(settings, metrics)
    turns = Turns()
    unread = Unread(budget, min(budget.share, _UNREAD_BYTES), metrics.streams_cut.inc)
    max_connections = bearable_connections(
        http_listeners=1 + settings.has_http_data,
        grpc_listeners=(settings.grpc.kind != "off") + settings.has_grpc_data,
    )

    # inferences in Triton
    triton_http = HttpDataPlane(
        faults,
        timeout_seconds=settings.infer_timeout_seconds,
        # as many as there may be callers over HTTP
        max_connections=max_connections * (1 + settings.has_http_data),
        unread=unread,
        turns=turns,
        max_unpacked_bytes=settings.gathered_bytes,
        answered_nothing=control.leases.note_missing_outputs,
        headers=headers_to_triton(settings, "http"),
    )
    triton_grpc = GrpcDataPlane(
        faults,
        timeout_seconds=settings.infer_timeout_seconds,
        max_message_bytes=limits.stream,
        unread=unread,
        takes_cancels=lambda: versions.survives_cancels(triton.version),
        metadata=headers_to_triton(settings, "grpc"),
    )

    # listeners
    single = settings.single_model
    single_model = ModelId(single.folder.name) if single else None
    listing = ModelListing(
        registry,
        state,
        metrics.history,
        cache.packages if cache else None,
        is_by_name=settings.on_demand,
    )
    shared = Shared(
        settings=settings,
        metrics=metrics,
        tracing=tracing,
        models=models,
        state=state,
        stores=control.on_demand,
        mesh_books=control.mesh,
        drain=drain,
        unready=unready,
        budget=budget,
        turns=turns,
        rpc=triton_grpc,
        faults=faults,
        is_ready=readiness.is_ready,
        max_connections=max_connections,
        single_model=single_model,
        unload_seconds=UNLOAD_SECONDS,
        listing=listing,
    )
    v2_repository = _build_v2_repository(settings, triton, control, cache)
    rpc = Rpc(shared, triton, limits)
    probes = Probes(
        state,
        metrics,
        why_not_live=background.find_ended_task,
        why_not_started=readiness.explain_not_started,
        why_not_ready=readiness.explain_not_ready,
        notes=readiness.notes,
    )
    debug_state = DebugState(
        models,
        state,
        metrics.history,
        about=about(settings.triton),
        health=readiness.describe,
    )
    admin = Admin(
        debug_state,
        Resident(registry, state),
        listing,
        models,
        actions=ModelActions(models, state.triton, v2_repository, triton_http, control.on_demand),
        access=Access("admin", token=settings.token_at(settings.admin)),
        model_access=access_at(settings, "admin", settings.admin),
        drain=drain,
        drain_seconds=settings.drain_timeout_seconds,
        config=for_programs(loaded),
    )
    metrics.bind(
        _build_scraped_state(settings, control, memory, triton, readiness),
        ModelCollector(registry, state.held),
    )
    return Parts(
        metrics=metrics,
        tracing=tracing,
        cache=cache,
        embedded=embedded,
        upload_folder=upload_folder,
        repository=repository,
        triton=triton,
        triton_http=triton_http,
        triton_grpc=triton_grpc,
        http_key=http_key if embedded else "",
        memory=memory,
        control=control,
        drain=drain,
        readiness=readiness,
        unready=unready,
        single_model=single_model,
        listeners=Listeners(_compute_grace_seconds(settings), limits.stream),
        probes=probes,
        admin=admin,
        rest=build_rest(shared, triton_http, v2_repository),
        rpc=rpc,
        services=rpc.services(v2_repository),
    )


# -- stores -------------------------------------------------------------------------------------


def _build_cache(settings: Settings, metrics: Metrics) -> ArtifactCache | None:
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
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = ArtifactCache(
        stores,
        CacheFolder(settings.cache_dir or Path(base, "triton-adapter")),
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


# -- Triton -------------------------------------------------------------------------------------


def _build_embedded(settings: Settings, metrics: Metrics, http_key: str) -> EmbeddedTriton | None:
    """Build the Triton of this adapter; return None if Triton runs in another container."""
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
        on_exit=lambda reason: metrics.history.triton_ended(f"Triton has ended: {reason}"),
        withheld=secret_variables(settings.endpoint_keys),
        newer_args=_list_newer_args(settings, http_key),
        has_gpus=_has_gpus,
    )


async def _has_gpus() -> bool:
    """Return whether the driver shows a GPU."""
    nvml = NvmlMemory(tuple)
    await nvml.read()
    return bool(nvml.has_gpus)


def _list_newer_args(settings: Settings, http_key: str) -> dict[str, str]:
    """Return options that only newer Tritons know: those that lift limits of theirs
    (docs/triton.md, Versions), and the one that takes loads and the like from the adapter alone.
    """
    input_bytes = min(max(settings.max_body_bytes, _INPUT_BYTES), 2**31 - 1)
    options = {
        "--http-max-input-size": str(input_bytes),
        "--grpc-max-response-pool-size": str(_RESPONSES),
    }
    if "shared_memory" in settings.passthrough:
        options["--allow-client-shm"] = "true"
    # two options that name the same API end Triton: the operator's own is used alone
    if not any(argument.startswith(_RESTRICTED_API) for argument in settings.triton_args):
        options[_RESTRICTED_API] = f"{_RESTRICTED}:{HTTP_KEY_HEADER}={http_key}"
    return options


def _build_upload_folder(settings: Settings) -> RunFolder | None:
    """Make the folder of packages to be uploaded; return None if `repository` names one."""
    is_needed = settings.staging == "upload" and settings.repository is None
    return RunFolder() if is_needed else None


def _choose_repository(
    settings: Settings, embedded: EmbeddedTriton | None, upload_folder: RunFolder | None
) -> Path:
    """Return the folder in which packages are placed for Triton."""
    if embedded is not None:
        return embedded.repository
    if upload_folder is not None:
        return upload_folder.path / "repository"
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
    """Build what makes control calls to Triton. `roots` may hold the files of an upload."""
    real_roots = [os.path.realpath(root) for root in roots]
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
        payload=(lambda name: payload(repository / name, real_roots)) if is_upload else None,
        tracing=tracing,
    )


def _build_packages(
    settings: Settings,
    embedded: EmbeddedTriton | None,
    repository: Path,
    cache: ArtifactCache | None,
) -> Packages:
    """Build what inspects packages and places them in the repository."""
    return Packages(
        repository,
        settings.all_roots,
        staging="symlink" if settings.staging == "upload" else settings.staging,
        backends=embedded.backends if embedded else lambda: None,
        cache=cache.root if cache else None,
    )


# -- control ------------------------------------------------------------------------------------


def _restore_sizes(settings: Settings, file: LearnedFile | None) -> Sizes:
    """Return the sizes that an earlier run has learned; none without a lasting repository."""
    sizes = Sizes(settings.size_factor)
    if file is not None:
        sizes.restore(file.load())
    return sizes


def _read_control_settings(
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
            warm_up=settings.infer_timeout_seconds if settings.warm_up == "zeros" else None,
            model_wait=settings.model_wait_seconds,
        ),
        memory=MemorySettings(
            limit_bytes=settings.memory_limit,
            headroom_of=settings.memory_reserve.compute_bytes,
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


# -- callers and operators ----------------------------------------------------------------------


def _build_budget(settings: Settings, metrics: Metrics) -> ByteBudget:
    """Build the budget of callers' bytes, by default a quarter of the memory of this process."""
    budget = ByteBudget(
        settings.max_inflight_body_bytes or host_limit_bytes() // _SHARE_IN_FLIGHT,
        on_cut=lambda reason: metrics.bodies_cut.labels(reason.value).inc(),
    )
    metrics.body_bytes.set_function(lambda: budget.held)
    return budget


def _build_v2_repository(
    settings: Settings,
    triton: TritonControl,
    control: Control,
    cache: ArtifactCache | None,
) -> Repository:
    """Build V2's model repository. Its errors say whether a store was asked for the model."""
    hint = ""
    if control.on_demand is not None:
        hint = _STORE_LACKS_IT if settings.on_demand else _ASKS_NO_STORE
    return Repository(
        control.models,
        triton.versions,
        settings.all_roots,
        takes_files=settings.inline_files == "on",
        stores=control.on_demand if settings.on_demand else None,
        catalogue=cache.packages if cache and settings.on_demand else None,
        hint=hint,
    )


def _build_scraped_state(
    settings: Settings,
    control: Control,
    memory: ChosenMemory,
    triton: TritonControl,
    readiness: Readiness,
) -> ScrapedState:
    """Return what metrics read at a scrape."""
    registry = control.models.registry
    state = control.state
    return ScrapedState(
        models=registry.counts,
        devices=lambda: state.devices(memory.last),
        gpu_unread=lambda: memory.is_gpu_unread,
        triton_live=lambda: triton.live,
        ready=readiness.is_ready,
        abandoned=lambda: state.requests.abandoned,
        lost_lines=lambda: LogStream.lost,
        wanted=state.count_wanted,
        idle_seconds=lambda: registry.longest_idle_seconds(clock.monotonic()),
        about=about(settings.triton),
    )


def _compute_grace_seconds(settings: Settings) -> float:
    """Return how long requests in flight may take when the listeners close."""
    drain_seconds = settings.drain_timeout_seconds - settings.drain_min_seconds
    triton_seconds = TRITON_STOP_SECONDS if settings.triton == "embedded" else 0.0
    return drain_seconds + triton_seconds + _ANSWER_SECONDS


def build_control(
    world: World, metrics: Metrics, settings: ControlSettings, sizes: Sizes
) -> Control:
    """Build all parts of control around the ports."""
    # state
    registry = Registry(clock.now)
    wanted = Wanted()
    forgotten = ForgottenModels(clock.wall)
    registry.subscribe(forgotten.note_move)
    blame = Blame(clock.monotonic())
    ledger = Ledger({}, sizes)
    mesh = MeshBooks()

    # coordination
    changes = Changes()
    operations = Operations()
    journal = Journal(metrics, operations)
    at_work = AtWork()
    leases = Leases(
        at_work=at_work,
        changes=changes,
        history=metrics.history,
    )
    status = TritonStatus(
        triton=world.triton,
        server=world.server,
        changes=changes,
        on_exit_setting=settings.on_exit,
    )
    turns = LoadTurns(
        blame=blame,
        registry=registry,
        status=status,
        changes=changes,
    )
    slots = LoadSlots(settings.load_threads, leases)
    call_slots = LoadSlots(settings.stores.load_concurrency, leases, Step.TURN)
    files = StoreFiles(world.artifacts)

    # memory
    readings = Readings(
        reader=world.memory,
        ledger=ledger,
        settings=settings.memory,
        metrics=metrics,
    )
    memory = Memory(
        registry=registry,
        ledger=ledger,
        readings=readings,
        changes=changes,
        mesh=mesh,
        metrics=metrics,
        settings=settings.memory,
    )

    # loads and unloads of one model
    unloader = Unloader(
        registry=registry,
        leases=leases,
        at_work=at_work,
        memory=memory,
        readings=readings,
        journal=journal,
        triton=world.triton,
        server=world.server,
        processes=world.processes,
        limits=settings.limits,
    )
    eviction = Eviction(
        registry=registry,
        operations=operations,
        leases=leases,
        memory=memory,
        unloader=unloader,
        policy=Cost(),
        settings=settings.stores,
    )
    loader = Loader(
        registry=registry,
        wanted=wanted,
        memory=memory,
        eviction=eviction,
        unloader=unloader,
        turns=turns,
        slots=slots,
        call_slots=call_slots,
        at_work=at_work,
        leases=leases,
        status=status,
        journal=journal,
        changes=changes,
        triton=world.triton,
        packages=world.packages,
        processes=world.processes,
        files=files,
        limits=settings.limits,
    )

    # Triton's lives
    watcher = TritonWatcher(
        registry=registry,
        wanted=wanted,
        blame=blame,
        at_work=at_work,
        turns=turns,
        status=status,
        operations=operations,
        memory=memory,
        readings=readings,
        unloader=unloader,
        journal=journal,
        changes=changes,
        triton=world.triton,
        packages=world.packages,
        server=world.server,
        processes=world.processes,
        load_threads=settings.load_threads,
    )
    leases.failures = RequestFailures(
        registry=registry,
        memory=memory,
        status=status,
        watcher=watcher,
        journal=journal,
        changes=changes,
        processes=world.processes,
    )

    # operations on all models
    models = Models(
        registry=registry,
        wanted=wanted,
        forgotten=forgotten,
        blame=blame,
        operations=operations,
        leases=leases,
        loader=loader,
        unloader=unloader,
        status=status,
        watcher=watcher,
        packages=world.packages,
        files=files,
        limits=settings.limits,
    )
    on_demand: OnDemand | None = None
    updates: Updates | None = None
    if world.artifacts is not None:
        on_demand = OnDemand(
            registry=registry,
            leases=leases,
            models=models,
            eviction=eviction,
            status=status,
            artifacts=world.artifacts,
            metrics=metrics,
            settings=settings.stores,
            limits=settings.limits,
        )
        updates = Updates(
            registry=registry,
            models=models,
            artifacts=world.artifacts,
            interval_seconds=settings.stores.revalidate_seconds,
        )
        metrics.endpoint_loaded.set_function(eviction.count_loaded_for_calls)
        metrics.endpoint_waiting.set_function(lambda: leases.waiting)
    desired = Desired(
        registry=registry,
        wanted=wanted,
        forgotten=forgotten,
        blame=blame,
        status=status,
        operations=operations,
        changes=changes,
        models=models,
        on_demand=on_demand,
        slots=asyncio.Semaphore(2 * settings.load_threads),  # as many as LoadSlots lets in
    )
    housekeeping = Housekeeping(
        readings=readings,
        loader=loader,
        ledger=ledger,
        sizes=world.sizes,
    )
    store_state: StoreState | None = None
    if world.artifacts is not None:
        store_state = StoreState(
            registry=registry,
            leases=leases,
            eviction=eviction,
            operations=operations,
            journal=journal,
            artifacts=world.artifacts,
        )
    state = State(
        registry=registry,
        ledger=ledger,
        memory=memory,
        readings=readings,
        operations=operations,
        leases=leases,
        slots=slots,
        desired=desired,
        watcher=watcher,
        triton=status,
        forgotten_models=forgotten,
        stores=store_state,
    )
    return Control(
        registry=registry,
        ledger=ledger,
        operations=operations,
        leases=leases,
        memory=memory,
        readings=readings,
        slots=slots,
        mesh=mesh,
        models=models,
        on_demand=on_demand,
        eviction=eviction,
        updates=updates,
        desired=desired,
        watcher=watcher,
        status=status,
        housekeeping=housekeeping,
        state=state,
        changes=changes,
    )
