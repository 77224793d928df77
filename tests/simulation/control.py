"""Builds the control that is played. Another one is played by passing another builder.

This is the only module of the simulation that knows what is behind the door
(adapter/control/door.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from adapter.control.residency import Options as StoreOptions
from adapter.control.residency import Residency
from adapter.core.residency.placement import PLACINGS

from adapter.control.door import ControlState, Models, StoreModels
from adapter.control.models import ModelControl
from adapter.control.ports import NoProcesses, Options, Ports, TimeLimits
from adapter.control.state import State
from adapter.core.admission import MeshBooks
from adapter.core.ledger import Ledger
from adapter.core.model import ModelSource
from adapter.core.record import ModelRecord
from adapter.core.sizes import Sizes
from adapter.core.states import ModelState
from adapter.core.waiting import WaitLimits
from adapter.runtime import background
from adapter.telemetry.metrics import Metrics
from tests.simulation.catalog import Terms
from tests.simulation.models import SIZE_FACTOR
from tests.simulation.plan import Settings
from tests.simulation.triton import LOAD_THREADS

_DRAIN_SECONDS = 5.0
_STATES = {
    ModelState.FETCHING: "COMING",
    ModelState.ON_DISK: "COMING",
    ModelState.LOST: "LOST",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Holds the ports of one adapter, as adapter/control/ports.py declares them."""

    triton: Any
    disk: Any  # packages, and the sizes that are known from one run to the next
    memory: Any
    server: Any | None  # None for an external Triton
    processes: Any | None  # of models; None for an external Triton
    artifacts: Any | None  # None without a store


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Shows one model as control has it, in words that each control has."""

    id: str
    name: str  # in Triton
    names: tuple[str, ...]  # in Triton, of all models of the package
    state: str  # READY, DEAD, STUCK or LOST; COMING, LOADING or UNLOADING
    requests: int  # in flight, also those whose callers have left
    source: ModelSource
    is_for_calls: bool  # a call needed it, and it may be evicted
    is_update: bool  # the other one of two versions, or one whose update is due
    folder: Path | None  # of its files in the disk cache
    record: Any  # as the door has it


class Control(Protocol):
    """Starts and stops what is behind the door, and opens the door."""

    models: Models
    state: ControlState
    stores: StoreModels | None  # None without a store
    mesh_books: MeshBooks
    unkept: Mapping[str, str]  # rules of the oracle, and what this control does instead

    async def open(self) -> None:
        """Take over what an earlier run has left in Triton."""

    def start(self) -> None:
        """Start the housekeeping."""

    def end(self) -> None:
        """End the housekeeping: the adapter is gone."""

    async def triton_restarted(self) -> None:
        """Note that Triton has exited, and is there again."""

    async def stop(self) -> None:
        """End all operations, as at the exit of the adapter."""

    def known_models(self) -> list[KnownModel]:
        """Return all models: also those that come from a store, and those that are stuck."""


Build: TypeAlias = Callable[[Machine, Settings, Terms | None], Control]


class PresentControl:
    """Plays adapter/control."""

    unkept: ClassVar[Mapping[str, str]] = {
        "2 blame": "models are suspected that were not at work when Triton exited",
        "5 refused return": "a lost model is given up when it is refused beside others that return",
        "3 freed late": "memory that is freed late, at the start, counts as that of Triton itself",
        "4 kept": "a model that a platform loads amid an eviction that fails goes with it",
        "2 freeing load": "a load that is to free a dead model, and whose process dies too, hangs",
        "2 early empty": "what an earlier run left may count as of an empty Triton for seconds",
        "2 too large": "growth, and what was measured beside others, count as the need of a load",
    }

    def __init__(self, machine: Machine, settings: Settings, terms: Terms | None) -> None:
        metrics = Metrics()
        sizes = Sizes(SIZE_FACTOR, 0)
        sizes.restore(machine.disk.sizes)
        limits = TimeLimits(
            load=settings.load_seconds,
            unload=settings.unload_seconds,
            warm_up=60.0 if settings.warms_up else None,
        )
        self.models = control = ModelControl(
            Ports(
                machine.triton,
                machine.disk,
                machine.memory,
                machine.server,
                sizes=machine.disk,
                processes=machine.processes or NoProcesses(),
            ),
            Ledger(settings.memory_limit, lambda _: settings.reserve),
            sizes,
            metrics,
            Options(
                limits=limits,
                loads_again=settings.loads_again,
                load_threads=LOAD_THREADS,
                placing=PLACINGS["most_free"],  # where there are several GPUs
            ),
        )
        self.stores: Residency | None = None
        if terms is not None:
            options = StoreOptions(
                pin=terms.pin,
                idle_unload_seconds=terms.idle_unload_seconds,
                model_wait_seconds=terms.model_wait_seconds,
                load_concurrency=terms.load_concurrency,
                revalidate_seconds=terms.revalidate_seconds,
                limits=WaitLimits(*terms.most_waiting),
                eviction=terms.eviction,
            )
            self.stores = Residency(control, machine.artifacts, metrics, options)
        self.state = State(control, self.stores)
        self.mesh_books = control.memory.mesh
        self._watches: list[Any] = []

    async def open(self) -> None:
        await self.models.open()

    def start(self) -> None:
        work = self.models.run_housekeeping()
        self._watches.append(background.begin("control-watch", work))
        if self.stores is not None:
            work = self.stores.run_housekeeping()
            self._watches.append(background.begin("residency-watch", work))

    def end(self) -> None:
        for watch in self._watches:
            background.end(watch)

    async def triton_restarted(self) -> None:
        await self.models.triton_restarted()

    async def stop(self) -> None:
        await self.models.drain(_DRAIN_SECONDS)
        if self.stores is not None:
            await self.stores.close()
        await self.models.undone()

    def known_models(self) -> list[KnownModel]:
        registry = self.models.registry
        others = (*registry.coming.values(), *registry.stuck.values())
        return [_show(record) for record in (*registry.records(), *others)]


def _show(record: ModelRecord) -> KnownModel:
    files = record.files
    artifact = files.artifact if files else None
    return KnownModel(
        id=str(record.id),
        name=str(record.name),
        names=tuple(map(str, record.placement.names)),
        state=_STATES.get(record.state, record.state.value),
        requests=record.usage.in_flight + record.usage.abandoned,
        source=record.source,
        is_for_calls=record.is_on_demand,
        is_update=record.id != record.asked_for or (files is not None and files.is_outdated),
        folder=artifact.folder if artifact else None,
        record=record,
    )
