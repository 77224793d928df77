"""Gets a staged model into Triton: watched, bounded, and tried again when memory came back."""

import asyncio
import logging
import time
from collections.abc import Collection

from adapter.control.memory import Memory
from adapter.control.ports import Server, TimeLimits, Triton
from adapter.control.recovery import Recovery
from adapter.control.teardown import Teardown
from adapter.core.guard import LoopGuard
from adapter.core.model import Package, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Estimate
from adapter.errors import (
    AdapterError,
    CapacityError,
    LoadFailed,
    ModelTooLarge,
)
from adapter.metrics import Metrics

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
# Denser at first: a process that dies of its first line lives for a few tenths of a second.
_FIRST_LOOK_SECONDS, _FIRST_SECONDS = 0.1, 3.0


class BringUp:
    def __init__(
        self,
        *,
        triton: Triton,
        server: Server | None,
        teardown: Teardown,
        memory: Memory,
        recovery: Recovery,
        metrics: Metrics,
        limits: TimeLimits,
    ) -> None:
        self._triton = triton
        self._server = server
        self._teardown = teardown
        self._memory = memory
        self._recovery = recovery
        self._metrics = metrics
        self._limits = limits
        self._guard = LoopGuard()

    async def bring_up(self, record: ModelRecord, package: Package, estimate: Estimate) -> None:
        """Return when Triton serves every model of the package.

        A load that ran out of memory is undone and, when memory came back, tried once more
        (memory.md section 7, policy 5), unless Triton is stuck with it. What is raised is the last
        word.
        """
        ended, before = self._memory.ended_unloads, await self._memory.read()
        error = await self._try(record, estimate)
        if isinstance(error, CapacityError) and record.name not in self._teardown.stuck:
            await self._teardown.bring_down(record)
            if await self._recovery.came_back(before, ended):
                self._metrics.load_retries.inc()
                log.info("model.load_retried", extra={"model_id": record.id, "reason": str(error)})
                error = await self._try(record, estimate)
        if error is not None:
            raise self._last_word(error, package) from error.__cause__
        record.used_at = time.monotonic()
        self._guard.succeeded(package.content_key)

    async def _try(self, record: ModelRecord, estimate: Estimate) -> AdapterError | None:
        """The failure as text and memory together show it; None when all went well."""
        begun = time.monotonic()
        try:
            for name in record.placement.load:
                await self._load(record, name)
        except AdapterError as error:
            judged = await self._recovery.judged(
                error, record.id, since=begun, predicted=estimate.needs
            )
            if judged.__cause__ is None:
                judged.__cause__ = error.__cause__
            return judged
        return None

    def _last_word(self, error: AdapterError, package: Package) -> AdapterError:
        """A model that can never fit must not have all others evicted for it, for ever."""
        if not isinstance(error, CapacityError):
            return error
        is_too_large = self._guard.out_of_memory(
            package.content_key,
            alone=self._memory.ledger.snapshot().models <= 1,
            requested_bytes=error.figures.needed_bytes,
            limit_bytes=error.figures.limit_bytes,
        )
        if not is_too_large:
            return error
        return ModelTooLarge(
            f"model {error.model_id!r} ran out of memory again with nothing else loaded; "
            f"other models need not go for it: {error}",
            model_id=error.model_id,
            figures=error.figures,
            matched=error.matched,
            pattern=error.pattern,
        )

    async def _load(self, record: ModelRecord, name: TritonName) -> None:
        """One model. Triton never answers when its python process was killed at the wrong moment
        (memory.md section 6): that is seen here, and the load is given up.
        """
        load = asyncio.ensure_future(self._triton.load(name, record.id))
        watch = _StubWatch({name, *record.placement.along}, self._limits)
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({load}, timeout=_pause(begun)))[0]:
                if self._server is None or (lost := await self._look(watch)) is None:
                    continue
                self._teardown.give_up(record)
                raise LoadFailed(
                    f"the python process of {lost!r} ended while the model was being loaded",
                    model_id=record.id,
                    suspected="python process ended",
                )
            await load
        finally:
            load.cancel()

    async def _look(self, watch: "_StubWatch") -> str | None:
        server = self._server
        assert server is not None  # noqa: S101 - asked only where there is one
        lives = await asyncio.to_thread(
            lambda: {name: server.has_live_stub(TritonName(name)) for name in watch.names}
        )
        return watch.lost(lives, time.monotonic(), may_queue=self._memory.loads > 1)


def _pause(begun: float) -> float:
    is_first = time.monotonic() - begun < _FIRST_SECONDS
    return _FIRST_LOOK_SECONDS if is_first else _LOOK_SECONDS


class _StubWatch:
    """Triton starts a python process twice: to complete the configuration, and to serve. In
    between there is none, for less than a second. Before, while the load waits in Triton's queue.
    """

    def __init__(self, names: Collection[str], limits: TimeLimits) -> None:
        self.names = frozenset(names)
        self._limits = limits
        self._seen: set[str] = set()
        self._lived: dict[str, float] = {}

    def lost(self, lives: dict[str, bool | None], now: float, *, may_queue: bool) -> str | None:
        """The name of a model whose process has been missing for too long. None in `lives` is a
        model without one.
        """
        for name, alive in lives.items():
            if alive:
                self._seen.add(name)
            seen = name in self._seen
            if alive is not False or (may_queue and not seen):
                self._lived[name] = now
            patience = self._limits.stub_gone if seen else self._limits.stub_unseen
            if now - self._lived.setdefault(name, now) > patience:
                return name
        return None
