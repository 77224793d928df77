"""Estimates the memory that packages need, and learns from the models that are loaded."""

from adapter.core.ledger import Ledger
from adapter.core.measuring import Measured
from adapter.core.memory import Bytes, total
from adapter.core.model import ModelId, Package
from adapter.core.sizing import Basis, Estimate, Sizes
from adapter.telemetry.metrics import Metrics


class Learning:
    """Estimates and learns sizes. `relearned`: models with new figures; its reader clears it."""

    def __init__(self, ledger: Ledger, sizes: Sizes, metrics: Metrics) -> None:
        self.relearned: set[ModelId] = set()
        self._ledger = ledger
        self._sizes = sizes
        self._metrics = metrics

    def estimate(self, package: Package) -> Estimate:
        books = self._ledger.snapshot().devices
        return self._sizes.estimate(package, {d: book.index for d, book in books.items()})

    def learn(self, measured: Measured, expected: Estimate | None, *, was_wrong: bool) -> None:
        """Hold the most that the package was ever measured to take: it may grow to that again.

        `expected` is the estimate, where the measurement ends a load; `was_wrong`: the estimate was
        above the limit.
        """
        key, model_id = measured.package_key, measured.model_id
        if measured.exact and expected is not None:
            if expected.basis is not Basis.DEFAULT:
                ratio = total(expected.needs) / max(1, total(measured.bytes))
                self._metrics.prediction_ratio.labels(expected.basis.value).observe(ratio)
            if was_wrong:
                self._sizes.forget(key)
        self._sizes.learn(key, measured.bytes, exact=measured.exact)
        self._ledger.hold(model_id, self._sizes.learned(key) or {})
        self.relearned.add(model_id)

    def ended(self, model_id: ModelId, key: str, most: Bytes | None) -> None:
        """Note the most that a model, now gone, was measured to take; None: it was not measured."""
        self.relearned.discard(model_id)
        if most is not None and self._sizes.lived(key, most):
            self.relearned.add(model_id)
