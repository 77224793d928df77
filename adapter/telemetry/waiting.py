"""How long of one request Triton was waited for. The data planes add to it, the edges read it."""

from contextvars import ContextVar


class Waited:
    """`seconds` is None until something was asked whose time means anything."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds: float | None = None

    def add(self, seconds: float) -> None:
        self.seconds = (self.seconds or 0.0) + seconds


# of the request that the current task serves; what it starts shares it
WAITED: ContextVar[Waited | None] = ContextVar("waited", default=None)


def add_waited(seconds: float) -> None:
    if (waited := WAITED.get()) is not None:
        waited.add(seconds)
