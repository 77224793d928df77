"""One inference holds its model in place, for as long as Triton works on it."""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from time import monotonic
from types import TracebackType

from adapter.core.registry import ModelRecord
from adapter.errors import TooManyAbandoned

log = logging.getLogger(__name__)

# Somebody waits for a drain: one that takes longer is told.
_SILENT_SECONDS = 2.0


class LeaseState(Enum):
    NEW = auto()
    HELD = auto()
    ABANDONED = auto()  # nobody waits for the answer any more, and Triton still works on it
    ENDED = auto()


# Python 3.11 looks long for a member of an enumeration.
_NEW, _HELD, _ABANDONED, _ENDED = LeaseState


class Leases:
    """`failed` is told of each lease that ended with an error, and says what its caller is told.

    `abandoned`: how many are at this moment, also of models that are gone. `max_abandoned`: how
    many a model may have and still get new requests.
    """

    def __init__(
        self, max_abandoned: int, failed: Callable[[ModelRecord, BaseException], BaseException]
    ) -> None:
        self.abandoned = 0
        self.failed = failed
        self._max_abandoned = max_abandoned
        self._drained: dict[ModelRecord, asyncio.Event] = {}
        self._arriving: dict[ModelRecord, dict[Lease, Callable[[], None]]] = {}

    def of(self, record: ModelRecord) -> "Lease":
        """TooManyAbandoned where the model is busy with what nobody waits for."""
        if record.abandoned >= self._max_abandoned:
            raise TooManyAbandoned(
                f"model {record.id!r} still works on {record.abandoned} requests whose callers "
                "have left or had no answer in time, as many as max_abandoned_requests allows",
                model_id=record.id,
                delivered=False,
            )
        return Lease(record, self)

    async def drained(self, record: ModelRecord, seconds: float) -> bool:
        """Wait until none is left of this model, so long at most; False where some are.

        Not for callers: what has not wholly come from them is refused.
        """
        for refuse in list(self._arriving.get(record, {}).values()):
            refuse()
        if record.in_flight == 0:
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
        self._arriving.setdefault(lease.record, {})[lease] = refuse
        if lease.record in self._drained:
            refuse()

    def has_ended(self, lease: "Lease") -> None:
        if (arriving := self._arriving.get(lease.record)) is not None:
            arriving.pop(lease, None)
            if not arriving:
                del self._arriving[lease.record]

    def was_last(self, record: ModelRecord) -> None:
        """Of the leases that this model had; there may be others later."""
        if (event := self._drained.get(record)) is not None:
            event.set()


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _tell(record: ModelRecord, seconds: float) -> None:
    counts = {"in_flight": record.in_flight, "abandoned": record.abandoned}
    fields = {"model_id": record.id, **counts, "seconds": round(seconds, 3)}
    log.info("model.unload_waits", extra=fields)


class Lease:
    """`begin`, then `end`; or a `with` block. An unload waits for it to end.

    A caller who leaves ends nothing, since Triton goes on: after `abandon` the `with` block may be
    left, and only `end` ends the lease.

    A class with __enter__ costs a sixth of a @contextmanager, and this is on the hot path.
    """

    __slots__ = ("_leases", "record", "state")

    def __init__(self, record: ModelRecord, leases: Leases) -> None:
        self.record = record
        self.state = _NEW
        self._leases = leases

    def begin(self) -> None:
        """Once, with nothing awaited since it was made: the model may be unloaded meanwhile."""
        self.state = _HELD
        self.record.in_flight += 1
        self.record.served += 1
        self.record.used_at = monotonic()

    def arrives(self, refuse: Callable[[], None]) -> None:
        """It waits for its caller: for the request, or until the answer is taken. `refuse` is
        called when the model has to go meanwhile, at once where it has to go already, and does
        nothing where nobody is waited for. The last one said holds.
        """
        self._leases.arrives(self, refuse)

    def abandon(self) -> None:
        """Nobody waits for the answer any more. No-op but for a lease that is held."""
        if self.state is _HELD:
            self.state = _ABANDONED
            self.record.abandoned += 1
            self._leases.abandoned += 1

    def end(self, error: BaseException | None = None) -> BaseException | None:
        """Triton is done with it. `error`: what became of it; what its caller is to be told of that
        is returned. No-op when it has ended already.
        """
        if self.state is _ABANDONED:
            self.record.abandoned -= 1
            self._leases.abandoned -= 1
        elif self.state is not _HELD:
            return error
        self.state = _ENDED
        self.record.in_flight -= 1
        self._leases.has_ended(self)
        if self.record.in_flight == 0:
            self._leases.was_last(self.record)
        return None if error is None else self._leases.failed(self.record, error)

    def __enter__(self) -> ModelRecord:
        self.begin()
        return self.record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.state is _HELD:
            told = self.end(error)
            if told is not None and told is not error:
                raise told
