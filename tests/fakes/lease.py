"""A lease of the door of control without control behind it."""

from collections.abc import Callable
from enum import Enum, auto
from types import TracebackType

from adapter.core.record import ModelRecord
from adapter.errors import AdapterError


class LeaseState(Enum):
    NEW = auto()
    HELD = auto()
    ABANDONED = auto()
    ENDED = auto()


class FakeLease:
    """Counts itself in the usage of its record, and keeps the errors that it ended with."""

    def __init__(self, record: ModelRecord) -> None:
        self.record = record
        self.state = LeaseState.NEW
        self.failures: list[BaseException] = []
        self.refuse: Callable[[], None] | None = None  # of a request that has not arrived
        self.is_inference = True

    def begin(self, now: float | None = None) -> None:
        self.state = LeaseState.HELD
        self.record.usage.in_flight += 1

    def on_unload(self, refuse: Callable[[], None]) -> None:
        self.refuse = refuse

    def abandon(self) -> None:
        if self.state is LeaseState.HELD:
            self.state = LeaseState.ABANDONED
            self.record.usage.abandoned += 1

    def is_held(self) -> bool:
        return self.state is LeaseState.HELD

    def is_lost(self) -> bool:
        return False

    def end(
        self, error: BaseException | None = None, now: float | None = None
    ) -> BaseException | None:
        if self.state not in {LeaseState.HELD, LeaseState.ABANDONED}:
            return error
        self.record.usage.in_flight -= 1
        self.record.usage.abandoned -= self.state is LeaseState.ABANDONED
        self.state = LeaseState.ENDED
        return None if error is None else self.note_failure(error)

    def note_failure(self, error: BaseException) -> BaseException:
        self.failures.append(error)
        return error

    async def judge(self, error: AdapterError) -> AdapterError:
        return error

    def note_missing_outputs(self) -> None:
        """Do nothing: only the real lease logs it."""

    def __enter__(self) -> ModelRecord:
        self.begin()
        return self.record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.is_held():
            self.end(error)
