"""Restarts an embedded Triton in place, to free memory that is lost in it.

What failed loads leak, and unloads keep, goes with the process alone. It is ended between two
loads; from there on all is as after the end of a Triton that died (reconciler.py, desired.py).
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

from adapter.control.desired import DesiredModels
from adapter.control.lease import Leases
from adapter.control.memory import Memory, Paused
from adapter.control.ports import Evictor, Options, Server
from adapter.control.recycling.lost_memory import RECYCLE_FOLLOWS, LostMemory, RecyclePhase
from adapter.control.triton_status import Phase, TritonStatus
from adapter.core.model import ModelId, Package
from adapter.core.registry import ModelRecord, Registry
from adapter.core.residency.terms import Terms
from adapter.core.sizing import Estimate
from adapter.core.state import ModelState
from adapter.errors import BackendUnavailable, InsufficientMemory
from adapter.runtime import clock
from adapter.telemetry.traffic import leave_out

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.02  # while requests end
_LOOK_SECONDS = 0.4  # of them at a time: other housekeeping comes in between
_CLOSED_SECONDS = 1.0  # within which those who wait notice that the adapter stops
_UNREADY = (ModelState.RETURNING, ModelState.LOADING)
_PAUSED = (RecyclePhase.DRAINING, RecyclePhase.RESTARTING)


class NotRecycled(Exception):
    """Raised when a recycle is refused. `is_for_good`: asking again will not help."""

    def __init__(self, reason: str, *, is_for_good: bool = False) -> None:
        super().__init__(reason)
        self.is_for_good = is_for_good


class Recycling:
    """`share`: how much of a device's limit may be unaccounted for; None: Triton is restarted only
    when an operator asks. `step` is to be called regularly.
    """

    def __init__(
        self,
        registry: Registry,
        memory: Memory,
        server: Server | None,
        options: Options,
        triton_status: TritonStatus,
        *,
        leases: Leases,
        desired: DesiredModels,
    ) -> None:
        self.phase, self.is_on = RecyclePhase.OFF, False
        self.restarts = 0
        self._registry = registry
        self._memory = memory
        self._server = server
        self._triton_status = triton_status
        self._leases = leases
        self._desired = desired
        self._limits, self._lost_memory = options.limits, LostMemory(options.recycle_share)
        self._reason = ""
        self._asked: str | None = None  # why, until it begins
        self.deadline = 0.0  # of the requests in flight
        self._unloaded: set[ModelId] = set()  # calls load them again; their records are gone
        self._changed = asyncio.Event()

    # -- what calls and loads ask -----------------------------------------------------------

    def holds(self, model_id: ModelId) -> bool:
        """Return whether calls of the model wait: for Triton, or until it is loaded again."""
        if self.phase is RecyclePhase.OFF or not self._triton_status.is_open:
            return False
        known = self._registry.get(model_id)
        return self.phase in _PAUSED or (known is not None and known.state in _UNREADY)

    def excuses(self, model_id: ModelId) -> bool:
        """Return whether any number of calls may wait for the model: the restart unloaded it."""
        return model_id in self._unloaded or self.holds(model_id)

    async def passed(self, model_id: ModelId, deadline: float | None = None) -> bool:
        """Wait while `holds`, until `deadline` (time.monotonic) or as long as calls wait; return
        whether there was anything to wait for.
        """
        if not self.holds(model_id):
            return False
        leave_out()
        end = clock.monotonic() + self._limits.call if deadline is None else deadline
        await self._until(lambda: not self.holds(model_id), end)
        return True

    async def up(self) -> None:
        """Wait until Triton is neither about to be restarted nor away for it."""
        is_up = lambda: self.phase not in _PAUSED or self.is_closing  # noqa: E731
        await self._until(is_up)

    async def admit(
        self,
        record: ModelRecord,
        package: Package,
        terms: Terms,
        lost: ModelRecord | None,
        evictor: Evictor | None,
    ) -> Estimate:
        """Reserve what the model is expected to take, as Memory does, and again after a restart
        that makes room for it. Wait until all models are back, but no longer than for a load to
        stand alone, as one of them may hang. A model that itself comes back, for `lost`, does not
        wait.
        """
        while True:
            await self.up()
            if lost is None:
                await self._over(self._limits.alone)
            try:
                return await self._memory.admit(record, package, terms, evictor)
            except Paused:
                if self.is_closing:
                    text = "the adapter is stopping"
                    raise BackendUnavailable(text, model_id=record.id, delivered=False) from None
            except InsufficientMemory as error:
                why = None if lost else await self._why_for(error)
                if why is None or not await self._restarted(why, self._limits.alone):
                    raise

    async def _why_for(self, error: InsufficientMemory) -> str | None:
        """Return why Triton is to be restarted for a load that was refused."""
        if self._lost_memory.share is None:
            return None
        await self._audit()
        why = self._lost_memory.why_for(error.figures, self._memory.ledger.snapshot())
        return None if self._unreturnable() else why

    def load_ended(self, model_id: ModelId) -> None:
        self._unloaded.discard(model_id)
        self._tell()

    async def ask(self, reason: str) -> None:
        """Restart Triton, for an operator; return when its models are back. Raises NotRecycled."""
        if self._server is None:
            advice = "restart it where it runs; see docs/memory.md#memory-that-is-lost"
            raise NotRecycled(f"Triton is external: {advice}", is_for_good=True)
        if not self._triton_status.is_open:
            raise NotRecycled("the adapter is starting or stopping")
        if why := self._unreturnable():
            raise NotRecycled(why, is_for_good=True)
        if not await self._restarted(reason, self._limits.drain):
            raise NotRecycled("a load or an unload is under way, or Triton is away; try again")

    # -- how it goes ------------------------------------------------------------------------

    async def step(self) -> None:
        """Take the recycle as far as it can go now."""
        if self.phase is RecyclePhase.OFF:
            self._begin_if_due()
        if self.phase is RecyclePhase.DRAINING:
            await self._drain()
        self.look()
        if self.phase is RecyclePhase.RETURNING and not self._desired.are_returning:
            await self._audit()  # before a load can lose memory again
            self._lost_memory.look(self._memory.ledger.snapshot())
            self._to(RecyclePhase.OFF)

    def look(self) -> None:
        """Begin to return the models if Triton is up again."""
        status = self._triton_status
        if self.phase is RecyclePhase.RESTARTING and status.is_up and not status.is_restarting:
            status.is_recycled = False
            self._to(RecyclePhase.RETURNING)

    def _begin_if_due(self) -> None:
        is_quiet = self._memory.is_audited and not self._memory.is_busy
        book, now = self._memory.ledger.snapshot(), clock.monotonic()
        reason = self._lost_memory.why_now(book, now, is_quiet=is_quiet) or self._asked
        if reason is None or self._memory.is_busy or not self._is_served:
            return
        if why := self._unreturnable():
            self._lost_memory.restarts(book)  # said once
            log.warning("triton.not_recycled", extra={"reason": why})
            return
        self._asked, self._reason, self.deadline = None, reason, now + self._limits.drain
        self._to(RecyclePhase.DRAINING)

    async def _drain(self) -> None:
        """Wait for what is under way, for a moment at a time; then end Triton. It is not ended amid
        a load or an unload, whose caller would be told so.
        """
        until = min(self.deadline, clock.monotonic() + _LOOK_SECONDS)
        while self._in_flight() or self._memory.is_busy:
            if clock.monotonic() >= until:
                break
            await asyncio.sleep(_POLL_SECONDS)
        is_late = clock.monotonic() >= self.deadline
        if not self._is_served or (is_late and self._memory.is_busy):
            self._to(RecyclePhase.OFF)
        elif is_late or not (self._in_flight() or self._memory.is_busy):
            await self._end_triton()

    async def _end_triton(self) -> None:
        assert self._server is not None  # noqa: S101 - else it does not begin
        records, book = self._registry.records(), self._memory.ledger.snapshot()
        self._unloaded = {r.id for r in records if r.is_on_demand and r.state is ModelState.READY}
        self._lost_memory.restarts(book)
        self._memory.readings.changed()  # it was of this Triton
        self._memory.limits.oversize.recycled()
        self.restarts += 1
        self._triton_status.is_restarting = self._triton_status.is_recycled = True
        self._to(RecyclePhase.RESTARTING)
        fields = {"reason": self._reason, "in_flight": self._in_flight()}
        log.warning("triton.recycled", extra=fields)
        await self._server.restart(self._reason)

    def _to(self, phase: RecyclePhase) -> None:
        assert phase in RECYCLE_FOLLOWS[self.phase]  # noqa: S101 - the table of what follows
        self.phase = phase
        self._leases.is_paused = self._memory.is_paused = phase in _PAUSED
        self.is_on = phase is not RecyclePhase.OFF
        self._tell()

    async def _audit(self) -> None:
        if not self._memory.is_audited:
            await self._memory.tick(())

    # -- inside -----------------------------------------------------------------------------

    @property
    def _is_served(self) -> bool:
        status = self._triton_status
        is_served = status.is_open and status.is_up and not status.is_restarting
        return is_served and self._server is not None

    @property
    def is_closing(self) -> bool:
        return self._triton_status.phase is Phase.STOPPING

    def _in_flight(self) -> int:
        """Count the requests whose callers still wait."""
        return sum(max(0, r.usage.in_flight - r.usage.abandoned) for r in self._registry.records())

    def _unreturnable(self) -> str:
        """Return why a restart would lose models; "" if all can come back."""
        lost: Sequence[ModelId] = [
            record.id
            for record in self._registry.records()
            if record.state is ModelState.READY
            and not (record.can_load_again or record.is_on_demand)
        ]
        if not lost:
            return ""
        return f"model {lost[0]!r} came with its files in the call and could not come back"

    async def _restarted(self, reason: str, seconds: float) -> bool:
        """Have Triton restarted; return whether it was, and all models are back. `seconds`: how
        long it may take until nothing is loaded or unloaded.
        """
        before = self.restarts
        if self.phase is RecyclePhase.OFF:
            self._asked = self._asked or reason
            has_begun = lambda: self._asked is None or self.is_closing  # noqa: E731
            await self._until(has_begun, clock.monotonic() + seconds)
            self._asked = None
        await self._over()
        return self.restarts > before

    async def _over(self, seconds: float = math.inf) -> None:
        is_over = lambda: self.phase is RecyclePhase.OFF or self.is_closing  # noqa: E731
        await self._until(is_over, clock.monotonic() + seconds)

    async def _until(self, is_so: Callable[[], bool], deadline: float = math.inf) -> None:
        while not is_so() and (left := deadline - clock.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _CLOSED_SECONDS)):
                    await self._changed.wait()

    def _tell(self) -> None:
        """Wake all waiters, so that they check again."""
        self._changed.set()
        self._changed = asyncio.Event()
