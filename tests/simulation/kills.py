"""Know which adapter the running code belongs to, and keep a killed one from any effect."""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any


class Adapter:
    """One adapter of the run; `is_running` until it is killed."""

    def __init__(self) -> None:
        self.is_running = True


class Killed(BaseException):
    """Raised to an adapter that was killed: it has no effect on the world any more."""


# None for the world.
ADAPTER: ContextVar[Adapter | None] = ContextVar("adapter", default=None)


def refuse_dead() -> None:
    """Raise Killed in code of an adapter that was killed."""
    adapter = ADAPTER.get()
    if adapter is not None and not adapter.is_running:
        raise Killed


class Guarded:
    """A port of one adapter, which does nothing once that was killed."""

    def __init__(self, target: object, adapter: Adapter) -> None:
        self._target = target
        self._adapter = adapter

    def __getattr__(self, name: str) -> object:
        found = getattr(self._target, name)
        if not callable(found):
            return found
        call = self._awaited(found) if inspect.iscoroutinefunction(found) else self._called(found)
        setattr(self, name, call)
        return call

    def _check(self) -> None:
        if not self._adapter.is_running:
            raise Killed

    def _awaited(self, act: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: object, **kwargs: object) -> object:
            self._check()
            try:
                return await act(*args, **kwargs)
            finally:
                self._check()

        return call

    def _called(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> object:
            self._check()
            return act(*args, **kwargs)

        return call
