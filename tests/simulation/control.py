"""Builds the control that is played.

This is the only module of the simulation that knows what is behind the door
(adapter/control/door.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapter.app import parts
from adapter.control.ports import (
    MemorySettings,
    NoProcesses,
    StoreSettings,
    TimeLimits,
    World,
)
from adapter.control.ports import Settings as ControlSettings
from adapter.core.model import ModelSource
from adapter.core.record import LoadedFor, ModelRecord, OnExit
from adapter.core.sizes import Sizes
from adapter.core.states import ModelState
from adapter.runtime import background
from adapter.telemetry.metrics import Metrics
from tests.simulation.catalog import Terms
from tests.simulation.models import SIZE_FACTOR
from tests.simulation.plan import Settings
from tests.simulation.triton import LOAD_THREADS

_DRAIN_SECONDS = 5.0
_WARM_UP_SECONDS = 60.0
_STATES = {ModelState.PREPARING: "COMING"}
_ON_EXIT = {
    None: None,
    False: OnExit.FORGET,
    True: OnExit.RELOAD,
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
    """Shows one model as control has it."""

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


class Control:
    """Starts and stops adapter/control, and opens its door."""

    def __init__(self, machine: Machine, settings: Settings, terms: Terms | None) -> None:
        sizes = Sizes(SIZE_FACTOR)
        sizes.restore(machine.disk.sizes)
        world = World(
            machine.triton,
            machine.disk,
            machine.memory,
            server=machine.server,
            processes=machine.processes or NoProcesses(),
            sizes=machine.disk,
            artifacts=machine.artifacts,
        )
        self._control = parts.build_control(
            world, Metrics(), _read_settings(settings, terms), sizes
        )
        self.models = self._control.models
        self.state = self._control.state
        self.stores = self._control.on_demand

    async def open(self) -> None:
        """Take over what an earlier run has left in Triton, and begin the housekeeping."""
        await self._control.open()

    def end(self) -> None:
        """End the housekeeping: the adapter is gone."""
        for task in self._control._tasks:
            background.end(task)

    async def stop(self) -> None:
        """End all operations, as at the exit of the adapter."""
        await self._control.drain(_DRAIN_SECONDS)
        await self._control.end_work()
        await self._control.stop()

    def known_models(self) -> list[KnownModel]:
        """Return all models: also those that come from a store, and those that are stuck."""
        return [_show(self._control, record) for record in self._control.registry.records()]


def _read_settings(settings: Settings, terms: Terms | None) -> ControlSettings:
    """Return the settings of control, in its own words."""
    limits = TimeLimits(
        load=settings.load_seconds,
        unload=settings.unload_seconds,
        warm_up=_WARM_UP_SECONDS if settings.warms_up else None,
    )
    stores = StoreSettings()
    if terms is not None:
        limits = TimeLimits(
            limits.load,
            limits.unload,
            warm_up=limits.warm_up,
            model_wait=terms.model_wait_seconds,
        )
        stores = StoreSettings(
            pin=terms.pin,
            idle_unload_seconds=terms.idle_unload_seconds,
            revalidate_seconds=terms.revalidate_seconds,
            max_waiting=terms.most_waiting[0],
            max_waiting_for_one=terms.most_waiting[1],
        )
    memory = MemorySettings(
        limit_bytes=settings.memory_limit,
        headroom_of=lambda _: settings.reserve,
        places_gpus=True,
    )
    return ControlSettings(
        limits,
        memory,
        stores,
        _ON_EXIT[settings.loads_again],
        LOAD_THREADS,
    )


def _show(control: parts.Control, record: ModelRecord) -> KnownModel:
    is_stuck = record.state is ModelState.STUCK
    is_other = not is_stuck and control.registry.get(record.id) is not record
    operation = control.operations.load_of(record.id)
    is_due = operation is not None and operation.record is not record
    return KnownModel(
        id=f"{record.id}#{record.name}" if is_other else str(record.id),
        name=str(record.name),
        names=tuple(map(str, record.placement.names)),
        state=_STATES.get(record.state, record.state.value),
        requests=record.usage.in_flight,
        source=record.source,
        is_for_calls=record.loaded_for is LoadedFor.CALLS,
        is_update=is_other or is_due,
        folder=Path(record.files.folder) if record.files else None,
        record=record,
    )
