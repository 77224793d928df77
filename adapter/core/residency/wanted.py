"""Models that are wanted from the start on, and how far each of them is."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial

from adapter.core.model import ModelId, ModelSource
from adapter.errors import ModelNotFound


class Want(Enum):
    WAITING = "waiting"  # its load was not tried yet, or is under way
    FAILED = "failed"  # it is tried again
    REFUSED = "refused"  # it is not tried again until Triton is restarted
    LOADED = "loaded"  # its load has ended well; it may have been evicted since
    UNLOADED = "unloaded"  # a caller has asked for its unload, and it is wanted no more


class WantEvent(Enum):
    DELAYED = "delayed"  # it is on its way back, or Triton is
    FAILED = "failed"
    REFUSED = "refused"
    LOADED = "loaded"  # whoever asked for it
    UNLOAD_ASKED = "unload_asked"
    TRITON_RESTARTED = "triton_restarted"


_TRIED = {
    WantEvent.DELAYED: Want.WAITING,
    WantEvent.FAILED: Want.FAILED,
    WantEvent.REFUSED: Want.REFUSED,
    WantEvent.LOADED: Want.LOADED,
    WantEvent.UNLOAD_ASKED: Want.UNLOADED,
    WantEvent.TRITON_RESTARTED: Want.WAITING,
}
# An event that a state does not have changes nothing: a try may end after somebody else has loaded
# or unloaded the model.
TRANSITIONS: Mapping[Want, Mapping[WantEvent, Want]] = {
    Want.WAITING: _TRIED,
    Want.FAILED: _TRIED,
    Want.REFUSED: _TRIED,
    Want.LOADED: {
        WantEvent.UNLOAD_ASKED: Want.UNLOADED,
        WantEvent.TRITON_RESTARTED: Want.WAITING,
    },
    Want.UNLOADED: {WantEvent.LOADED: Want.LOADED},
}
# Nothing is to be done, and readiness does not wait.
SETTLED = frozenset({Want.REFUSED, Want.LOADED, Want.UNLOADED})


@dataclass(slots=True)
class WantedModel:
    """`url` is where its files are, or its key in a store. `reason`: why the last load failed."""

    model_id: ModelId
    url: str
    state: Want = Want.WAITING
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.model_id!r} ({self.reason or self.state.value})"

    def apply(self, event: WantEvent, reason: str = "") -> bool:
        """Return whether the event meant anything to this model."""
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            return False
        self.state, self.reason = after, reason
        return True

    @property
    def is_settled(self) -> bool:
        return self.state in SETTLED


class Wants:
    """All models that are wanted from the start on, by id. `note` is told of each that is wanted no
    more.
    """

    def __init__(self, note: Callable[[ModelId], object] = str) -> None:
        self._note = note
        self._models: dict[ModelId, WantedModel] = {}

    def add(self, model: WantedModel) -> None:
        self._models[model.model_id] = model

    def models(self) -> list[WantedModel]:
        """Return all of them, those that callers have unloaded too."""
        return [*self._models.values()]

    def wanted(self) -> list[WantedModel]:
        """Return those that no caller has unloaded."""
        return [each for each in self._models.values() if each.state is not Want.UNLOADED]

    def count(self, is_ready: Callable[[ModelId], bool]) -> dict[str, int]:
        """Return how many are loaded, missing, unloaded; `is_ready`: does Triton serve it now?"""
        found = Counter[str]()
        for each in self._models.values():
            if each.state is Want.UNLOADED:
                found["unloaded"] += 1
            else:
                found["loaded" if is_ready(each.model_id) else "missing"] += 1
        return {state: found[state] for state in ("loaded", "missing", "unloaded")}

    def unload_asked(self, model_id: ModelId) -> bool:
        """Note that a caller has asked for the unload of a model; return whether it was wanted."""
        model = self._models.get(model_id)
        was_wanted = model is not None and model.apply(WantEvent.UNLOAD_ASKED)
        if was_wanted:
            self._note(model_id)
        return was_wanted

    @contextmanager
    def no_more(self, model_id: ModelId) -> Iterator[Callable[[], bool]]:
        """Note that an unload is asked for, and tell a caller who hears that the model is not
        loaded. To be called again when the unload has its turn: a load that was under way has made
        the model wanted again.
        """
        was_wanted = self.unload_asked(model_id)
        try:
            yield partial(self.unload_asked, model_id)
        except ModelNotFound as error:
            if was_wanted:
                error.args = (f"{error}; it is wanted no more, as an unload was asked for",)
            raise

    def loaded(self, model_id: ModelId, source: ModelSource) -> None:
        """Note that a model was loaded, whoever asked for it. One from elsewhere is another model,
        which the caller who brought it has to bring again.
        """
        model = self._models.get(model_id)
        if model is not None and (source.is_cached or _path(source.url) == _path(model.url)):
            model.apply(WantEvent.LOADED)

    def triton_restarted(self) -> None:
        """Take none for loaded."""
        for each in self._models.values():
            each.apply(WantEvent.TRITON_RESTARTED)


def _path(url: str) -> str:
    return url.removeprefix("file://").rstrip("/")
