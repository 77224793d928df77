"""Leases keep a model loaded for as long as Triton works on an inference of it."""

import asyncio
import logging
from collections.abc import Callable
from enum import IntEnum, auto
from types import TracebackType
from typing import Protocol

from adapter.core.registry import ModelRecord
from adapter.core.residency.usage import Usage
from adapter.errors import AdapterError, InferenceFailed
from adapter.runtime import clock
from adapter.telemetry.history import History

log = logging.getLogger(__name__)

# An unload that waits for requests longer than this is logged.
_SILENT_SECONDS = 2.0


class LeaseState(IntEnum):
    NEW = auto()
    HELD = auto()
    ABANDONED = auto()  # the caller has gone or timed out, and Triton still works on the request
    ENDED = auto()


# A lease holds the int: to look a member of an enumeration up takes Python 3.11 long.
_NEW, _HELD, _ABANDONED, _ENDED = map(int, LeaseState)


class Failures(Protocol):
    """Handles the failures of inferences."""

    def note_failure(self, record: ModelRecord, error: BaseException) -> BaseException:
        """Handle the error of a request; return the error for its caller."""

    async def judge(self, record: ModelRecord, error: AdapterError) -> AdapterError:
        """Return the error to send for an inference that failed with `error`."""


class Leases:
    """Creates leases, and counts and drains them."""

    def __init__(self, history: History) -> None:
        self.abandoned = 0  # now, also of models that are gone
        self.begun = self.ended = 0  # leases, ever
        self.failures: Failures  # set by whoever builds control, as it needs the leases itself
        self._history = history
        self.became_idle = asyncio.Event()  # set when a model has no lease any more
        self._drained: dict[ModelRecord, asyncio.Event] = {}  # of unloads that wait for leases
        # empty but for slow callers: each end of a lease asks
        self.arriving: dict[ModelRecord, dict[Lease, Callable[[], None]]] = {}

    def of(self, record: ModelRecord) -> "Lease":
        """Return a new lease of a model that is loaded."""
        lease = Lease()
        lease.record = record
        lease._usage = record.usage  # noqa: SLF001
        lease.state = _NEW
        lease._leases = self  # noqa: SLF001
        return lease

    def counts(self) -> tuple[int, int]:
        """Return how many have begun, and how many of them have ended."""
        return self.begun, self.ended

    def lose(self, record: ModelRecord) -> None:
        """End the leases of a model that Triton has unloaded and whose processes have ended: its
        requests can never be answered. Their connections stay open (docs/design/triton.md).
        """
        usage = record.usage
        count, usage.lost, usage.in_flight = usage.in_flight, usage.in_flight, 0
        if not count:
            return
        self.ended += count
        log.warning("model.requests_lost", extra={"model_id": record.id, "requests": count})
        self.was_last(record)

    async def drained(self, record: ModelRecord, seconds: float) -> bool:
        """Wait until no lease of this model is left, for `seconds` at most; False if some are.

        Requests that have not arrived completely are refused and not waited for.
        """
        for refuse in list(self.arriving.get(record, {}).values()):
            refuse()
        if record.usage.in_flight == 0:
            return True
        event = self._drained[record] = asyncio.Event()
        silent = min(_SILENT_SECONDS, seconds)
        try:
            if not await _is_set(event, silent):
                _tell(record, seconds - silent)
                return await _is_set(event, seconds - silent)
        finally:
            del self._drained[record]
        return True

    def arrives(self, lease: "Lease", refuse: Callable[[], None]) -> None:
        self.arriving.setdefault(lease.record, {})[lease] = refuse
        if lease.record in self._drained:
            refuse()

    def has_ended(self, lease: "Lease") -> None:
        if (arriving := self.arriving.get(lease.record)) is not None:
            arriving.pop(lease, None)
            if not arriving:
                del self.arriving[lease.record]

    def note_missing_outputs(self, record: ModelRecord) -> None:
        """Warn once of a model that has answered without any of its outputs."""
        names = ", ".join(map(repr, record.outputs))
        which = f"its output{'s' * (len(record.outputs) > 1)} {names}" if names else "an output"
        text = f"the model answered without {which}; does its code name the output otherwise?"
        if text not in record.warnings:
            record.warnings = (*record.warnings, text)
            fields = {"model_id": record.asked_for, "reason": text}
            log.warning("model.outputs_missing", extra=fields)
            self._history.failed("infer", record.asked_for, InferenceFailed(text))

    def was_last(self, record: ModelRecord) -> None:
        """Note that the last lease of this model has ended; there may be others later."""
        self.became_idle.set()
        if (event := self._drained.get(record)) is not None:
            event.set()


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _tell(record: ModelRecord, seconds: float) -> None:
    counts = {"in_flight": record.usage.in_flight, "abandoned": record.usage.abandoned}
    fields = {"model_id": record.id, **counts, "seconds": round(seconds, 3)}
    log.info("model.unload_waits", extra=fields)


class Lease:
    """Keeps one model loaded between `begin` and `end`, or for a `with` block.

    A caller who leaves does not end the lease, since Triton goes on: after `abandon` the `with`
    block may be left, and only `end` ends the lease.

    A class with __enter__ costs a sixth of a @contextmanager, and this is on the hot path.
    """

    __slots__ = ("_begun", "_leases", "_usage", "record", "state")

    # set by Leases.of: a call of __init__ takes as long as all the rest of it
    record: ModelRecord
    state: int
    _usage: Usage
    _begun: float
    _leases: Leases

    def is_lost(self) -> bool:
        """Return whether it can never be answered, and does not hold the model any more."""
        return self._usage.lost > 0 and self.state in (_HELD, _ABANDONED)

    def is_held(self) -> bool:
        return self.state == _HELD

    def begin(self, now: float | None = None) -> None:
        """Begin the lease, once, and before anything is awaited: an unload may run meanwhile.
        `now`: time.monotonic, where the caller has just read it.
        """
        usage = self._usage
        self.state = _HELD
        self._leases.begun += 1
        usage.in_flight += 1
        usage.served += 1
        self._begun = usage.used_at = clock.monotonic() if now is None else now
        if usage.in_flight == 1:
            usage.busy_since = usage.used_at

    def arrives(self, refuse: Callable[[], None]) -> None:
        """Mark the lease as waiting for its caller, to send the request or to take the answer.

        `refuse` is called when the model is unloaded meanwhile, at once if an unload waits already;
        it must do nothing if the lease no longer waits. A later call replaces `refuse`.
        """
        if self.state != _ENDED:
            self._leases.arrives(self, refuse)

    def abandon(self) -> None:
        """Note that nobody waits for the answer any more. A no-op unless the lease is held."""
        if self.state == _HELD:
            self.state = _ABANDONED
            self._usage.abandoned += 1
            self._leases.abandoned += 1

    def end(
        self, error: BaseException | None = None, now: float | None = None
    ) -> BaseException | None:
        """End the lease: Triton is done with the request. Returns the error for the caller, if the
        request failed with `error`. A no-op if the lease has ended already. `now`: as in `begin`.
        """
        usage, leases = self._usage, self._leases
        if self.state != _HELD:
            if self.state != _ABANDONED:
                return error
            usage.abandoned -= 1
            leases.abandoned -= 1
        self.state = _ENDED
        if leases.arriving:
            leases.has_ended(self)
        if usage.lost:  # all leases of the model were ended by `lose`
            usage.lost -= 1
            return error
        leases.ended += 1
        usage.in_flight -= 1
        if usage.in_flight == 0:
            leases.was_last(self.record)
        if error is None:
            usage.answered_at = clock.monotonic() if now is None else now
            usage.latencies.append(usage.answered_at - self._begun)
            return None
        return leases.failures.note_failure(self.record, error)

    def note_failure(self, error: BaseException) -> BaseException:
        """Report a failure as `end` does, of a request whose stream goes on."""
        return self._leases.failures.note_failure(self.record, error)

    async def judge(self, error: AdapterError) -> AdapterError:
        """Return the error to send for an inference that failed with `error`."""
        return await self._leases.failures.judge(self.record, error)

    def note_missing_outputs(self) -> None:
        """Warn once that the model has answered without any of its outputs."""
        self._leases.note_missing_outputs(self.record)

    def __enter__(self) -> ModelRecord:
        self.begin()
        return self.record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.state == _HELD:
            answer = self.end(error)
            if answer is not None and answer is not error:
                raise answer
