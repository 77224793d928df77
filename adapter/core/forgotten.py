"""List the models that Triton has lost and the adapter does not load again, for operators.

A platform, or whoever loaded them, has to load them again. A load of the model, or a call for its
unload, takes it off the list. No decision depends on the list.
"""

from collections.abc import Callable
from dataclasses import dataclass

from adapter.core.model import ModelId
from adapter.core.record import LoadedFor
from adapter.core.registry import Move
from adapter.core.states import LOADED, ModelEvent, ModelState

MAX_LISTED = 1000
_EXITED = "Triton has exited, or somebody has unloaded them there; load them again"
_DIED = "their processes had died; load them again"


@dataclass(frozen=True, slots=True)
class ForgottenModel:
    """Says when and why a model was lost."""

    at: float  # time.time()
    reason: str
    is_given_up: bool = False  # the adapter does not load it, as it may make Triton exit


class ForgottenModels:
    """Holds the models that do not come back by themselves, the latest last."""

    def __init__(
        self,
        clock: Callable[[], float],  # time.time, but in tests
    ) -> None:
        self._clock = clock
        self._models: dict[ModelId, ForgottenModel] = {}

    def models(self) -> dict[ModelId, ForgottenModel]:
        """Return the models, the latest last."""
        return dict(self._models)

    def note_move(self, move: Move) -> None:
        """Add a platform's model that Triton no longer has; remove one that is loaded."""
        record = move.record
        if move.after is ModelState.READY:
            self.remove(record.id)
            return
        is_lost = move.event is ModelEvent.TRITON_EXITED and move.before in LOADED
        if is_lost and record.loaded_for is LoadedFor.PLATFORM:
            self.add(record.id, _DIED if move.before is ModelState.DEAD else _EXITED)

    def add(self, model_id: ModelId, reason: str, *, is_given_up: bool = False) -> None:
        """Add a model that is not loaded again by the adapter."""
        self._models.pop(model_id, None)
        self._models[model_id] = ForgottenModel(self._clock(), reason, is_given_up)
        if len(self._models) > MAX_LISTED:
            del self._models[next(iter(self._models))]

    def remove(self, model_id: ModelId) -> None:
        """Remove a model after its load, or a call for its unload. Harmless if it is not listed."""
        self._models.pop(model_id, None)
