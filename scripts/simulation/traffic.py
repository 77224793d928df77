"""Traffic for the measurement of evictions: models, the room for them, and who is called when."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

CALLS = 2000  # of which the first quarter is not counted
_GIB = 2**30
_RARE = 0.0113


@dataclass(frozen=True, slots=True)
class Trace:
    """`sizes` and `seconds` of models by number: their bytes, and what a fetch and a load take.
    `calls`: the number of the model of each call. Calls are not counted before `from_call`.
    """

    sizes: Sequence[int]
    seconds: Sequence[float]
    room: int
    calls: Sequence[int]
    from_call: int = CALLS // 4


def _weights(count: int, exponent: float) -> list[float]:
    return [rank**-exponent for rank in range(1, count + 1)]


def _alike(models: int, room: int, calls: Sequence[int], from_call: int = CALLS // 4) -> Trace:
    """Models of 1 GiB, each of which takes 3 s to fetch and load."""
    return Trace([_GIB] * models, [3.0] * models, room * _GIB, calls, from_call)


def zipf(draw: random.Random) -> Trace:
    """A Zipf mix: models of 32 to 256 MiB, and room for a tenth of the bytes."""
    sizes = [size * 2**20 for size in (32, 64, 128, 256) for _ in range(10)]
    draw.shuffle(sizes)
    calls = draw.choices(range(40), _weights(40, 1.2), k=CALLS)
    return Trace(sizes, [1 + size / 2**27 for size in sizes], sum(sizes) // 10, calls)


def rhythm(draw: random.Random) -> Trace:
    """Two days; each model has an hour of the day at which most of its calls come."""
    count, weights, calls = 120, _weights(120, 0.9), []
    draw.shuffle(weights)
    reached = list(accumulate(weights))
    peaks = [draw.random() for _ in range(count)]
    for number in range(CALLS):
        day = number * 2 / CALLS
        while True:
            (model,) = draw.choices(range(count), cum_weights=reached)
            if draw.random() < (1 + math.cos(2 * math.pi * (day - peaks[model]))) / 2:
                break
        calls.append(model)
    return _alike(count, 25, calls)


def scan(draw: random.Random) -> Trace:
    """A hot set that fits; every 700 calls each of 100 other models is called once, in a row."""
    hot, weights = range(30), _weights(30, 0.8)
    calls: list[int] = []
    while len(calls) < CALLS:
        calls += draw.choices(hot, weights, k=700)
        for model in draw.sample(range(30, 130), 100):
            calls += [model, *draw.choices(hot, weights, k=2)]
    return _alike(130, 35, calls[:CALLS])


def rare(draw: random.Random) -> Trace:
    """1.13 % of the calls are of 300 rare models; the others' 24 models fit, with room for 3."""
    hot, weights = range(24), _weights(24, 0.9)
    common = draw.choices(hot, weights, k=3 * CALLS)
    calls = [draw.randrange(24, 324) if draw.random() < _RARE else model for model in common]
    return _alike(324, 27, calls, len(calls) // 4)


def change(draw: random.Random) -> Trace:
    """After 4,000 calls others are called; what follows is counted."""
    calls, names = [], list(range(100))
    for _ in range(2):
        draw.shuffle(names)
        calls += draw.choices(names, _weights(100, 1.0), k=2 * CALLS)
    return _alike(100, 20, calls[: 3 * CALLS], 2 * CALLS)


def sizes(draw: random.Random) -> Trace:
    """Sizes 1:64; a load takes 0.5 s and a second for each 4 GiB: 0.75 to 16.5 s."""
    gib = [2 ** draw.uniform(0, 6) for _ in range(100)]
    calls = draw.choices(range(100), _weights(100, 1.0), k=CALLS)
    found = [int(size * _GIB) for size in gib]
    return Trace(found, [0.5 + size / 4 for size in gib], sum(found) // 8, calls)


def loads(draw: random.Random) -> Trace:
    """Models of one size; a load takes 0.2 to 60 s."""
    calls = draw.choices(range(100), _weights(100, 1.0), k=CALLS)
    return Trace([_GIB] * 100, [0.2 * 300 ** draw.random() for _ in range(100)], 20 * _GIB, calls)


@dataclass(frozen=True, slots=True)
class Kind:
    """`most`: what the mean over the seeds is to be at most, over that of LRU."""

    name: str
    trace: Callable[[random.Random], Trace]
    most: float = 1.02


KINDS = (
    Kind("Zipf mix", zipf),
    Kind("a day's rhythm", rhythm),
    Kind("a scan over a hot set", scan),
    Kind("1.13 % rare calls", rare),
    Kind("other models become hot", change),
    Kind("sizes 1:64, loads of 0.75 to 16.5 s", sizes, 0.7),
    Kind("loads of 0.2 to 60 s", loads, 0.7),
)
