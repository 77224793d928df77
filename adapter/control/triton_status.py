"""Tracks whether Triton is up, and whether the registry matches its models."""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from adapter.control.ports import Ports
from adapter.core.admission import MeshBooks
from adapter.core.model import ModelId
from adapter.core.registry import ModelRecord, lost_with_triton
from adapter.errors import BackendUnavailable, ModelNotFound
from adapter.runtime import clock

MODELS_LOOKED_FOR = "Triton has been restarted; its models are looked for"
_POLL_SECONDS = 0.05
# From the first closed connection of a process to its end: it frees gigabytes of GPU memory.
_END_SECONDS = 5.0


class Phase(Enum):
    """The adapter's phase of life. It takes operations while it is OPEN."""

    STARTING = auto()
    OPEN = auto()
    STOPPING = auto()


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of Triton: the number of its connection, and the pid of the process if it is
    embedded; None while there is none. Models do not outlive their process.
    """

    connection: int | None
    process: int | None


class TritonStatus:
    """Compares the present life of Triton with the one that the registry was confirmed for."""

    def __init__(
        self,
        ports: Ports,
        mesh: MeshBooks,
        *,
        # whether the adapter reloads the models that Triton loses; None: unless there is a
        # ModelMesh, which loads them again itself
        loads_again: bool | None,
    ) -> None:
        self.phase = Phase.STARTING
        self.is_restarting = False  # the adapter has ended Triton
        self._triton, self._server = ports.triton, ports.server
        self._mesh = mesh
        self._loads_again = loads_again
        self._confirmed: Incarnation | None = None
        self._marked: int | None = None  # of the latest life: its process, or its connection

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.OPEN

    @property
    def come_back(self) -> bool:
        """Whether the adapter reloads the models that Triton loses, so that callers need not."""
        return self.on_restart[0] == "reload" or self.is_restarting

    def comes_back(self, record: ModelRecord) -> bool:
        """Whether the adapter loads a model again that Triton has lost: with `auto` only if Triton
        has ended, as somebody may have unloaded the model there.
        """
        is_sure = self._loads_again is not None or self.is_restarting
        has_ended = self.now() != self._confirmed
        return self.come_back and record.can_load_again and (is_sure or has_ended)

    @property
    def on_restart(self) -> tuple[Literal["forget", "reload"], str]:
        """Return what happens to the models when Triton restarts, and why."""
        if self._loads_again is not None:
            return "reload" if self._loads_again else "forget", "on_triton_restart says so"
        if self._mesh.is_present:
            return "forget", "a ModelMesh has called runtimeStatus"
        return "reload", "auto: no platform is known that would load them again"

    def now(self) -> Incarnation:
        connection = self._triton.lives if self._triton.live else None
        return Incarnation(connection, self._server.pid if self._server else None)

    def confirm(self, incarnation: Incarnation) -> None:
        """Note that the registry matches Triton in `life`, which was taken before Triton was asked.

        A life that has ended meanwhile is ignored: the next may have been confirmed already.
        """
        if incarnation == self.now():
            self._confirmed = incarnation

    def follows_an_end(self, incarnation: Incarnation) -> bool:
        """Return whether Triton has ended before this incarnation; True once for each end.
        False for an incarnation that is over: a late answer about it is no end.
        """
        mark = incarnation.connection if self._server is None else incarnation.process
        before = self._marked
        if mark is None or mark == before or incarnation != self.now():
            return False
        self._marked = mark
        return before is not None

    @property
    def is_up(self) -> bool:
        """Whether Triton answers and the registry matches its models."""
        return self.now() == self._confirmed and self._confirmed.connection is not None

    @property
    def has_ended(self) -> bool:
        """Whether the embedded server has ended with models that the registry still has."""
        if self._server is None or self._confirmed is None:
            return False
        return self._server.pid != self._confirmed.process

    def explain_mismatch(self) -> str | None:
        """Return why the models of a Triton that answers are not known; None if they are."""
        return MODELS_LOOKED_FOR if self._triton.live and self.has_ended else None

    @property
    def has_lost_all(self) -> bool:
        """Whether the server has ended, and the adapter does not load its models again."""
        return self.has_ended and not self.come_back

    def has_lost(self, record: ModelRecord) -> bool:
        """Whether the server has ended with this model, which the adapter does not load again by
        itself: one that a call had loaded waits for the next call.
        """
        return self.has_ended and not (self.come_back and record.can_load_again)

    def refuse_lost(self, model_id: ModelId) -> None:
        """Raise ModelNotFound if Triton has ended, and with it this and all other models, or if the
        adapter is starting, and does not know yet what Triton has.
        """
        if self.phase is Phase.STARTING:
            why = f"the adapter is starting, and does not know model {model_id!r} yet: load it"
            raise ModelNotFound(why, model_id=model_id)
        if self.has_lost_all:
            raise lost_with_triton(model_id)

    def explain_lost(self, model_id: ModelId) -> ModelNotFound:
        """Return the error for a call of a model that Triton has exited with."""
        return lost_with_triton(model_id)

    def note_mesh(self) -> None:
        """Note that a ModelMesh is there, which loads its models again itself."""
        self._mesh.is_present = True

    def refuse_ended(self, process: int | None, model_id: ModelId) -> None:
        """Raise BackendUnavailable if the server process that loaded a model has ended."""
        if self._server is not None and (process is None or self._server.pid != process):
            raise BackendUnavailable(
                "Triton ended while the model was being loaded", model_id=model_id, delivered=True
            )

    async def is_exit_behind(self, error: BackendUnavailable) -> bool:
        """Return whether a call failed because Triton has ended, with all models. Waits for that to
        show: a process closes its connections before it has ended.
        """
        if type(error) is not BackendUnavailable or self._server is None or self.come_back:
            return False
        known, deadline = self._confirmed, clock.monotonic() + _END_SECONDS
        while known is not None and self._confirmed is not None:
            if self.has_lost_all or self._confirmed.process != known.process:
                return True
            if clock.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return False

    async def wait_until_up(self, deadline: float) -> None:
        """Wait until the adapter is open and `is_up`; raise BackendUnavailable at `deadline`
        (time.monotonic). Return at once when the adapter stops: it refuses all operations.
        """
        while self.phase is Phase.STARTING or (self.phase is Phase.OPEN and not self.is_up):
            if clock.monotonic() > deadline:
                did_not = {
                    Phase.STARTING: "the adapter did not start",
                    Phase.OPEN: "Triton did not come back",
                }
                raise BackendUnavailable(f"{did_not[self.phase]} in time", delivered=False)
            await asyncio.sleep(_POLL_SECONDS)
