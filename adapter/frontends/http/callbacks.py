"""Callbacks of transports and parsers, which have nobody to raise to."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Guarded(Protocol):
    """`bug` is told what a callback did not expect; it must not raise."""

    def bug(self, error: Exception) -> None: ...


_Self = TypeVar("_Self", bound=Guarded)
_Given = ParamSpec("_Given")


def guarded(
    act: Callable[Concatenate[_Self, _Given], None],
) -> Callable[Concatenate[_Self, _Given], None]:
    """A callback after which nothing hangs and nothing leaks, whatever it raises."""

    @wraps(act)
    def run(self: _Self, *args: Any) -> None:
        try:
            act(self, *args)  # type: ignore[call-arg]
        except Exception as error:  # noqa: BLE001 - all of them
            self.bug(error)

    return run  # type: ignore[return-value] # of the same parameters
