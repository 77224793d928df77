"""What is simulated for docs/measurements.md: 10,000 models on 50 machines."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from adapter.core.artifacts import CacheUse
from adapter.core.model import ModelId
from scripts.simulation.clock import Clock
from scripts.simulation.fleet import BALANCE_FACTOR, TABLE_SIZE, Callers, Fleet, Seen, Traffic, zipf
from scripts.simulation.machine import Model, Size, Times
from scripts.simulation.maglev import Table, hash_of

Json = dict[str, Any]

GIB = 2**30
MODELS, MACHINES, EXPONENT = 10_000, 50, 1.0
SIZES = (GIB // 2, GIB, 2 * GIB)  # as many models of each; nothing to do with how often
MEMORY, DISK = 80 * GIB, 480 * GIB
TIMES = Times(
    call=0.05,
    load=0.5,
    load_per_byte=1 / (4 * GIB),
    unload=0.2,
    fetch=0.1,
    fetch_per_byte=1 / (GIB // 4),
)
CALLS_AT_A_TIME = 4
PAUSE_SECONDS = 2.0

FACTORS = (0, 110, 125, 150, 200, 300, 500)
DISKS = (100, 150, 200, 300, 480)  # GiB
WARM_UP, CALLS = 15_000, 30_000
LISTS = 200
_STEP = 2_000  # calls, of a point over time


@dataclass(frozen=True, slots=True)
class Load:
    """`hot`: the share of the calls that are of one model, whatever the others' shares are."""

    name: str
    callers: int
    hot: float = 0.0


LOADS = (
    Load("100 callers", 100),
    Load("400 callers", 400),
    Load("400 callers, half of their calls of one model", 400, hot=0.5),
)
_MIDDLE = LOADS[1]


def names(count: int) -> list[str]:
    return [f"machine-{number:02}" for number in range(count)]


def models(count: int = MODELS) -> list[Model]:
    sizes = [SIZES[number % len(SIZES)] for number in range(count)]
    random.Random(0).shuffle(sizes)  # noqa: S311 - nothing is secret
    return [Model(ModelId(f"m{rank}.tar.gz"), size) for rank, size in enumerate(sizes)]


class Run:
    """A fleet that has had its traffic for a while, and its callers."""

    def __init__(self, load: Load, factor: int, disk_bytes: int = DISK) -> None:
        self.clock = Clock()
        size = Size(MEMORY, disk_bytes, calls=CALLS_AT_A_TIME)
        known = models()
        self.fleet = Fleet(size, TIMES, self.clock, balance_factor=factor)
        self.fleet.join(*names(MACHINES))
        self.fleet.fill(known)
        weights = [weight * (1 - load.hot) for weight in zipf(MODELS, EXPONENT)]
        weights[0] += load.hot
        traffic = Traffic(known, weights, load.callers, PAUSE_SECONDS)
        self._callers = Callers(self.fleet, self.clock, traffic)

    def seen(self, calls: int) -> Json:
        """What so many calls saw. Bytes are those that all machines fetched, for each call."""
        fetched, begun = self.fleet.fetched_bytes, self.clock.now
        seen = self._callers.run(calls)
        return {
            **_shares(seen),
            "fetched_mib_per_call": (self.fleet.fetched_bytes - fetched) / 2**20 / seen.calls,
            "p50_seconds": seen.quantile(0.5),
            "p99_seconds": seen.quantile(0.99),
            "calls_per_second": seen.calls / (self.clock.now - begun),
            "in_flight_per_machine": sum(seen.seconds)
            / (self.clock.now - begun)
            / len(self.fleet.machines),
        }


def _shares(seen: Seen) -> Json:
    return {
        "hits": seen.share(CacheUse.HIT),
        "disk": seen.share(CacheUse.DISK),
        "misses": seen.share(CacheUse.MISS),
        "failed": seen.share(None),
        "away": seen.away / seen.calls,
    }


def balance() -> Iterator[Json]:
    """Against the balance factor."""
    for load in LOADS:
        for factor in FACTORS:
            yield {"load": load.name, "factor": factor, **steady(load, factor)}


def disks() -> Iterator[Json]:
    """Against the disk of each machine, without a bound and with the default."""
    for factor in (0, BALANCE_FACTOR):
        for disk in DISKS:
            found = steady(_MIDDLE, factor, disk * GIB)
            yield {"disk_gib": disk, "factor": factor, **found}


def steady(load: Load, factor: int, disk_bytes: int = DISK) -> Json:
    run = Run(load, factor, disk_bytes)
    run.seen(WARM_UP)
    return run.seen(CALLS)


def changes() -> Iterator[Json]:
    """Over time: one machine is killed, another comes for it, then ten more, and ten leave."""
    run = Run(_MIDDLE, BALANCE_FACTOR)
    run.seen(WARM_UP)
    calls, fleet = 0, run.fleet
    more = [f"machine-{number:02}" for number in range(MACHINES + 1, MACHINES + 11)]
    steps: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: None),
        ("1 of 50 is killed", lambda: fleet.leave("machine-07")),
        ("a new one comes", lambda: fleet.join(f"machine-{MACHINES}")),
        ("10 more come", lambda: fleet.join(*more)),
        ("10 are killed", lambda: fleet.leave(*more)),
    ]
    for what, change in steps:
        change()
        for step in range(6):
            yield {"calls": calls, "what": "" if step else what, **run.seen(_STEP)}
            calls += _STEP


def moved() -> Iterator[Json]:
    """How many of the models have another machine when one goes or comes: `needed` are those of
    the one that went, or came.
    """
    known = models()
    for before, after in ((3, 2), (3, 4), (4, 5), (10, 9), (10, 11), (50, 49), (50, 51)):
        yield {"machines": [before, after], **_moved(known, before, after, TABLE_SIZE)}


def _moved(known: list[Model], before: int, after: int, table_size: int) -> Json:
    tables = [Table(names(count), table_size) for count in (before, after)]
    homes = [[table.index_of(model.key) for model in known] for table in tables]
    pairs = [pair for pair in zip(*homes, strict=True) if pair[0] != pair[1]]
    needed = sum(max(pair) >= min(before, after) for pair in pairs)
    return {"moved": len(pairs) / len(known), "needed": needed / len(known)}


def tables() -> Iterator[Json]:
    """How many models move when one of the machines goes, against the table's size."""
    known = models()
    for size in (1021, 8191, TABLE_SIZE, 655_373):
        yield {"table_size": size, **_moved(known, MACHINES, MACHINES - 1, size)}


def shares() -> Iterator[Json]:
    """The models of the machine that has the most, over the mean, for many lists of names."""
    for machines, count in ((3, 100), (3, 1000), (10, 1000), (50, 10_000)):
        table = Table(names(machines), TABLE_SIZE)
        most = sorted(_most(table, f"list-{number}", count) for number in range(LISTS))
        mean = count / machines
        yield {
            "machines": machines,
            "models": count,
            "most": fmean(most) / mean,
            "most_of_95_percent": most[LISTS * 95 // 100] / mean,
        }


def _most(table: Table, folder: str, count: int) -> int:
    keys = (hash_of(f"{folder}/m{rank}.tar.gz") for rank in range(count))
    return max(Counter(map(table.index_of, keys)).values())
