"""One inference holds its model in place."""

from collections.abc import Callable
from time import monotonic
from types import TracebackType

from adapter.core.registry import ModelRecord


class Lease:
    """`with control.lease(id) as record:` is one inference; an unload waits for it to end.

    A class with __enter__ costs a sixth of a @contextmanager, and this is on the hot path.
    """

    __slots__ = ("_ended", "record")

    def __init__(
        self, record: ModelRecord, ended: Callable[[ModelRecord, BaseException | None], None]
    ) -> None:
        self.record = record
        self._ended = ended

    def __enter__(self) -> ModelRecord:
        self.record.in_flight += 1
        self.record.served += 1
        self.record.used_at = monotonic()
        return self.record

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.record.in_flight -= 1
        if self.record.in_flight == 0 or error is not None:
            self._ended(self.record, error)
