"""Load what should be loaded and is not: models of the settings, and those that Triton lost.

One loop for each model, with one back-off. What a failure means is `core/wanted.py`'s; what may
have made Triton exit waits for its turn in the load itself.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from adapter.control.models import LoadRequest, Models
from adapter.control.on_demand import OnDemand
from adapter.control.operations import Kind, Operation, Operations
from adapter.control.triton import TritonStatus
from adapter.core import times
from adapter.core.artifacts import ArtifactKey
from adapter.core.blame import Blame
from adapter.core.forgotten import ForgottenModels
from adapter.core.model import ModelId, ModelSource
from adapter.core.record import LoadedFor, ModelRecord, OnExit
from adapter.core.registry import Registry
from adapter.core.wanted import Wanted, WantedModel, WantedReason, WantedState
from adapter.errors import GivenUp
from adapter.runtime import clock
from adapter.runtime.clock import Changes

log = logging.getLogger(__name__)

_MAX_NAMED = 3  # models in a text


@dataclass(slots=True, eq=False)
class Desired:
    """Keeps a loop for each model that should be loaded and is not."""

    registry: Registry
    wanted: Wanted
    forgotten: ForgottenModels
    blame: Blame
    status: TritonStatus
    operations: Operations
    changes: Changes
    models: Models
    on_demand: OnDemand | None
    slots: asyncio.Semaphore  # bounds the loads that nobody waits for
    _loops: dict[ModelId, asyncio.Task[None]] = field(default_factory=dict)

    def want(self, sources: Mapping[ModelId, ModelSource]) -> None:
        """Have these models loaded from now on, whatever becomes of Triton."""
        for model_id, source in sources.items():
            self.wanted.want(model_id, source, WantedReason.LOAD_AT_START)
        self.changes.notify()

    def preload(self, keys: Mapping[ModelId, ArtifactKey]) -> None:
        """Have these models of the stores loaded from now on."""
        for model_id, key in keys.items():
            self.wanted.want(model_id, key, WantedReason.PRELOAD)
        self.changes.notify()

    async def run(self) -> NoReturn:
        """Have one loop for each model that is missing."""
        try:
            while True:
                if self.status.is_open and self.status.is_up:
                    self._start_missing()
                await self.changes.wait(times.POLL_SECONDS)
        finally:
            self.close()

    def _start_missing(self) -> None:
        """Start a loop for each missing model that has none. A model that is READY already, such as
        an adopted one, is noted as loaded instead.
        """
        missing: list[WantedModel] = []
        for model in self.wanted.missing():
            if self.registry.find_ready(model.model_id) is None:
                missing.append(model)
            else:
                self.wanted.note_loaded(model.model_id)
        for model in sorted(missing, key=self._rank):
            if model.model_id not in self._loops:
                self._start(model)

    def close(self) -> None:
        """Start no more loads: cancel the loops."""
        for task in self._loops.values():
            task.cancel()

    def _rank(self, model: WantedModel) -> tuple[bool, float]:
        """Return the place of a model in the order of loads: suspects of making Triton exit come
        last, and of the models that Triton lost the most recently used first.
        """
        record = self.registry.get(model.model_id)
        is_suspect = model.model_id in self.blame.suspects
        used_at = record.usage.used_at if record is not None else 0.0
        return is_suspect, -used_at

    def _start(self, model: WantedModel) -> None:
        task = asyncio.create_task(self._load_until_final(model))
        self._loops[model.model_id] = task
        task.add_done_callback(partial(self._forget, model))

    def _forget(self, model: WantedModel, task: asyncio.Task[None]) -> None:
        self._loops.pop(model.model_id, None)
        self.changes.notify()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("task.failed", exc_info=error, extra={"task": "desired"})

    # -- the loop ---------------------------------------------------------------------------

    async def _load_until_final(self, model: WantedModel) -> None:
        """Load the model, and try again after each failure that is not final."""
        while self._is_missing(model):
            try:
                is_loaded = await self._load(model)
            except GivenUp as error:
                await self._wait_for_pardon(model, error)
                continue
            except Exception as error:  # noqa: BLE001 - its operation has logged a bug
                pause_seconds = self.wanted.note_failure(model, error)
                if pause_seconds is None:
                    self._report_final_failure(model, error)
                    return
                if self.wanted.get(model.model_id) is model:
                    await asyncio.sleep(pause_seconds)
                continue
            if is_loaded:
                self.wanted.note_loaded(model.model_id)
                self._log_if_all_loaded(model)

    def _is_missing(self, model: WantedModel) -> bool:
        is_wanted = self.wanted.get(model.model_id) is model
        return is_wanted and model.state is WantedState.MISSING

    async def _load(self, model: WantedModel) -> bool:
        """Load the model once Triton is up and a slot is free; return whether it was loaded.

        A model that is wanted no more is not loaded. Nor is one that is being updated: the update
        is waited for, and its failure does not count as a failure of the wanted model.
        """
        await self.status.wait_until_up()
        update = self._find_update(model)
        if update is not None:
            await update.wait()
            return False
        async with self.slots:
            if self._find_update(model) is not None or not self._is_missing(model):
                return False
            await self._load_now(model)
            return True

    def _find_update(self, model: WantedModel) -> Operation[ModelRecord] | None:
        """Return the update of the model that is queued or in progress; None without one."""
        operation = self.operations.load_of(model.model_id)
        is_update = operation is not None and operation.kind is Kind.REPLACE
        return operation if is_update else None

    async def _load_now(self, model: WantedModel) -> None:
        """Load the model; a model of a store that Triton lost then stays until its unload."""
        if isinstance(model.source, ArtifactKey):
            if self.on_demand is not None:
                await self.on_demand.load_without_deadline(model.model_id, model.source)
            if model.reason is WantedReason.LOST:  # a platform had asked for the model's load
                self.models.keep_loaded(model.model_id)
            return
        request = LoadRequest(model.source, LoadedFor.PLATFORM, on_exit=OnExit.RELOAD)
        operation = self.models.start_load(model.model_id, request)
        await operation.outcome()

    def _report_final_failure(self, model: WantedModel, error: Exception) -> None:
        """Log that the model is not tried again; list it for operators if Triton had lost it. Do
        nothing for a model that is merely not wanted any more.
        """
        if model.state is not WantedState.REFUSED:
            return
        fields = {"model_id": model.model_id, "reason": str(error)}
        if model.reason is WantedReason.LOST:
            log.error("model.return_given_up", extra=fields)
            self.forgotten.add(model.model_id, str(error))
        else:
            log.error("adapter.preload_refused", extra=fields)

    async def _wait_for_pardon(self, model: WantedModel, error: GivenUp) -> None:
        """Wait until a model that made Triton exit may be tried again."""
        model.failure = str(error)
        log.warning(
            "model.return_given_up", extra={"model_id": model.model_id, "reason": str(error)}
        )
        self.forgotten.add(model.model_id, str(error), is_given_up=True)
        while self._is_missing(model):
            if self.blame.find_given_up(model.model_id, clock.monotonic()) is None:
                return
            await self.changes.wait(times.PAUSE_SECONDS)

    # -- what operators see -----------------------------------------------------------------

    def list_from_start(self) -> list[WantedModel]:
        """Return the models that settings want from the start on."""
        models = self.wanted.models()
        return [model for model in models if model.reason is not WantedReason.LOST]

    def _log_if_all_loaded(self, model: WantedModel) -> None:
        wanted = self.list_from_start()
        states = {desired.state for desired in wanted}
        if model in wanted and states == {WantedState.LOADED}:
            log.info("adapter.models_loaded", extra={"models": len(wanted)})

    def explain_missing(self) -> str | None:
        """Return which models of the settings have yet to be loaded; None when none."""
        wanted = self.list_from_start()
        missing = [model for model in wanted if model.state is WantedState.MISSING]
        if not missing:
            return None
        unnamed = len(missing) - _MAX_NAMED
        names = ", ".join(map(_describe, missing[:_MAX_NAMED]))
        more = f" and {unnamed} more" if unnamed > 0 else ""
        return f"{len(missing)} of {len(wanted)} models are to be loaded: {names}{more}"

    def list_refused(self) -> list[str]:
        """Return which models of the settings are not tried again, and why."""
        refused = [m for m in self.list_from_start() if m.state is WantedState.REFUSED]
        return list(map(_describe, refused))


def _describe(model: WantedModel) -> str:
    return f"{model.model_id!r} ({model.failure or 'waiting'})"
