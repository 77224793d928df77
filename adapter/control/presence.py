"""Whether Triton is here, and whether the registry says what it has."""

import asyncio
import time
from dataclasses import dataclass

from adapter.control.ports import Server, Triton
from adapter.core.model import ModelId
from adapter.errors import BackendUnavailable, ModelNotFound

_POLL_SECONDS = 0.05
# From the first closed connection of a process to its end: it has gigabytes of a GPU to give back.
_END_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Life:
    """One stay of Triton: its connection and, where the process is ours, its process; None while
    there is none. Models do not outlive their process.
    """

    connection: int | None
    process: int | None


class Presence:
    """`come_back`: what Triton loses is loaded anew from here, so nobody else is to load it."""

    def __init__(self, triton: Triton, server: Server | None, *, loads_again: bool) -> None:
        self.is_restarting = False
        self._triton = triton
        self._server = server
        self._loads_again = loads_again
        self._confirmed: Life | None = None

    @property
    def come_back(self) -> bool:
        return self._loads_again or self.is_restarting

    def now(self) -> Life:
        connection = self._triton.lives if self._triton.live else None
        return Life(connection, self._server.pid if self._server else None)

    def confirm(self, life: Life) -> None:
        """The registry says what Triton has in this life, which was noted before the look. One that
        has ended meanwhile says nothing of now: another look may have confirmed the next already.
        """
        if life == self.now():
            self._confirmed = life

    @property
    def is_here(self) -> bool:
        """It answers, and the registry is true to it."""
        return self.now() == self._confirmed and self._confirmed.connection is not None

    @property
    def has_lost_all(self) -> bool:
        """A process of our own has ended with all of its models, and the registry has them yet."""
        if self._server is None or self._confirmed is None or self.come_back:
            return False
        return self._server.pid != self._confirmed.process

    def refuse_lost(self, model_id: ModelId) -> None:
        """ModelNotFound when Triton has ended, with this and all other models."""
        if self.has_lost_all:
            raise lost(model_id)

    def refuse_ended(self, process: int | None, model_id: ModelId) -> None:
        """BackendUnavailable when this process of our own, which has loaded a model, has ended."""
        if self._server is not None and (process is None or self._server.pid != process):
            raise BackendUnavailable(
                "Triton ended while the model was being loaded", model_id=model_id, delivered=True
            )

    async def is_cause_of(self, error: BackendUnavailable) -> bool:
        """Did a call fail because Triton has ended, with all models? That is known a moment later:
        a process closes its connections while it ends.
        """
        if type(error) is not BackendUnavailable or self._server is None or self.come_back:
            return False
        known, deadline = self._confirmed, time.monotonic() + _END_SECONDS
        while known is not None and self._confirmed is not None:
            if self.has_lost_all or self._confirmed.process != known.process:
                return True
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def wait_here(self, deadline: float) -> None:
        """Until Triton is here. BackendUnavailable when it is not by `deadline` (monotonic)."""
        while not self.is_here:
            if time.monotonic() > deadline:
                raise BackendUnavailable("Triton did not come back in time", delivered=False)
            await asyncio.sleep(_POLL_SECONDS)


def lost(model_id: ModelId) -> ModelNotFound:
    return ModelNotFound(f"Triton ended, and model {model_id!r} with it", model_id=model_id)
