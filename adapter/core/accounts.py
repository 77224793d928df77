"""Keeps what each loaded model takes, as far as readings show it.

Where a reading tells processes apart, as that of host memory does for python models, a model takes
what its own processes take, whatever else is going on. The rest, and all memory of GPUs, is
attributed by what happened between two readings (core/measuring.py).
"""

from collections.abc import Collection
from dataclasses import dataclass

from adapter.core.measuring import Growth, Measured, Window
from adapter.core.memory import HOST, NO_BYTES, Bytes, MemoryReading, minus, most_of, plus, total
from adapter.core.model import ModelId

# Growth below this is noise.
_NOISE_BYTES = 2**20


@dataclass(slots=True)
class _Account:
    """One loaded model. `names` are its names in Triton. `taken`: the last measurement, `most`: the
    highest since the load; None before the first. `is_apart`: all that the model takes is in
    processes of its own.
    """

    package_key: str
    names: frozenset[str] = frozenset()
    taken: Bytes | None = None
    most: Bytes | None = None
    is_apart: bool = False


class Accounts:
    def __init__(self) -> None:
        self._models: dict[ModelId, _Account] = {}
        self._due: set[ModelId] = set()  # their loads are not measured yet
        self._window, self._growth = Window(), Growth()
        self._requests_before = 0

    def add(self, model_id: ModelId, package_key: str) -> None:
        self._models[model_id] = _Account(package_key)

    def placed(self, model_id: ModelId, names: Collection[str]) -> None:
        """Set the names in Triton of the model and of its helpers and steps."""
        self._models[model_id].names = frozenset(names)

    def forget(self, model_id: ModelId) -> Bytes | None:
        """Remove the model; return the most it was measured to take since its load, or None."""
        self._growth.forget(model_id)
        self._window.forget(model_id)
        self._due.discard(model_id)
        account = self._models.pop(model_id, None)
        return account.most if account else None

    def key_of(self, model_id: ModelId) -> str:
        account = self._models.get(model_id)
        return account.package_key if account else ""

    def is_measured(self, model_id: ModelId) -> bool:
        return model_id not in self._due

    def taken(self, model_id: ModelId) -> Bytes:
        """Return the last measurement of the model."""
        account = self._models.get(model_id)
        return (account.taken if account else None) or NO_BYTES

    def in_processes(self, model_id: ModelId, reading: MemoryReading | None) -> int:
        """Return the bytes of the processes that belong to this model alone."""
        account = self._models.get(model_id)
        if account is None or reading is None or not reading.of_models:
            return 0
        return sum(reading.of_models.get(name, 0) for name in account.names)

    def apart(self, model_id: ModelId) -> frozenset[str]:
        """Return the names in Triton of a model in processes of its own; of any other none."""
        account = self._models.get(model_id)
        return account.names if account is not None and account.is_apart else frozenset()

    @property
    def are_apart(self) -> bool:
        """Whether every model is in processes of its own: shared memory is Triton's then."""
        return all(account.is_apart for account in self._models.values())

    # -- loads and unloads ------------------------------------------------------------------

    def open(self, reading: MemoryReading | None, requests: int) -> None:
        """Start measuring at a quiet moment. `requests`: how many inferences have ended."""
        self._due.clear()  # what is not measured by now never will be
        self._window.open(reading and reading.shared)
        self._growth.end(reading)
        self._requests_before = requests

    def loaded(
        self, model_id: ModelId, expected: Bytes, reading: MemoryReading | None, *, known: bool
    ) -> Measured | None:
        """Note a successful load; return its measurement if the reading tells its processes apart.

        `known`: `expected` was learned from this very package.
        """
        account = self._models[model_id]
        if account.names and reading is not None and account.names <= _told_apart(reading):
            account.is_apart = True
            own = self.in_processes(model_id, reading)
            return self._measured(model_id, {HOST: own}, exact=True)
        if reading is not None:
            self._due.add(model_id)
        self._window.loaded(model_id, account.package_key, expected, known=known)
        return None

    def released(self, model_id: ModelId, held: Bytes) -> None:
        """Note an unload. That of a model in processes of its own frees no shared memory."""
        account = self._models.get(model_id)
        if account is None or not account.is_apart:
            self._window.released(model_id, held)

    def disturbed(self) -> None:
        self._window.disturbed()

    def close(self, reading: MemoryReading | None, requests: int) -> list[Measured]:
        """Measure, at the next quiet moment, the loads that readings do not tell apart.

        `requests`: how many inferences have begun; if more than had ended at `open`, no load was
        alone, and no measurement is exact.
        """
        if requests != self._requests_before:
            self._window.disturbed()
        self._due.clear()
        found = []
        for part in self._window.close(reading and reading.shared):
            own = self.in_processes(part.model_id, reading)
            taken = plus(part.bytes, {HOST: own}) if own else part.bytes
            found.append(self._measured(part.model_id, taken, exact=part.exact))
        self._growth.begin(reading)
        return found

    # -- in between -------------------------------------------------------------------------

    def tick(
        self,
        reading: MemoryReading | None,
        settled: MemoryReading | None,
        active: Collection[ModelId],
        baseline: Bytes,
    ) -> list[Measured]:
        """Return the models that have grown under traffic.

        `settled` is `reading` if it shows only what traffic did, else None. `active`: the models
        with requests since the last tick. `baseline`: what no model takes. Growth of host memory
        outside the models' processes is attributed to none: Triton needs it for large requests.
        """
        found = []
        for model_id, account in self._models.items():
            own = self.in_processes(model_id, reading) if account.is_apart else 0
            if own:
                account.taken = {HOST: own}
                found += self._grown(model_id, account, account.taken)
        if settled is None or settled.of_models is None:
            grown = self._growth.tick(settled, active, baseline)
            if grown is not None:
                model_id, taken = grown
                found += self._grown(model_id, self._models[model_id], taken)
        return found

    def _grown(self, model_id: ModelId, account: _Account, taken: Bytes) -> list[Measured]:
        if total(minus(taken, account.most or NO_BYTES)) < _NOISE_BYTES:
            return []
        return [self._measured(model_id, taken, exact=True)]

    def _measured(self, model_id: ModelId, taken: Bytes, *, exact: bool) -> Measured:
        account = self._models[model_id]
        if exact:
            most = account.most or NO_BYTES
            account.taken = taken
            account.most = most_of(most, taken)
            if not account.is_apart:
                self._growth.measured(model_id, taken)
        return Measured(model_id, account.package_key, taken, exact)


def _told_apart(reading: MemoryReading) -> frozenset[str]:
    return frozenset(reading.of_models or ())
