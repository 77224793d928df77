"""Remembers the latest loads, unloads, evictions, refusals and failures, and Triton's ends."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from heapq import merge
from types import MappingProxyType

from adapter.core.model import ModelId
from adapter.errors import (
    AboutMemory,
    AdapterError,
    CallerError,
    MemoryFigures,
    NoRoom,
    was_refused,
)
from adapter.runtime import clock

_MAX_OCCURRENCES = 40  # of successes, and as many of failures
_MAX_MISTAKES = 20  # of callers: anybody can make many
_REASON_CHARACTERS = 1000
# Which failures of a model are over once one of its operations succeeds.
_MENDS = {
    "load": frozenset({"load", "fetch", "infer", "unload"}),
    "fetch": frozenset({"fetch"}),
    "unload": frozenset({"infer", "unload"}),
}


class Outcome(Enum):
    """Names the ways in which an operation ends."""

    DONE = "done"
    REFUSED = "refused"  # nothing was tried
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Describes an operation that has ended; of several equal failures in a row, the latest."""

    # load, unload, fetch, infer; triton for its exit and its return; lost for models that Triton
    # does not have any more
    operation: str
    outcome: Outcome
    at: float  # of the end, in seconds since 1970
    model_id: ModelId | None = None
    seconds: float = 0.0
    size_bytes: int = 0  # taken or freed
    evicted: str | None = None  # why the adapter unloaded the model by itself
    # the error's class: its traceback would keep the load's objects alive
    kind: type[AdapterError] | None = None
    reason: str = ""
    figures: MemoryFigures | None = None
    count: int = 1  # how often in a row the model met this error
    is_mended: bool = False  # the model has since done what it failed at


def _explain_eviction(fields: Mapping[str, str]) -> str:
    """Return for whom a model has made room, and at what price."""
    if "worth" not in fields:
        return ""
    price = f"{fields['worth']}; it comes back in {fields['return_seconds']} s"
    return f"for {fields['evicted_for']!r}: {price}"


class History:
    """Remembers the latest occurrences.

    Successes never push out failures, nor do mistakes of callers push out other failures.
    """

    def __init__(self) -> None:
        # the oldest come first
        self._done: deque[Occurrence] = deque(maxlen=_MAX_OCCURRENCES)
        self._failed: deque[Occurrence] = deque(maxlen=_MAX_OCCURRENCES)
        self._mistaken: deque[Occurrence] = deque(maxlen=_MAX_MISTAKES)
        self._triton_down_at: float | None = None

    def latest(self) -> list[Occurrence]:
        """Return all occurrences, the newest first."""
        return list(_merge_newest_first(self._done, self._failed, self._mistaken))

    def failures(self, operations: Iterable[str]) -> list[Occurrence]:
        """Return which of these operations failed or were refused, the newest first."""
        wanted = {*operations}
        failures = _merge_newest_first(self._failed, self._mistaken)
        return [failure for failure in failures if failure.operation in wanted]

    def done(
        self,
        operation: str,
        model_id: ModelId,
        seconds: float,
        size_bytes: int,
        log_fields: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Record a success, and that the failures before it are over.

        `log_fields` say why the model was evicted, if it was.
        """
        self._mend(model_id, _MENDS[operation])
        if operation == "fetch":
            self.disk_has_room()
        occurrence = Occurrence(
            operation,
            Outcome.DONE,
            clock.wall(),
            model_id,
            seconds,
            size_bytes,
            evicted=log_fields.get("evicted"),
            reason=_explain_eviction(log_fields),
        )
        self._done.append(occurrence)

    def _mend(self, model_id: ModelId, operations: frozenset[str]) -> None:
        """Mark the failures of a model in these operations as mended."""
        for failures in (self._failed, self._mistaken):
            for index, failure in enumerate(failures):
                if failure.model_id == model_id and failure.operation in operations:
                    failures[index] = replace(failure, is_mended=True)

    def disk_has_room(self) -> None:
        """Mark all refusals for want of room on disk as mended."""
        for index, failure in enumerate(self._failed):
            if failure.operation == "fetch" and failure.kind is NoRoom:
                self._failed[index] = replace(failure, is_mended=True)

    def worst(
        self,
        *,
        are_lost: bool,  # whether models that Triton has lost have not come back
        answered_at: Callable[[ModelId], float],  # of a model's last success, since 1970
    ) -> Occurrence | None:
        """Return the latest failure that is not over: one of Triton, otherwise one of a model."""

        def is_over(failure: Occurrence) -> bool:
            if failure.operation == "triton":
                return failure.at != self._triton_down_at
            if failure.operation == "lost":
                return not are_lost
            if failure.is_mended:
                return True
            # a later answer of the model says only that memory is there again
            if failure.operation != "infer" or failure.figures is None or not failure.model_id:
                return False
            return answered_at(failure.model_id) > failure.at

        failures = [failure for failure in reversed(self._failed) if not is_over(failure)]
        of_triton = (failure for failure in failures if failure.model_id is None)
        return next(of_triton, next(iter(failures), None))

    def failed(
        self, operation: str, model_id: ModelId, error: AdapterError, seconds: float = 0.0
    ) -> None:
        """Record a failure or a refusal, once for all that are equal.

        Failures for lack of memory or of room on disk are equal though their figures differ.
        """
        is_about_memory = isinstance(error, AboutMemory)
        has_figures = is_about_memory or isinstance(error, NoRoom)
        is_mistake = isinstance(error, CallerError) and was_refused(error) and not is_about_memory
        failures = self._mistaken if is_mistake else self._failed
        key = (operation, model_id, type(error))
        earlier_count = 0
        reason = str(error)[:_REASON_CHARACTERS]
        for failure in failures:
            is_same = (failure.operation, failure.model_id, failure.kind) == key
            if is_same and (has_figures or failure.reason == reason):
                earlier_count = failure.count
                failures.remove(failure)
                break
        occurrence = Occurrence(
            operation,
            Outcome.REFUSED if was_refused(error) else Outcome.FAILED,
            clock.wall(),
            model_id,
            seconds,
            kind=type(error),
            reason=reason,
            figures=error.figures if isinstance(error, AboutMemory) else None,
            count=earlier_count + 1,
        )
        failures.append(occurrence)

    def lost(self, reason: str) -> None:
        """Record that Triton does not have models any more."""
        self._failed.append(Occurrence("lost", Outcome.FAILED, clock.wall(), reason=reason))

    def triton_ended(self, reason: str) -> None:
        """Record that Triton has exited, in place of its silence if that was noticed first."""
        if self._triton_down_at is None:
            self._note_triton_down(reason)
            return
        for index, failure in enumerate(self._failed):
            if failure.operation == "triton" and failure.at == self._triton_down_at:
                self._failed[index] = replace(failure, reason=reason)

    def triton_silent(self) -> None:
        """Record that Triton does not answer, once until it is back."""
        if self._triton_down_at is None:
            self._note_triton_down("Triton does not answer")

    def _note_triton_down(self, reason: str) -> None:
        """Record a failure of Triton, and when it began."""
        self._triton_down_at = clock.wall()
        failure = Occurrence("triton", Outcome.FAILED, self._triton_down_at, reason=reason)
        self._failed.append(failure)

    def triton_back(self) -> None:
        """Record that Triton answers again, and how long it did not."""
        if self._triton_down_at is not None:
            now = clock.wall()
            seconds = now - self._triton_down_at
            self._triton_down_at = None
            self._done.append(Occurrence("triton", Outcome.DONE, now, seconds=seconds))


def _merge_newest_first(*occurrences: deque[Occurrence]) -> Iterable[Occurrence]:
    """Merge lists that begin with the oldest into one that begins with the newest."""
    return merge(*map(reversed, occurrences), key=lambda occurrence: -occurrence.at)
