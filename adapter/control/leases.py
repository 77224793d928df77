"""Lease models for requests: a lease keeps a model loaded while Triton works on its request."""

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, TypeGuard
from weakref import WeakValueDictionary

from adapter.core.blame import Work
from adapter.core.model import ModelId
from adapter.core.record import ModelRecord, Usage
from adapter.errors import AdapterError, BackendUnavailable, InferenceFailed, Overloaded
from adapter.runtime import clock
from adapter.runtime.clock import Changes
from adapter.telemetry.history import History

log = logging.getLogger(__name__)

# An unload that waits longer for requests is logged.
_SILENT_SECONDS = 2.0
# From the first closed connection of a process to its end: it frees gigabytes of GPU memory.
_EXIT_SECONDS = 10.0


def is_exit(error: BaseException | None) -> TypeGuard[BackendUnavailable]:
    """Return whether Triton broke the call off: it has exited, or cannot be reached."""
    return isinstance(error, BackendUnavailable) and not isinstance(error, Overloaded)


class AtWork:
    """Records which models the present life of Triton works on, for `core/blame.py`."""

    def __init__(self) -> None:
        self.busy_since: dict[ModelRecord, float] = {}  # models with inferences in flight
        self._busy_seconds: defaultdict[ModelRecord, float] = defaultdict(
            float
        )  # of the inferences that have ended
        self._loading_since: dict[ModelRecord, float] = {}
        self._broken_off: dict[ModelRecord, tuple[float, Work]] = {}  # when, and what
        self._life_started_at = -math.inf

    def start_life(self) -> None:
        """Forget what an earlier Triton worked on; inferences in flight count from now on."""
        self._busy_seconds.clear()
        self._broken_off.clear()
        self._life_started_at = clock.monotonic()
        self.busy_since = dict.fromkeys(self.busy_since, self._life_started_at)

    def end_requests(self, record: ModelRecord, now: float) -> None:
        """Record that the last inference in flight has ended."""
        since = self.busy_since.pop(record, now)
        self._busy_seconds[record] += now - since

    def break_off_request(self, record: ModelRecord, started_at: float, now: float) -> None:
        """Record a request that an exit of Triton has broken off."""
        if started_at < self._life_started_at:
            return  # an exit before this life broke it off
        self._broken_off[record] = (now, Work(self._count_busy_seconds(record, now)))

    def start_load(self, record: ModelRecord, now: float) -> None:
        """Record that Triton was asked to load a model."""
        self._loading_since[record] = now

    def end_load(self, record: ModelRecord) -> None:
        """Record that Triton has ended the load, well or not."""
        self._loading_since.pop(record, None)

    def break_off_load(self, record: ModelRecord, now: float) -> None:
        """Record a load that an exit of Triton has broken off."""
        since = self._loading_since.pop(record, now)
        if since < self._life_started_at:
            return
        self._broken_off[record] = (now, Work(now - since, is_load=True))

    def collect(self, now: float) -> dict[ModelId, Work]:
        """Return what Triton was working on when it exited, just before `now`: of each model its
        load or its inferences. Of a model that had both, another version was being loaded, and the
        load counts.
        """
        works = {
            record: work
            for record, (ended_at, work) in self._broken_off.items()
            if now - ended_at < _EXIT_SECONDS
        }
        for record in self.busy_since:
            works.setdefault(record, Work(self._count_busy_seconds(record, now)))
        for record, since in self._loading_since.items():
            works[record] = Work(now - since, is_load=True)
        by_id: dict[ModelId, Work] = {}
        for record, work in works.items():
            if work.is_load or record.id not in by_id:
                by_id[record.id] = work
        return by_id

    def _count_busy_seconds(self, record: ModelRecord, now: float) -> float:
        since = self.busy_since.get(record, now)
        return self._busy_seconds[record] + now - since

    def forget(self, record: ModelRecord) -> None:
        """Forget a model that has left Triton."""
        self._busy_seconds.pop(record, None)
        self._broken_off.pop(record, None)


class FailureReader(Protocol):
    """Learns from requests that failed, and finds the error for their callers."""

    def note_failure(self, record: ModelRecord, error: BaseException) -> BaseException:
        """Handle the error of a request; return the one for its caller."""

    async def judge(self, record: ModelRecord, error: AdapterError) -> AdapterError:
        """Return the error to send for an inference that failed with `error`."""


# The states of a lease: ints, since to look up a member of an enumeration is slow in Python 3.11.
_NEW = 1
_HELD = 2
_ABANDONED = 3  # the caller has gone or timed out, and Triton still works on the request
_ENDED = 4


class Lease:
    """Keeps one model loaded between `begin` and `end`, or for a `with` block.

    A caller who leaves does not end the lease, since Triton still computes: after `abandon` the
    `with` block may be left, and only `end` ends the lease.
    """

    __slots__ = ("_leases", "_started_at", "_usage", "is_inference", "record", "state")

    # set by Leases.make: a call of __init__ takes as long as all the rest of it
    record: ModelRecord
    state: int
    # False, set before `begin`, for a request for metadata or the like: the model computes nothing
    # for it, so it counts neither as a use of the model nor as work that may make Triton exit
    is_inference: bool
    _usage: Usage
    _started_at: float
    _leases: "Leases"

    def is_held(self) -> bool:
        """Return whether the request has begun, and its caller still waits."""
        return self.state == _HELD

    def is_lost(self) -> bool:
        """Return whether the request can never be answered, as its processes have ended."""
        return self._usage.unanswerable > 0 and self.state in (_HELD, _ABANDONED)

    def begin(self, now: float | None = None) -> None:
        """Begin the lease, once, and before anything is awaited: an unload may run meanwhile.

        `now` is time.monotonic, if the caller has just read it.
        """
        usage = self._usage
        leases = self._leases
        self.state = _HELD
        leases.started += 1
        usage.in_flight += 1
        if not self.is_inference:
            return
        usage.inferring += 1
        usage.served += 1
        usage.used_at = clock.monotonic() if now is None else now
        self._started_at = usage.used_at
        if usage.inferring == 1:
            leases.at_work.busy_since[self.record] = usage.used_at

    def on_unload(self, refuse: Callable[[], None]) -> None:
        """Have `refuse` called if the model is unloaded while the lease waits for its caller, who
        still sends the request or takes the answer.

        It is called at once if an unload waits already. It must do nothing if the lease no longer
        waits for its caller. A later call of this method replaces it.
        """
        if self.state == _HELD:
            self._leases.add_refusal(self, refuse)

    def abandon(self) -> None:
        """Mark the lease as abandoned: nobody waits for the answer any more. An unload then does
        not refuse the request, as the caller may be at its next one. Harmless unless the lease is
        held.
        """
        if self.state == _HELD:
            leases = self._leases
            self.state = _ABANDONED
            self._usage.abandoned += 1
            leases.abandoned += 1
            if leases.refusals:
                leases.remove_refusal(self)

    def end(
        self, error: BaseException | None = None, now: float | None = None
    ) -> BaseException | None:
        """End the lease: Triton is done with the request. Return the error for the caller, if the
        request failed with `error`. Harmless if the lease has ended already.
        """
        usage = self._usage
        leases = self._leases
        if self.state != _HELD:
            if self.state != _ABANDONED:
                return error
            usage.abandoned -= 1
            leases.abandoned -= 1
        self.state = _ENDED
        if leases.refusals:
            leases.remove_refusal(self)
        if usage.unanswerable:  # `Leases.lose` has ended all leases of the model
            usage.unanswerable -= 1
            return error
        leases.ended += 1
        usage.in_flight -= 1
        if self.is_inference:
            self._end_inference(error, clock.monotonic() if now is None else now)
        if usage.in_flight == 0:
            leases.note_idle(self.record)
        return None if error is None else self.note_failure(error)

    def _end_inference(self, error: BaseException | None, now: float) -> None:
        usage = self._usage
        at_work = self._leases.at_work
        usage.inferring -= 1
        if error is None:
            usage.answered_at = now
            usage.latencies.append(now - self._started_at)
        elif is_exit(error) and error.delivered:
            at_work.break_off_request(self.record, self._started_at, now)
        if usage.inferring == 0:
            at_work.end_requests(self.record, now)

    def note_failure(self, error: BaseException) -> BaseException:
        """Report a failure as `end` does, of a request whose stream has not ended."""
        failures = self._leases.failures
        return error if failures is None else failures.note_failure(self.record, error)

    async def judge(self, error: AdapterError) -> AdapterError:
        """Return the error to send for an inference that failed with `error`."""
        failures = self._leases.failures
        return error if failures is None else await failures.judge(self.record, error)

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


@dataclass(slots=True, eq=False)
class Leases:
    """Makes leases, and knows which models are idle and who waits for a model."""

    at_work: AtWork
    changes: Changes
    history: History
    failures: FailureReader | None = None
    started: int = 0  # ever
    ended: int = 0
    abandoned: int = 0  # now, also of models that are gone
    # how an unload refuses the requests whose callers are slow. Most are fast, so that this is
    # empty, which each end of a lease checks
    refusals: dict[ModelRecord, dict[Lease, Callable[[], None]]] = field(default_factory=dict)
    # each lives as long as a caller waits, or somebody else refers to it
    _waiting: WeakValueDictionary[ModelId, Counter[str]] = field(
        default_factory=WeakValueDictionary
    )
    _idle_events: dict[ModelRecord, asyncio.Event] = field(default_factory=dict)

    def make(self, record: ModelRecord) -> Lease:
        """Return a new lease of a model that is loaded."""
        lease = Lease()
        lease.record = record
        lease._usage = record.usage  # noqa: SLF001 - see Lease
        lease.state = _NEW
        lease.is_inference = True
        lease._leases = self  # noqa: SLF001
        return lease

    # -- callers who wait -------------------------------------------------------------------

    @contextmanager
    def count_caller(self, model_id: ModelId, caller: str = "") -> Iterator[None]:
        """Count a caller who waits for the model as long as the block lasts: no eviction takes the
        model before the caller has its lease.
        """
        callers = self.callers_of(model_id)
        callers[caller] += 1
        try:
            yield
        finally:
            callers[caller] -= 1
            if not callers[caller]:
                del callers[caller]

    @property
    def waiting(self) -> int:
        """Return how many callers wait for models."""
        return sum(callers.total() for callers in self._waiting.values())

    def callers_of(self, model_id: ModelId) -> Counter[str]:
        """Return who waits for the model, now and later; empty while nobody does."""
        return self._waiting.setdefault(model_id, Counter())

    def count_calls_of(self, caller: str) -> int:
        """Return how many calls of this caller wait for models."""
        return sum(callers[caller] for callers in self._waiting.values())

    # -- ends of leases ---------------------------------------------------------------------

    def note_idle(self, record: ModelRecord) -> None:
        """Wake those who wait for the end of a model's last lease."""
        self.changes.notify()
        event = self._idle_events.get(record)
        if event is not None:
            event.set()

    def add_refusal(self, lease: Lease, refuse: Callable[[], None]) -> None:
        """Remember how to refuse a request that waits for its caller. Refuse it at once if an
        unload waits for the model's requests already.
        """
        self.refusals.setdefault(lease.record, {})[lease] = refuse
        if lease.record in self._idle_events:
            refuse()

    def remove_refusal(self, lease: Lease) -> None:
        """Forget how to refuse a request that has ended, or that its caller has abandoned."""
        of_model = self.refusals.get(lease.record)
        if of_model is None:
            return
        of_model.pop(lease, None)
        if not of_model:
            del self.refusals[lease.record]

    async def wait_until_idle(self, record: ModelRecord, limit_seconds: float) -> bool:
        """Wait for the requests in flight; return whether all have ended.

        Requests that wait for their callers are refused first.
        """
        for refuse in list(self.refusals.get(record, {}).values()):
            refuse()
        if record.usage.in_flight == 0:
            return True
        event = asyncio.Event()
        self._idle_events[record] = event
        silent_seconds = min(_SILENT_SECONDS, limit_seconds)
        try:
            if await _is_set_within(event, silent_seconds):
                return True
            remaining_seconds = limit_seconds - silent_seconds
            fields = {
                "model_id": record.id,
                "in_flight": record.usage.in_flight,
                "abandoned": record.usage.abandoned,
                "seconds": round(remaining_seconds, 3),
            }
            log.info("model.unload_waits", extra=fields)
            return await _is_set_within(event, remaining_seconds)
        finally:
            del self._idle_events[record]

    def lose(self, record: ModelRecord) -> None:
        """End the leases of a model that Triton has unloaded and whose processes have ended: its
        requests can never be answered. Their connections stay open (docs/design/triton.md).
        """
        count = record.usage.in_flight
        if count == 0:
            return
        record.usage.unanswerable = count
        record.usage.in_flight = 0
        record.usage.inferring = 0
        self.at_work.end_requests(record, clock.monotonic())
        self.ended += count
        log.warning("model.requests_lost", extra={"model_id": record.id, "requests": count})
        self.note_idle(record)

    def note_missing_outputs(self, record: ModelRecord) -> None:
        """Warn once of a model that has answered without any of its outputs."""
        outputs = record.package.outputs if record.package else ()
        names = ", ".join(map(repr, outputs))
        plural = "s" if len(outputs) > 1 else ""
        missing = f"its output{plural} {names}" if names else "an output"
        text = f"the model answered without {missing}; does its code name the output otherwise?"
        if text in record.warnings:
            return
        record.warnings = (*record.warnings, text)
        log.warning("model.outputs_missing", extra={"model_id": record.id, "reason": text})
        self.history.failed("infer", record.id, InferenceFailed(text))


async def _is_set_within(event: asyncio.Event, limit_seconds: float) -> bool:
    try:
        async with asyncio.timeout(limit_seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
