"""Who waits for which model of a store, and the failures that are answered without another try."""

from collections import Counter
from collections.abc import Iterator

from adapter.control.desired import DesiredModel
from adapter.core.artifacts import ArtifactKey
from adapter.core.desired import OF_THE_FILES, Reason
from adapter.core.model import ModelId
from adapter.core.residency.waiting import WaitLimits
from adapter.runtime import clock

_REFUSED_SECONDS = 5.0  # after an error that the next try would meet as well
_MOST_REFUSED = 1024


class Waits:
    """All waits by the model's id: each lasts while it has callers or a task."""

    def __init__(self, limits: WaitLimits, reason: Reason) -> None:
        self.callers: Counter[str] = Counter()  # of all models
        self._limits, self._reason = limits, reason
        self._waits: dict[ModelId, DesiredModel] = {}  # they begin before the model's record
        self._refused: dict[ModelId, tuple[Exception, float]] = {}  # and these outlive it

    def __iter__(self) -> Iterator[DesiredModel]:
        return iter([*self._waits.values()])

    def get(self, model_id: ModelId) -> DesiredModel | None:
        return self._waits.get(model_id)

    @property
    def count(self) -> int:
        """How many callers have no lease yet."""
        return self.callers.total()

    def is_awaited(self, model_id: ModelId) -> bool:
        """Return whether a caller waits for the model."""
        wait = self._waits.get(model_id)
        return wait is not None and bool(wait.callers)

    def of(self, model_id: ModelId, key: ArtifactKey) -> DesiredModel:
        """Return the wait for the model. The caller adds itself or a task before it awaits."""
        return self._waits.setdefault(model_id, DesiredModel(model_id, self._reason, key=key))

    def begin(self, model_id: ModelId, key: ArtifactKey, caller: str = "") -> DesiredModel:
        """Add one waiting call of `caller`, who is to call `end`."""
        self.refuse_one_more(model_id, caller)
        wait = self.of(model_id, key)
        for callers in (wait.callers, self.callers):
            callers[caller] += 1
        return wait

    def refuse_one_more(self, model_id: ModelId, caller: str = "") -> None:
        """Raise TooManyWaiting if as many calls wait as may."""
        wait, own = self._waits.get(model_id), self.callers[caller] if caller else 0
        for_one = wait.callers.total() if wait else 0
        self._limits.refuse_one_more(model_id, self.count, for_one, own)

    def end(self, wait: DesiredModel, caller: str = "") -> None:
        """Remove one waiting call of `caller`."""
        for callers in (wait.callers, self.callers):
            callers[caller] -= 1
            if not callers[caller]:
                del callers[caller]
        self._tidy(wait)

    def task_ended(self, wait: DesiredModel, error: BaseException | None) -> None:
        """Remember an error that the next try would meet as well."""
        wait.task = None
        if isinstance(error, OF_THE_FILES):
            while len(self._refused) >= _MOST_REFUSED:
                del self._refused[next(iter(self._refused))]
            self._refused[wait.model_id] = (error, clock.monotonic() + _REFUSED_SECONDS)
        self._tidy(wait)

    def _tidy(self, wait: DesiredModel) -> None:
        if not wait.callers and wait.task is None:
            self._waits.pop(wait.model_id, None)

    def refuse_known(self, model_id: ModelId) -> None:
        """Raise a failure that was met a moment ago, unless another try is under way."""
        error, until = self._refused.get(model_id, (None, 0.0))
        if error is None or model_id in self._waits:
            return
        if clock.monotonic() < until:
            raise error.with_traceback(None)
        del self._refused[model_id]
