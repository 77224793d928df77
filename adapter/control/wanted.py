"""Loads the models that are wanted from the start on, out of the model roots or the stores, and
loads them again when Triton has lost them in a restart.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NoReturn

from adapter.control.models import ModelControl
from adapter.control.triton_status import MODELS_LOOKED_FOR
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, ModelSource
from adapter.core.residency.wanted import Want, WantedModel, WantEvent
from adapter.core.state import ModelState
from adapter.errors import (
    AdapterError,
    AlreadyLoaded,
    ArtifactNotFound,
    GivenUp,
    InvalidModel,
    InvalidRequest,
    LoadFailed,
    ModelNotReady,
    ModelTooLarge,
)
from adapter.runtime import clock

log = logging.getLogger(__name__)

_AT_ONCE = 4  # as many loads as Triton runs by default
_MOST_PAUSE_SECONDS = 60.0
_SHOWN = 3
# Of a model in a store: nothing but another version fixes it.
_DEFINITE = (ArtifactNotFound, InvalidModel, InvalidRequest, LoadFailed, ModelTooLarge)

Bring = Callable[[ModelId, ArtifactKey], Awaitable[object]]


@dataclass(slots=True)
class _Task:
    """`load` loads the model, or waits for a load under way. `is_asked`: it is to be loaded where
    it is not. `refused_by`: the errors after which it is not tried again.
    """

    model: WantedModel
    load: Callable[[], Awaitable[object]]
    refused_by: tuple[type[AdapterError], ...] = ()
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)


class WantedModels:
    """The models to load. `ready_when`: is the adapter ready when they are loaded, or when it
    has started? `pause_seconds`: between a load that failed and the next try; doubled up to a
    minute.
    """

    def __init__(
        self,
        control: ModelControl,
        *,
        ready_when: Literal["started", "models"],
        pause_seconds: float = 2.0,
    ) -> None:
        self._tasks: list[_Task] = []
        self._control, self._wants = control, control.wants
        self._is_awaited = ready_when == "models"
        self._pause = pause_seconds
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def want(self, sources: Mapping[ModelId, ModelSource]) -> None:
        """Say which models there should be, before `run`."""
        for model_id, source in sources.items():
            load = partial(self._load, model_id, source)
            self._add(_Task(WantedModel(model_id, source.url), load))

    def preload(self, keys: Mapping[ModelId, ArtifactKey], bring: Bring) -> None:
        """Say which models of the stores there should be, before `run`."""
        for model_id, key in keys.items():
            load = partial(bring, model_id, key)
            self._add(_Task(WantedModel(model_id, str(key)), load, _DEFINITE))

    def _add(self, task: _Task) -> None:
        self._tasks.append(task)
        self._wants.add(task.model)
        task.is_asked.set()

    @property
    def models(self) -> list[WantedModel]:
        return self._wants.models()

    def count(self) -> dict[str, int]:
        """Return how many of the models are loaded, missing, and unloaded by a caller."""
        return self._wants.count(self._is_ready)

    def _is_ready(self, model_id: ModelId) -> bool:
        record = self._control.registry.get(model_id)
        return record is not None and record.state is ModelState.READY

    def why_missing(self) -> str | None:
        """Return which models have to be loaded before the adapter is ready; None when none."""
        wanted = self._wants.wanted()
        if not self._is_awaited or not wanted:
            return None
        missing = [each for each in wanted if not each.is_settled]
        if not missing:
            is_up = self._control.triton_status.is_up
            return None if is_up else MODELS_LOOKED_FOR
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        named = ", ".join(map(str, missing[:_SHOWN]))
        return f"{len(missing)} of {len(wanted)} models are to be loaded: {named}{more}"

    def refused(self) -> list[str]:
        """Return what is not loaded, and not tried again, and why."""
        return [str(each) for each in self.models if each.state is Want.REFUSED]

    def doubt(self) -> None:
        """Take none for loaded: Triton was restarted."""
        self._wants.triton_restarted()

    def begin_again(self) -> None:
        """Load what there is not, once the registry knows what Triton has lost."""
        for each in self._tasks:
            each.is_asked.set()

    async def run(self) -> NoReturn:
        await asyncio.gather(*map(self._keep, self._tasks))
        while True:  # nothing is wanted
            await asyncio.Event().wait()

    async def _keep(self, task: _Task) -> NoReturn:
        while True:
            await task.is_asked.wait()
            task.is_asked.clear()
            await self._load_until_there(task)
            wanted = self._wants.wanted()
            if wanted and all(each.state is Want.LOADED for each in wanted):
                log.info("adapter.models_loaded", extra={"models": len(wanted)})

    async def _load_until_there(self, task: _Task) -> None:
        pause = self._pause
        while not task.model.is_settled:
            async with self._turns:
                if task.model.is_settled:  # since the turn was asked for
                    return
                event = await self._try(task)
            if event is WantEvent.DELAYED:
                pause = self._pause
            if not task.model.is_settled:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE_SECONDS)

    async def _try(self, task: _Task) -> WantEvent:
        """Load the model once; return how that ended."""
        event, reason = WantEvent.LOADED, ""
        returns, model_id = self._control.recovery, task.model.model_id
        try:
            # a suspect of ending Triton leaves its place to others until it has its turn
            await returns.turn(model_id, clock.monotonic(), refused_seconds=math.inf)
            await task.load()
        except GivenUp as error:
            event, reason = WantEvent.REFUSED, str(error)
        except task.refused_by as error:
            event, reason = WantEvent.REFUSED, str(error)
        except ModelNotReady as error:  # it is to come back: look again soon
            event, reason = WantEvent.DELAYED, str(error)
        except AdapterError as error:
            event, reason = WantEvent.FAILED, str(error)
        except Exception as error:  # noqa: BLE001 - a bug, which its operation has logged
            event, reason = WantEvent.FAILED, repr(error)
        # what was asked to be unloaded amid the load is unloaded after it
        is_news = task.model.state is not Want.UNLOADED and task.model.apply(event, reason)
        if is_news and event is WantEvent.REFUSED:
            fields = {"model_id": task.model.model_id, "reason": reason}
            log.error("adapter.preload_refused", extra=fields)
        return event

    async def _load(self, model_id: ModelId, source: ModelSource) -> None:
        try:
            await self._control.load(model_id, source)
        except AlreadyLoaded:  # by a caller, by an earlier run, or it is coming back
            await self._control.loaded(model_id)
