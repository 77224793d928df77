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

_MOST = 40  # of what went well, and as many of what did not
_MOST_OF_CALLERS = 20  # mistakes: anybody can make many
_REASON_CHARACTERS = 1000
# What a model has shown to work once this went well.
_MENDS = {
    "load": frozenset({"load", "fetch", "infer", "unload"}),
    "fetch": frozenset({"fetch"}),
    "unload": frozenset({"infer", "unload"}),
}


class Outcome(Enum):
    DONE = "done"
    REFUSED = "refused"  # nothing was tried
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An operation that has ended; of several equal failures in a row, the latest."""

    # load, unload, fetch, infer; triton for its end and its return; lost for models that Triton
    # does not have any more
    operation: str
    outcome: Outcome
    at: float  # time.time() of the end
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


def _why_evicted(fields: Mapping[str, str]) -> str:
    """Return for whom a model has made room, and at what price."""
    if "worth" not in fields:
        return ""
    price = f"{fields['worth']}; it comes back in {fields['return_seconds']} s"
    return f"for {fields['evicted_for']!r}: {price}"


class History:
    """The latest occurrences, in memory. Successes never push out failures, nor do mistakes of
    callers push out other failures.
    """

    def __init__(self) -> None:
        self._done: deque[Occurrence] = deque(maxlen=_MOST)  # both oldest first
        self._failed: deque[Occurrence] = deque(maxlen=_MOST)
        self._mistaken: deque[Occurrence] = deque(maxlen=_MOST_OF_CALLERS)
        self._triton_down_at: float | None = None

    def latest(self) -> list[Occurrence]:
        """Return all of them, newest first."""
        return list(_newest_first(self._done, self._failed, self._mistaken))

    def failures(self, operations: Iterable[str]) -> list[Occurrence]:
        """Return what failed or was refused of these operations, newest first."""
        wanted = {*operations}
        found = _newest_first(self._failed, self._mistaken)
        return [each for each in found if each.operation in wanted]

    def done(
        self,
        operation: str,
        model_id: ModelId,
        seconds: float,
        size_bytes: int,
        log_fields: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Note what went well, and that it mends what failed before; `log_fields` say why the model
        was evicted, if it was.
        """
        self._mend(model_id, _MENDS[operation])
        if operation == "fetch":
            self.disk_has_room()
        took, evicted = (model_id, seconds, size_bytes), log_fields.get("evicted")
        one = Occurrence(operation, Outcome.DONE, clock.wall(), *took, evicted)
        self._done.append(replace(one, reason=_why_evicted(log_fields)))

    def _mend(self, model_id: ModelId, operations: frozenset[str]) -> None:
        for noted in (self._failed, self._mistaken):
            for at, known in enumerate(noted):
                if known.model_id == model_id and known.operation in operations:
                    noted[at] = replace(known, is_mended=True)

    def disk_has_room(self) -> None:
        """Mend all refusals for want of room on disk; one that lacks room again is noted anew."""
        for at, known in enumerate(self._failed):
            if known.operation == "fetch" and known.kind is NoRoom:
                self._failed[at] = replace(known, is_mended=True)

    def worst(
        self, *, are_lost: bool, answered_at: Callable[[ModelId], float]
    ) -> Occurrence | None:
        """Return the latest failure that is not mended: of Triton, else of one model. `are_lost`:
        models that Triton has lost have not come back. `answered_at`: when a model has last
        answered well (time.time).
        """

        def is_over(one: Occurrence) -> bool:
            if one.operation == "triton":
                return one.at != self._triton_down_at
            if one.operation == "lost":
                return not are_lost
            # of others than lacks of memory a model that answers says nothing
            is_of_moment = one.operation == "infer" and one.figures is not None
            answers = is_of_moment and one.model_id and answered_at(one.model_id) > one.at
            return one.is_mended or bool(answers)

        found = [each for each in reversed(self._failed) if not is_over(each)]
        of_triton = (each for each in found if each.model_id is None)
        return next(of_triton, next(iter(found), None))

    def failed(
        self, operation: str, model_id: ModelId, error: AdapterError, seconds: float = 0.0
    ) -> None:
        """Note a failure or a refusal; the same one of the same model again is counted, and so is
        one for lack of memory or of room on disk whose figures differ.
        """
        is_about_memory = isinstance(error, AboutMemory)
        has_figures = is_about_memory or isinstance(error, NoRoom)
        is_mistake = isinstance(error, CallerError) and was_refused(error) and not is_about_memory
        noted = self._mistaken if is_mistake else self._failed
        same, earlier = (operation, model_id, type(error)), 0
        reason = str(error)[:_REASON_CHARACTERS]
        for known in noted:
            is_same = (known.operation, known.model_id, known.kind) == same
            if is_same and (has_figures or known.reason == reason):
                earlier = known.count
                noted.remove(known)
                break
        one = Occurrence(
            operation,
            Outcome.REFUSED if was_refused(error) else Outcome.FAILED,
            clock.wall(),
            model_id,
            seconds,
            kind=type(error),
            reason=reason,
            figures=error.figures if isinstance(error, AboutMemory) else None,
            count=earlier + 1,
        )
        noted.append(one)

    def lost(self, reason: str) -> None:
        """Note that Triton does not have models any more."""
        self._failed.append(Occurrence("lost", Outcome.FAILED, clock.wall(), reason=reason))

    def triton_ended(self, reason: str) -> None:
        """Note that Triton has ended, in place of its silence if that was noticed first."""
        if self._triton_down_at is None:
            self._triton_down(reason)
            return
        for at, known in enumerate(self._failed):
            if known.operation == "triton" and known.at == self._triton_down_at:
                self._failed[at] = replace(known, reason=reason)

    def triton_silent(self) -> None:
        """Note that Triton does not answer; until it is back that is noted once."""
        if self._triton_down_at is None:
            self._triton_down("Triton does not answer")

    def _triton_down(self, reason: str) -> None:
        self._triton_down_at = clock.wall()
        one = Occurrence("triton", Outcome.FAILED, self._triton_down_at, reason=reason)
        self._failed.append(one)

    def triton_back(self) -> None:
        if self._triton_down_at is not None:
            now, down_at = clock.wall(), self._triton_down_at
            self._triton_down_at = None
            self._done.append(Occurrence("triton", Outcome.DONE, now, seconds=now - down_at))


def _newest_first(*noted: deque[Occurrence]) -> Iterable[Occurrence]:
    return merge(*map(reversed, noted), key=lambda one: -one.at)
