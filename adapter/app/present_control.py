"""Builds adapter/control and adapter/core for an adapter."""

import logging
from collections.abc import Mapping
from typing import Any

from adapter.app.parts import Outside
from adapter.control.models import ModelControl
from adapter.control.ports import NoProcesses, Options, Ports, TimeLimits
from adapter.control.residency import Options as StoreOptions
from adapter.control.residency import Residency
from adapter.control.state import State
from adapter.core.admission import MeshBooks
from adapter.core.artifacts import ArtifactKey
from adapter.core.ledger import Ledger
from adapter.core.model import ModelId, ModelSource
from adapter.core.residency.placement import PLACINGS
from adapter.core.sizing import Sizes
from adapter.errors import AdapterError, InvalidRequest
from adapter.runtime import background
from adapter.settings import Settings
from adapter.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_LOADS_AGAIN = {"auto": None, "forget": False, "reload": True}
_LOADS = 2  # of calls at once, unless load_concurrency says otherwise


class PresentControl:
    """Starts and stops what is behind the door, and opens the door."""

    def __init__(self, models: ModelControl, stores: Residency | None) -> None:
        self.models = models
        self.stores = stores
        self.state = State(models, stores)
        self._tasks: list[Any] = []

    @property
    def mesh(self) -> MeshBooks:
        """Return ModelMesh's books of the loads that it has planned."""
        return self.models.memory.mesh

    def note_missing_outputs(self, record: Any) -> None:
        """Warn once that the model has answered without any of its outputs."""
        self.models.leases.note_missing_outputs(record)

    async def open(self) -> None:
        """Adopt what an earlier run has left, and begin the work that nobody asks for."""
        await self.models.open()
        self._begin("control-watch", self.models.run_housekeeping())
        if self.stores is not None:
            self._begin("residency-watch", self.stores.run_housekeeping())

    def _begin(self, name: str, work: Any) -> None:
        self._tasks.append(background.begin(name, work))

    def want(self, sources: Mapping[ModelId, ModelSource]) -> None:
        """Have these models loaded from now on."""
        self.models.desired.want(sources)

    def key_of(self, name: str) -> ArtifactKey:
        """Return the key that `name` is, ENDPOINT/KEY or KEY. Raises InvalidRequest."""
        if self.stores is None:
            raise InvalidRequest(f"there is no store for {name!r}")
        return self.stores.key_of(name)

    def preload(self, keys: Mapping[ModelId, ArtifactKey]) -> None:
        """Have these models of the stores loaded from now on."""
        if self.stores is not None:
            self.models.desired.preload(keys, self.stores.bring)

    async def note_triton_back(self) -> None:
        """Note that Triton answers again, after it did not."""
        if not self.models.is_open:
            return
        try:
            await self.models.triton_restarted()
        except AdapterError as error:  # gone again; the next return calls this again
            log.warning("triton.unreachable", extra={"reason": str(error)})

    async def drain(self, limit_seconds: float) -> None:
        """Start nothing any more; wait for what is in progress, then end the loads among it."""
        await self.models.drain(limit_seconds)

    async def end_work(self) -> None:
        """End the work that nobody asks for, and the fetches."""
        for task in self._tasks:
            background.end(task)
        if self.stores is not None:
            await self.stores.close()

    async def stop(self) -> None:
        """Wait, for a bounded time, until what `drain` has ended is undone."""
        await self.models.undone()


def build_control(settings: Settings, outside: Outside, metrics: Metrics) -> PresentControl:
    """Build control around what lies outside of it."""
    triton = outside.triton
    embedded = outside.embedded
    sizes = Sizes(settings.size_factor, settings.default_size or 0, lambda: triton.version)
    if outside.sizes is not None:
        sizes.restore(outside.sizes.load())
    models = ModelControl(
        Ports(
            triton,
            outside.packages,
            outside.memory,
            server=embedded,
            sizes=outside.sizes,
            processes=embedded.processes if embedded else NoProcesses(),
        ),
        Ledger(settings.memory_limit, settings.memory_reserve.of, outside.process_limits),
        sizes,
        metrics,
        Options(
            limits=TimeLimits(
                load=settings.load_timeout_seconds,
                unload=settings.unload_timeout_seconds,
                stall=settings.unload_stall_seconds,
                recovery=settings.memory_recovery_seconds,
                warm_up=settings.infer_timeout_seconds if settings.warm_up == "zeros" else None,
            ),
            loads_again=_LOADS_AGAIN[settings.on_triton_restart],
            load_threads=outside.load_threads,
            placing=PLACINGS[settings.gpu_placement],
        ),
    )
    cache = outside.cache
    if cache is None:
        return PresentControl(models, None)
    options = StoreOptions(
        pin=settings.pin,
        idle_unload_seconds=settings.idle_unload_seconds,
        model_wait_seconds=settings.model_wait_seconds,
        load_concurrency=settings.load_concurrency or _LOADS,
        revalidate_seconds=settings.revalidate_seconds,
        eviction=settings.eviction,
        min_residency_seconds=settings.min_residency_seconds,
    )
    stores = Residency(models, cache, metrics, options, stores=cache.stores)
    return PresentControl(models, stores)
