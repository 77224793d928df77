"""Draw what an endpoint's day has, from a stream of its own: models in a store, and calls."""

from dataclasses import dataclass, replace
from random import Random

from adapter.packages.unpack import BLOCK_BYTES
from tests.simulation.cache import CACHE_FAULTS
from tests.simulation.loop import Draws
from tests.simulation.models import Entry, Spec, drawn_model
from tests.simulation.store import STORE_FAULTS, Item

_KEYS = "mnopqrstuvw"
_VERSIONS = 4
_MOST_BLOCKS = 6


@dataclass(frozen=True, slots=True)
class Terms:
    """The endpoint's settings of one adapter, by the names that they have there."""

    cache_limit: int | None
    pin: tuple[str, ...]
    idle_unload_seconds: float
    model_wait_seconds: float
    load_concurrency: int
    fetch_concurrency: int
    revalidate_seconds: float
    most_waiting: tuple[int, int]  # in all, for one


@dataclass(frozen=True, slots=True)
class Catalog:
    """Lists the models in the store of an endpoint."""

    versions: dict[str, tuple[Item, ...]]  # in the order of their numbers
    is_alone: bool  # no platform calls the adapter
    is_exact: bool  # a download that broke off may go on where it was
    disk_bytes: int  # of the disk of the cache
    terms: tuple[Terms, ...]

    def specs(self) -> list[Spec]:
        return [item.spec for items in self.versions.values() for item in items]


def drawn_catalog(seed: int, room: int, shifts: int) -> tuple[Catalog | None, list[Entry]]:
    """Draw whether the day is an endpoint's, and what happens in it then. `room`: as for models."""
    random = Draws(seed).of("catalog")
    kind = random.choice(("none", "none", "alone", "alone", "both"))
    if kind == "none":
        return None, []
    keys = _KEYS[: random.randint(2, len(_KEYS))]
    versions = {key: _versions(random, key, room) for key in keys}
    sizes = [
        max(item.size_bytes for item in items) + 4 * BLOCK_BYTES for items in versions.values()
    ]
    catalog = Catalog(
        versions,
        is_alone=kind == "alone",
        is_exact=random.random() < 0.7,
        disk_bytes=random.choice((2 * sum(sizes), sum(sizes) * 2 // 3)),
        terms=tuple(_terms(random, keys, sizes) for _ in range(shifts)),
    )
    rates = {kind: random.choice((0, 0, 0, 1, 3)) for kind in _FAULTS}
    entries = [entry for shift in range(shifts) for entry in _entries(random, shift, keys, rates)]
    return catalog, [*entries, *_brought_amid_renewal(Draws(seed).of("renewals"), catalog, entries)]


def _brought_amid_renewal(random: Random, catalog: Catalog, entries: list[Entry]) -> list[Entry]:
    """Draw a platform that asks for a model while its next version is loaded beside it."""
    shift, key = random.randrange(len(catalog.terms)), random.choice([*catalog.versions])
    if not (seconds := catalog.terms[shift].revalidate_seconds) or random.random() < 0.5:
        return []
    at = max((e.at for e in entries if e.shift == shift), default=0.0) + 60.0
    begun = at + 30.0
    return [
        Entry(shift, at, "put", (key, 0, 0.0)),
        Entry(shift, at, "ask", (key, 1, None)),
        Entry(shift, begun, "fault", ("load", key, "slow")),
        Entry(shift, begun, "put", (key, 1, 0.0)),
        Entry(shift, begun + seconds + random.uniform(1.0, 10.0), "bring", (key, None)),
    ]


def _versions(random: Random, key: str, room: int) -> tuple[Item, ...]:
    spec, is_folder = drawn_model(key, random, room), random.random() < 0.6
    found = []
    for number in range(_VERSIONS):
        takes = int(spec.takes * random.choice((0.9, 1.0, 1.1)))
        declared = spec.declared and int(spec.declared * takes / spec.takes)
        size = random.randint(1, _MOST_BLOCKS) * BLOCK_BYTES - random.choice((0, 100))
        changed = replace(spec, version=number, takes=takes, declared=declared)
        found.append(Item(changed, size, is_folder))
    return tuple(found)


def _terms(random: Random, keys: str, sizes: list[int]) -> Terms:
    return Terms(
        cache_limit=random.choice((None, sum(sizes), max(*sizes, sum(sizes) // 2))),
        pin=tuple(random.sample(keys, random.choice((0, 0, 1)))),
        idle_unload_seconds=random.choice((0.0, 0.0, 5.0, 60.0)),
        model_wait_seconds=random.choice((2.0, 20.0, 55.0)),
        load_concurrency=random.choice((1, 2, 4)),
        fetch_concurrency=random.choice((1, 4)),
        revalidate_seconds=random.choice((0.0, 2.0, 30.0)),
        most_waiting=random.choice(((256, 32), (256, 32), (6, 3))),
    )


# What may be done to models on demand, beside what goes wrong in Triton and on its disk.
_FAULTS: dict[str, tuple[str, ...]] = {
    **STORE_FAULTS,
    **CACHE_FAULTS,
    "load": ("fail", "hang", "stub dies", "exit", "slow"),
    "unload": ("slow", "survives", "late"),
    "infer": ("fail", "echo"),
    "prepare": ("disk", "invalid"),
    "place": ("disk",),
    "remove": ("disk",),
}


def _entries(random: Random, shift: int, keys: str, rates: dict[str, int]) -> list[Entry]:
    found, at = [], 0.0
    pause = random.choice((0.1, 0.5, 3.0, 10.0))
    skew = random.choice((0.5, 1.0, 1.5))
    weights = [1 / (rank + 1) ** skew for rank in range(len(keys))]
    share = random.choice((0.0, 0.1, 0.3)) if sum(rates.values()) else 0.0
    for _ in range(random.choice((10, 30, 80))):
        if random.random() < 0.7:
            at += random.expovariate(1 / pause)
        [key] = random.choices(keys, weights=weights)
        if random.random() < share:
            [kind] = random.choices([*rates], weights=[*rates.values()])
            words = (kind, "" if kind == "check" else key, random.choice(_FAULTS[kind]))
            found.append(Entry(shift, at, "fault", words))
        else:
            found.append(_act(random, shift, at, key))
    return found


def _act(random: Random, shift: int, at: float, key: str) -> Entry:
    verbs = {"ask": 20, "put": 2, "lose": 0.3, "delete": 1, "bring": 0.5, "fill": 0.7, "stub": 0.3}
    [verb] = random.choices([*verbs], weights=[*verbs.values()])
    leaves = random.choice((0.0, 0.05, 0.5, 3.0)) if random.random() < 0.15 else None
    words: dict[str, tuple[object, ...]] = {
        "ask": (key, random.choice((1, 1, 1, 3, 10)), leaves),
        "put": (key, random.randrange(_VERSIONS), random.choice((0.0, 0.1, 2.0))),
        "lose": (key, random.choice((1.0, 10.0))),
        "delete": (key, leaves),
        "bring": (key, leaves),
        "fill": (random.randint(1, 30) * BLOCK_BYTES, random.choice((1.0, 20.0))),
        "stub": (key,),
    }
    return Entry(shift, at, verb, words[verb])
