"""What each loaded model takes, as far as readings show it.

Where a reading tells processes apart, as that of host memory does for python models, a model takes
what its own processes take: whatever else goes on. The rest, and all memory of GPUs, is shared
out by what happened between two readings (core/measuring.py).
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
    """`names` are the model's in Triton. `taken` and `most` were measured: at the last look, and
    at the most since the load; None while nothing was. `is_due`: its load is not measured yet.
    `is_apart`: all that it takes is in processes of its own.
    """

    package_key: str
    names: frozenset[str] = frozenset()
    taken: Bytes | None = None
    most: Bytes | None = None
    is_due: bool = False
    is_apart: bool = False


class Accounts:
    def __init__(self) -> None:
        self._models: dict[ModelId, _Account] = {}
        self._window, self._growth = Window(), Growth()
        self._requests_before = 0

    def add(self, model_id: ModelId, package_key: str) -> None:
        self._models[model_id] = _Account(package_key)

    def placed(self, model_id: ModelId, names: Collection[str]) -> None:
        """Triton will know it, and what it brings along, by these names."""
        self._models[model_id].names = frozenset(names)

    def forget(self, model_id: ModelId) -> Bytes | None:
        """The most that it was measured to take since its load; None when nothing was."""
        self._growth.forget(model_id)
        self._window.forget(model_id)
        account = self._models.pop(model_id, None)
        return account.most if account else None

    def key_of(self, model_id: ModelId) -> str:
        account = self._models.get(model_id)
        return account.package_key if account else ""

    def is_measured(self, model_id: ModelId) -> bool:
        account = self._models.get(model_id)
        return account is None or not account.is_due

    def taken(self, model_id: ModelId) -> Bytes:
        """At the last look."""
        account = self._models.get(model_id)
        return (account.taken if account else None) or NO_BYTES

    def in_processes(self, model_id: ModelId, reading: MemoryReading | None) -> int:
        """Bytes of the processes that are this model's alone."""
        account = self._models.get(model_id)
        if account is None or reading is None or not reading.of_models:
            return 0
        return sum(reading.of_models.get(name, 0) for name in account.names)

    def apart(self, model_id: ModelId) -> frozenset[str]:
        """Its names in Triton, where all that it takes is in processes of its own; else none."""
        account = self._models.get(model_id)
        return account.names if account is not None and account.is_apart else frozenset()

    @property
    def are_apart(self) -> bool:
        """Every model is in processes of its own: what is shared is Triton's."""
        return all(account.is_apart for account in self._models.values())

    # -- loads and unloads ------------------------------------------------------------------

    def open(self, reading: MemoryReading | None, requests: int) -> None:
        """A quiet moment: loads are measured from here. `requests` are those that have ended."""
        for account in self._models.values():
            account.is_due = False  # whatever was not measured never will be
        self._window.open(reading and reading.shared)
        self._growth.end(reading)
        self._requests_before = requests

    def loaded(
        self, model_id: ModelId, expected: Bytes, reading: MemoryReading | None, *, known: bool
    ) -> Measured | None:
        """A load ended well: what it takes, where its processes are told apart. `known`: what is
        expected is its own, and was measured.
        """
        account = self._models[model_id]
        if account.names and reading is not None and account.names <= _told_apart(reading):
            account.is_apart = True
            own = self.in_processes(model_id, reading)
            return self._measured(model_id, {HOST: own}, exact=True)
        account.is_due = reading is not None
        self._window.loaded(model_id, account.package_key, expected, known=known)
        return None

    def released(self, model_id: ModelId, held: Bytes) -> None:
        """A model left. One in processes of its own changes nothing that is shared."""
        account = self._models.get(model_id)
        if account is None or not account.is_apart:
            self._window.released(model_id, held)

    def disturbed(self) -> None:
        self._window.disturbed()

    def close(self, reading: MemoryReading | None, requests: int) -> list[Measured]:
        """The next quiet moment: what the loads took that are not told apart. `requests` are those
        that have begun; where they are others than had ended at the start, no load was alone.
        """
        if requests != self._requests_before:
            self._window.disturbed()
        for account in self._models.values():
            account.is_due = False
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
        """What has grown under traffic. `settled` is `reading` where it shows what traffic did,
        and nothing else; `active` are the models with requests since the last tick, `baseline` is
        what no model takes.

        Growth of host memory that is in no model's process is nobody's: Triton takes it to read
        large requests.
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
