"""Machines behind an Envoy, and the callers in front of it."""

import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from adapter.core.artifacts import CacheUse
from scripts.simulation.clock import Clock
from scripts.simulation.machine import Machine, Model, Size, Times
from scripts.simulation.maglev import BoundedTable, Table


def _configured(name: str) -> int:
    """Return a number of the configuration that deploy/fleet/generate writes by default."""
    path = Path(__file__).resolve().parents[2] / "deploy" / "fleet" / "envoy.yaml"
    [number] = set(re.findall(rf"\b{name}: (\d+)", path.read_text(encoding="utf-8")))
    return int(number)


BALANCE_FACTOR = _configured("hash_balance_factor")
TABLE_SIZE = _configured("table_size")
_RETRIES, _SELECTIONS = _configured("num_retries"), _configured("host_selection_retry_max_attempts")

Ended = Callable[["Call"], object]


@dataclass(slots=True, eq=False)
class Call:
    """`tried`: the machines that it was sent to, in order. `use`: None if it failed."""

    model: Model
    begun: float
    ended: Ended
    tried: list[Machine] = field(default_factory=list)
    use: CacheUse | None = None
    is_over: bool = False


def chosen(
    table: BoundedTable,
    key: int,
    in_flight: Sequence[int],
    all_in_flight: int,
    tried: Sequence[int],
) -> int:
    """Return the place in the table's machines of the one that a call is sent to, again if it was
    tried at others before.
    """
    at = table.index_of(key, in_flight, all_in_flight)
    for attempt in range(1, _SELECTIONS + 1):
        if at not in tried:
            break
        at = table.index_of(key, in_flight, all_in_flight, attempt)
    return at


class Fleet:
    """`balance_factor` is Envoy's hash_balance_factor."""

    def __init__(
        self,
        size: Size,
        times: Times,
        clock: Clock,
        *,
        balance_factor: int = BALANCE_FACTOR,
    ) -> None:
        self.machines: list[Machine] = []
        self.fetched_before = 0  # bytes, by machines that have left
        self._size, self._times, self._clock = size, times, clock
        self._factor = balance_factor
        self._in_flight = 0
        self._calls: set[Call] = set()

    @property
    def fetched_bytes(self) -> int:
        return self.fetched_before + sum(each.fetched_bytes for each in self.machines)

    def join(self, *names: str) -> None:
        """Add machines with nothing in memory or on disk."""
        self.machines += [Machine(name, self._size, self._times, self._clock) for name in names]
        self._changed()

    def leave(self, *names: str) -> None:
        """Kill these machines: the calls that they have fail."""
        gone = [each for each in self.machines if each.name in names]
        self.machines = [each for each in self.machines if each not in gone]
        self.fetched_before += sum(each.fetched_bytes for each in gone)
        self._changed()
        for call in [each for each in self._calls if each.tried[-1] in gone]:
            self._end(call, None)

    def _changed(self) -> None:
        table = Table([each.name for each in self.machines], TABLE_SIZE)
        self.table = BoundedTable(table, self._factor)

    def home(self, model: Model) -> Machine:
        """Return the machine that has the model while none is overloaded."""
        return self.machines[self.table.table.index_of(model.key)]

    def fill(self, models: Sequence[Model]) -> None:
        """Put the models onto their machines, as far as there is room: the first ones first."""
        for model in models:
            self.home(model).fill(model)

    def call(self, model: Model, ended: Ended) -> None:
        call = Call(model, self._clock.now, ended)
        self._calls.add(call)
        self._send(call)

    def _send(self, call: Call) -> None:
        in_flight = [each.in_flight for each in self.machines]
        tried = [self.machines.index(each) for each in call.tried if each in self.machines]
        machine = self.machines[
            chosen(self.table, call.model.key, in_flight, self._in_flight, tried)
        ]
        call.tried.append(machine)
        machine.in_flight += 1
        self._in_flight += 1
        machine.call(call.model, lambda use: self._answered(call, machine, use))

    def _answered(self, call: Call, machine: Machine, use: CacheUse | None) -> None:
        if call.is_over:  # its machine was killed meanwhile
            return
        if use is None and len(call.tried) <= _RETRIES:
            machine.in_flight -= 1
            self._in_flight -= 1
            self._send(call)
        else:
            self._end(call, use)

    def _end(self, call: Call, use: CacheUse | None) -> None:
        call.tried[-1].in_flight -= 1
        self._in_flight -= 1
        self._calls.remove(call)
        call.use, call.is_over = use, True
        call.ended(call)


def zipf(count: int, exponent: float) -> list[float]:
    """Return how often each of so many models is asked for, the first the most; the sum is 1."""
    weights = [rank**-exponent for rank in range(1, count + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


class Seen:
    """What happened to the calls. `uses`: by CacheUse, None for those that failed. `away`: calls
    that another machine than the model's own answered.
    """

    def __init__(self) -> None:
        self.uses: Counter[CacheUse | None] = Counter()
        self.machines: Counter[str] = Counter()
        self.away = 0
        self.seconds = array("d")

    @property
    def calls(self) -> int:
        return self.uses.total()

    def share(self, use: CacheUse | None) -> float:
        return self.uses[use] / self.calls

    def quantile(self, part: float) -> float:
        """Return the seconds that so large a part of the calls took at most."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Traffic:
    """`callers` each call again once they were answered, after a pause of exponentially distributed
    length with this mean. `weights`: how often each model is asked for.
    """

    models: Sequence[Model]
    weights: Sequence[float]
    callers: int
    pause_seconds: float = 0.0
    seed: int = 0


class Callers:
    def __init__(self, fleet: Fleet, clock: Clock, traffic: Traffic) -> None:
        self.seen = Seen()
        self._fleet, self._clock, self._traffic = fleet, clock, traffic
        self._dice = random.Random(traffic.seed)  # noqa: S311 - nothing is secret
        self._sums = list(accumulate(traffic.weights))
        for _ in range(traffic.callers):
            self._pause()

    def run(self, calls: int) -> Seen:
        """Let so many calls be answered, and return what was seen of them."""
        self.seen = Seen()
        self._clock.run(lambda: self.seen.calls >= calls)
        return self.seen

    def _pause(self) -> None:
        mean = self._traffic.pause_seconds
        self._clock.after(self._dice.expovariate(1 / mean) if mean else 0.0, self._call)

    def _call(self) -> None:
        [model] = self._dice.choices(self._traffic.models, cum_weights=self._sums)
        self._fleet.call(model, self._ended)

    def _ended(self, call: Call) -> None:
        seen = self.seen
        seen.uses[call.use] += 1
        machine = call.tried[-1]
        seen.machines[machine.name] += 1
        seen.away += machine is not self._fleet.home(call.model)
        seen.seconds.append(self._clock.now - call.begun)
        self._pause()
