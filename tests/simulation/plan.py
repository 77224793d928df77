"""Draw what happens in a run, first, as a list, so that a failure shrinks by leaving entries out.

A run is a simulated day of several shifts. In each an adapter starts with settings of its own, on
what the last one left behind; operations and faults come at drawn moments; then the faults stop,
the oracle looks at everything, and the adapter is stopped or killed.
"""

from dataclasses import dataclass, replace
from random import Random

from tests.simulation.catalog import Catalog, drawn_catalog
from tests.simulation.incidents import (
    drawn_hangs,
    drawn_incident,
    drawn_restart,
)
from tests.simulation.loop import Draws
from tests.simulation.memory import MIB
from tests.simulation.models import Entry, Spec, drawn_models, drawn_packages

# What may be done to an operation of a model, by the port's verb.
FAULTS = {
    "load": ("fail", "hang", "stub dies", "exit", "slow"),
    "answer": ("lost",),
    "unload": ("slow", "survives", "late"),
    "infer": ("fail", "echo"),
    "prepare": ("disk", "invalid", "missing"),
    "place": ("disk",),
    "confirm": ("disk",),
    "remove": ("disk",),
}
_ALONE_SECONDS = 60.0  # before and after which nothing else happens
_OPERATIONS = {"load": 6, "unload": 4, "invoke": 8, "version": 1}
_V2_OPERATIONS = {**_OPERATIONS, "reload": 2}
_KINDS = ("crash", "hang", "stub", "strangers", "unread", *FAULTS)


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds the settings of one adapter."""

    memory_limit: int | None
    reserve: int  # bytes of headroom
    loads_again: bool | None
    load_seconds: float
    unload_seconds: float
    warms_up: bool
    is_killed: bool
    is_v2: bool = False  # callers of V2's model repository call, in place of SageMaker


@dataclass(frozen=True, slots=True)
class Plan:
    """Lists a machine, its models, and what happens in each shift."""

    seed: int
    device_bytes: int  # of the first GPU, or of the host
    baseline: int  # bytes of Triton without models
    reader: str  # host, nvml, triton or off
    is_embedded: bool
    models: dict[str, Spec]
    shifts: tuple[Settings, ...]
    entries: tuple[Entry, ...]
    catalog: Catalog | None = None  # of an endpoint's store, on a day that has one
    more_gpus: tuple[int, ...] = ()  # bytes of each GPU beside the first


def drawn(seed: int) -> Plan:
    random = Draws(seed).of("plan")
    device_bytes = random.choice((500, 1000, 4000)) * MIB
    baseline = random.choice((20, 60)) * MIB
    is_embedded = random.random() < 0.7
    readers = (
        ("host", "host", "nvml", "triton", "off") if is_embedded else ("nvml", "triton", "off")
    )
    models = drawn_models(random, device_bytes - baseline)
    count = random.choice((1, 2, 3, 4))
    shifts = tuple(_shift(random, device_bytes) for _ in range(count))
    rates = {kind: random.choice((0, 0, 0, 1, 3)) for kind in _KINDS}
    entries = [
        entry for shift in range(count) for entry in _entries(random, shift, list(models), rates)
    ]
    entries += _bursts(Draws(seed).of("bursts"), count, list(models))
    entries.sort(key=lambda entry: (entry.shift, entry.at))
    reader = random.choice(readers)
    plan = Plan(seed, device_bytes, baseline, reader, is_embedded, models, shifts, tuple(entries))
    plan = _with_incident(plan)
    plan = _with_endpoint(plan)
    plan = _with_v2(plan)
    plan = _with_restart(plan)
    plan = _with_gpus(plan)
    return _with_hangs(plan)


def _with_gpus(plan: Plan) -> Plan:
    """Add GPUs of other sizes, in some days."""
    random = Draws(plan.seed).of("gpus")
    if plan.reader not in {"nvml", "triton"} or random.random() < 0.4:
        return plan
    sizes = [int(plan.device_bytes * random.choice((0.5, 1.0, 2.0))) for _ in range(3)]
    return replace(plan, more_gpus=tuple(sizes[: random.choice((1, 1, 3))]))


def _with_incident(plan: Plan) -> Plan:
    """Add a scripted incident, in some days."""
    shifts = range(len(plan.shifts))
    ends = [max((e.at for e in plan.entries if e.shift == shift), default=0.0) for shift in shifts]
    found = drawn_incident(Draws(plan.seed).of("incidents"), list(plan.models), ends)
    return replace(plan, entries=(*plan.entries, *found))


def _with_restart(plan: Plan) -> Plan:
    """End Triton at the end of a shift whose models come back then, in some days."""
    random = Draws(plan.seed).of("restarts")
    shift = random.randrange(len(plan.shifts))
    if plan.shifts[shift].is_v2 or random.random() < 0.85:
        return plan
    at = max((e.at for e in plan.entries if e.shift == shift), default=0.0) + _ALONE_SECONDS
    found = drawn_restart(random, plan.models, shift, at)
    shifts = [replace(s, loads_again=True) if n == shift else s for n, s in enumerate(plan.shifts)]
    return replace(plan, shifts=tuple(shifts), entries=(*plan.entries, *found))


def _with_hangs(plan: Plan) -> Plan:
    """Have a model hang in all load threads of an embedded Triton, at the end of some shift."""
    shift = min(range(len(plan.shifts)), key=lambda number: _undone_after(plan.shifts[number]))
    room = (plan.device_bytes - plan.baseline) // 10
    small = {name: each for name, each in plan.models.items() if each.takes < room}
    if (
        not plan.is_embedded
        or plan.catalog is not None
        or plan.shifts[shift].is_v2
        or all(each.is_python for each in small.values())
        or Draws(plan.seed).of("hangs").random() < 0.5
    ):
        return plan
    at = max((e.at for e in plan.entries if e.shift == shift), default=0.0) + _ALONE_SECONDS
    found = drawn_hangs(small, shift, at, _undone_after(plan.shifts[shift]))
    return replace(plan, entries=(*plan.entries, *found))


def _undone_after(shift: Settings) -> float:
    """Return so many seconds that a load which hangs is undone, or given up, by then."""
    return shift.load_seconds + shift.unload_seconds + _ALONE_SECONDS


def _with_endpoint(plan: Plan) -> Plan:
    """Add an endpoint, in some days."""
    catalog, more = drawn_catalog(plan.seed, plan.device_bytes - plan.baseline, len(plan.shifts))
    if catalog is None:
        return plan
    are_left_out = _OPERATIONS if catalog.is_alone else ()
    entries = [*more, *(each for each in plan.entries if each.verb not in are_left_out)]
    entries.sort(key=lambda entry: (entry.shift, entry.at))
    return replace(plan, entries=tuple(entries), catalog=catalog)


def _with_v2(plan: Plan) -> Plan:
    """Add a shift of V2's callers, with two packages of several models, in some days."""
    random = Draws(plan.seed).of("platforms")
    if random.random() < 0.5:
        return plan
    number = len(plan.shifts)
    shift = replace(_shift(random, plan.device_bytes), is_v2=True)
    models = plan.models | drawn_packages(random, plan.device_bytes - plan.baseline)
    rates = {kind: random.choice((0, 0, 0, 1, 3)) for kind in _KINDS}
    entries = _entries(random, number, list(plan.models), rates, is_v2=True)
    at = max((e.at for e in entries), default=0.0) + _ALONE_SECONDS
    entries.append(Entry(number, at, "unload", ("y", None)))
    for pause, verb in ((1, "load"), (2, "version"), (2, "load")):
        words = ("y",) if verb == "version" else ("y", None)
        entries.append(Entry(number, at + pause * _ALONE_SECONDS, verb, words))
    return replace(
        plan, models=models, shifts=(*plan.shifts, shift), entries=(*plan.entries, *entries)
    )


def _bursts(random: Random, count: int, names: list[str]) -> list[Entry]:
    """Draw moments at which all models are asked for at once."""
    found = []
    for shift in range(count):
        if random.random() < 0.3:
            at = random.uniform(0.0, 60.0)
            found += [Entry(shift, at, "load", (name, None)) for name in names]
    return found


def _shift(random: Random, device_bytes: int) -> Settings:
    return Settings(
        memory_limit=random.choice((None, None, device_bytes * 9 // 10)),
        reserve=random.choice((0, device_bytes // 20)),
        loads_again=random.choice((None, False, True)),
        load_seconds=random.choice((30.0, 60.0, 350.0)),
        unload_seconds=random.choice((40.0, 340.0)),
        warms_up=random.random() < 0.15,
        is_killed=random.random() < 0.4,
    )


def _operation(random: Random, names: list[str], *, is_v2: bool) -> tuple[str, tuple[object, ...]]:
    """Return a verb and its words."""
    operations = _V2_OPERATIONS if is_v2 else _OPERATIONS
    [verb] = random.choices([*operations], weights=[*operations.values()])
    name = random.choice([*names, *"yzyz"] if is_v2 else names)
    leaves = random.choice((0.0, 0.05, 0.5, 3.0)) if random.random() < 0.15 else None
    if verb == "invoke":
        return verb, (name, random.choice((1, 1, 3, 10)), leaves)
    if verb == "version":
        return verb, (name,)
    return verb, (name, leaves)


def _entries(
    random: Random, shift: int, names: list[str], rates: dict[str, int], *, is_v2: bool = False
) -> list[Entry]:
    found, at = [], 0.0
    pause = random.choice((0.3, 2.0, 10.0))
    total = sum(rates.values())
    share = random.choice((0.0, 0.1, 0.3)) if total else 0.0
    for _ in range(random.choice((5, 15, 40))):
        if random.random() < 0.6:
            at += random.expovariate(1 / pause)
        if random.random() < share:
            [kind] = random.choices([*rates], weights=[*rates.values()])
            found.append(_fault(random, shift, at, kind, names))
        else:
            found.append(Entry(shift, at, *_operation(random, names, is_v2=is_v2)))
    return found


def _fault(random: Random, shift: int, at: float, kind: str, names: list[str]) -> Entry:
    if kind in FAULTS:
        return Entry(shift, at, "fault", (kind, random.choice(names), random.choice(FAULTS[kind])))
    words: dict[str, tuple[object, ...]] = {
        "crash": (),
        "hang": (random.choice((0.5, 3.0, 15.0)),),
        "stub": (random.choice(names),),
        "strangers": (random.choice((50, 200)) * MIB, random.choice((1.0, 20.0, 300.0))),
        "unread": (random.choice((1.0, 20.0)),),
    }
    return Entry(shift, at, kind, words[kind])
