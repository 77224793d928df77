"""Says whether the adapter has started and whether it is ready, and why not."""

from collections.abc import Callable, Sequence

_STARTING = "starting"


class Readiness:
    """`reasons` are asked in their order for why the adapter is not ready; None when it is."""

    def __init__(self, reasons: Sequence[Callable[[], str | None]]) -> None:
        self._reasons = reasons
        self._phase = "starting: waiting for Triton"

    def starting(self, reason: str) -> None:
        """`reason` begins with "starting"."""
        self._phase = reason

    def started(self) -> None:
        self._phase = ""

    def stopping(self) -> None:
        self._phase = "stopping"

    def why_not_started(self) -> str | None:
        return self._phase if self._phase.startswith(_STARTING) else None

    def reasons(self) -> list[str]:
        """Return why the adapter is not ready; nothing when it is."""
        if self._phase:
            return [self._phase]
        return [why for reason in self._reasons if (why := reason())]

    def why_not_ready(self) -> str | None:
        return next(iter(self.reasons()), None)

    def is_ready(self) -> bool:
        return self.why_not_ready() is None
