"""List the models that should be loaded, and why: a setting names them, or Triton exited with them.

A model is MISSING until it is loaded, or is REFUSED after a failure that another try would meet as
well. Other failures are followed by another try, after a pause that doubles each time. An exit of
Triton makes all of them MISSING again. Whoever asks for the unload of a model ends that; of models
that settings name, operators still see it (UNLOADED), and a load makes them wanted again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from adapter.core import times
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId, ModelSource
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    BackendUnavailable,
    InvalidModel,
    InvalidRequest,
    LoadFailed,
    ModelTooLarge,
    Overloaded,
)


class WantedReason(Enum):
    """Says why a model should be loaded."""

    LOAD_AT_START = "load_at_start"  # the setting
    PRELOAD = "preload"  # the setting: a model of a store
    LOST = "lost"  # Triton exited with it


class WantedState(Enum):
    """Says whether a wanted model is still to be loaded."""

    MISSING = "missing"  # its load is still to come, or in progress; readiness may wait for it
    LOADED = "loaded"  # in this life of Triton; calls may have evicted it since
    REFUSED = "refused"  # there is no other try in this life of Triton
    UNLOADED = "unloaded"  # somebody asked for its unload, and nothing loads it again


# Errors of the files themselves: only another version of them, or another Triton, helps.
FILE_ERRORS: tuple[type[AdapterError], ...] = (InvalidModel, LoadFailed, ModelTooLarge)

# Failures after which a model is not tried again in the same life of Triton. The files of
# load_at_start lie where somebody can mend them, so their failures are not final. Nobody notes that
# a model is given up: it waits for its pardon.
FINAL_ERRORS: Mapping[WantedReason, tuple[type[AdapterError], ...]] = {
    WantedReason.LOAD_AT_START: (),
    WantedReason.PRELOAD: (ArtifactNotFound, InvalidRequest, *FILE_ERRORS),
    WantedReason.LOST: (ArtifactNotFound, *FILE_ERRORS),
}


@dataclass(slots=True, eq=False)
class WantedModel:
    """A model that should be loaded, and how far that is."""

    model_id: ModelId
    source: ModelSource | ArtifactKey  # the key of a model whose files come from a store
    reason: WantedReason
    state: WantedState = WantedState.MISSING
    failure: str = ""  # of the last try in this life of Triton
    pause_seconds: float = times.PAUSE_SECONDS  # before the try after the next failure


class Wanted:
    """Holds the models that should be loaded, oldest first."""

    def __init__(self) -> None:
        self._models: dict[ModelId, WantedModel] = {}

    def get(self, model_id: ModelId) -> WantedModel | None:
        """Return the model if it is wanted."""
        model = self._models.get(model_id)
        return None if model is None or model.state is WantedState.UNLOADED else model

    def models(self) -> list[WantedModel]:
        """Return all models that are wanted, loaded or not."""
        models = self._models.values()
        return [model for model in models if model.state is not WantedState.UNLOADED]

    def unloaded(self) -> list[WantedModel]:
        """Return the models that settings name, and whose unload was asked for."""
        models = self._models.values()
        return [model for model in models if model.state is WantedState.UNLOADED]

    def missing(self) -> list[WantedModel]:
        """Return the models that are to be loaded yet."""
        return [model for model in self._models.values() if model.state is WantedState.MISSING]

    def want(
        self, model_id: ModelId, source: ModelSource | ArtifactKey, reason: WantedReason
    ) -> WantedModel:
        """Add a model as MISSING, in place of an earlier entry; return it.

        For LOST, an earlier entry keeps its reason, so a model that a setting names stays the
        setting's after Triton exited with it. Its source is always the new one.
        """
        former = self._models.get(model_id)
        if former is not None and reason is WantedReason.LOST:
            reason = former.reason
        model = WantedModel(model_id, source, reason)
        self._models[model_id] = model
        return model

    def remove(self, model_id: ModelId) -> bool:
        """Stop wanting a model whose unload was asked for; return False if it was not wanted.

        A model that a setting names stays in the list as UNLOADED.
        """
        model = self.get(model_id)
        if model is None:
            return False
        if model.reason is WantedReason.LOST:
            del self._models[model_id]
        model.state = WantedState.UNLOADED
        model.failure = ""
        return True

    def note_loaded(self, model_id: ModelId) -> None:
        """Mark a model as LOADED, and forget its last failure.

        A model that is wanted only because Triton exited with it leaves the list. A model that no
        setting names is ignored.
        """
        model = self._models.get(model_id)
        if model is None:
            return
        if model.reason is WantedReason.LOST:
            del self._models[model_id]
            return
        model.state = WantedState.LOADED
        model.failure = ""
        model.pause_seconds = times.PAUSE_SECONDS

    def note_failure(self, model: WantedModel, error: Exception) -> float | None:
        """Note how a try has failed; return the seconds until the next try, None if there is none.

        A bug is a failure like others. If Triton is away, the failure is not the model's, and the
        next try may follow at once.
        """
        if self.get(model.model_id) is not model:
            return None  # an unload was asked for meanwhile, or Triton exited with the model
        if model.state is not WantedState.MISSING:
            return None  # somebody else has loaded it meanwhile
        model.failure = str(error)
        if isinstance(error, FINAL_ERRORS[model.reason]):
            model.state = WantedState.REFUSED
            return None
        if isinstance(error, BackendUnavailable) and not isinstance(error, Overloaded):
            return times.POLL_SECONDS
        pause_seconds = model.pause_seconds
        model.pause_seconds = min(2 * pause_seconds, times.LONGEST_PAUSE_SECONDS)
        return pause_seconds

    def note_exit(self) -> None:
        """Note that Triton exited with all models. Each of them gets another chance."""
        for model in self.models():
            model.state = WantedState.MISSING
            model.failure = ""
            model.pause_seconds = times.PAUSE_SECONDS
