"""Sums how long one request waited for Triton: data planes add, the middleware reads."""

from contextvars import ContextVar


class Waited:
    """The sum in `seconds`; None until a call was made whose duration is meaningful."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None

    def add(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) + seconds


# of the request that the current task serves; tasks that it starts share it
WAITED: ContextVar[Waited | None] = ContextVar("waited", default=None)


def add_waited(seconds: float) -> None:
    if (waited := WAITED.get()) is not None:
        waited.add(seconds)
