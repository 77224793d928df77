"""Callers who ask a fleet for its models, and what became of each call."""

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, islice

from tests.fleet.envoy import RunningEnvoy
from tests.fleet.machines import invoke
from tests.running import Client


@dataclass(frozen=True, slots=True)
class Call:
    """Is what became of one call. `status` 0: the connection broke."""

    number: int
    status: int
    cache: str
    machine: str
    is_right: bool


@dataclass
class Calls:
    done: list[Call] = field(default_factory=list)

    @property
    def failed(self) -> list[Call]:
        return [each for each in self.done if each.status != 200]

    @property
    def hit_ratio(self) -> float:
        """The share of calls whose model was in memory; those that failed count as misses."""
        return sum(each.cache == "hit" and each.status == 200 for each in self.done) / len(
            self.done
        )

    def machines_of(self, number: int) -> Counter[str]:
        return Counter(each.machine for each in self.done if each.number == number)

    def wrong(self) -> list[Call]:
        return [each for each in self.done if not each.is_right]


def zipf(models: int, exponent: float = 1.0) -> list[float]:
    """Return how often each model is asked for, in proportion; the first one most."""
    return [1 / rank**exponent for rank in range(1, models + 1)]


def choices(weights: Sequence[float], seed: int) -> Iterator[int]:
    """Draw models, by their places in `weights`."""
    drawn, sums = random.Random(seed), list(accumulate(weights))
    while True:
        yield from drawn.choices(range(len(weights)), cum_weights=sums, k=1000)


def ask(envoy: RunningEnvoy, names: Sequence[str], numbers: Iterator[int], callers: int) -> Calls:
    """Each caller asks for the next number when it has its answer, until there are no more."""
    calls, lock = Calls(), threading.Lock()

    def one() -> None:
        with closing(envoy.client(timeout=120)) as client:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                calls.done.append(_call(client, names, number))

    with ThreadPoolExecutor(callers) as pool:
        for each in [pool.submit(one) for _ in range(callers)]:
            each.result()
    return calls


def _call(client: Client, names: Sequence[str], number: int) -> Call:
    try:
        answer = invoke(client, names[number])
    except OSError:
        return Call(number, 0, "", "", is_right=True)
    is_right = answer.status != 200 or answer.value == number
    return Call(number, answer.status, answer.cache, answer.machine, is_right)


def some(weights: Sequence[float], seed: int, calls: int) -> Iterator[int]:
    return islice(choices(weights, seed), calls)


@contextmanager
def going_on(envoy: RunningEnvoy, names: Sequence[str], callers: int, seed: int) -> Iterator[Calls]:
    """Callers ask for all models alike as long as it lasts; then `Calls` has all their calls."""
    ended = threading.Event()

    def numbers() -> Iterator[int]:
        for number in choices([1] * len(names), seed):
            if ended.is_set():
                return
            yield number

    calls = Calls()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, envoy, names, numbers(), callers)
        try:
            yield calls
        finally:
            ended.set()
        calls.done = asked.result().done


def homes(envoy: RunningEnvoy, names: Sequence[str]) -> dict[str, str]:
    """Return the machine of each model, asked one after the other, so that none is passed over."""
    with closing(envoy.client(timeout=120)) as client:
        return {name: _home(client, name) for name in names}


def _home(client: Client, name: str) -> str:
    """Return who answered at the first attempt: another one only steps in."""
    for _ in range(5):
        answer = invoke(client, name)
        assert answer.status == 200, answer.body
        if answer.attempts == 1:
            return answer.machine
    raise AssertionError(f"{name}: never answered at the first attempt")


def moved(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [name for name, home in before.items() if after[name] != home]
