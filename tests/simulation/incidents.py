"""Draw short scripts of operations and faults that chance seldom puts together.

They are drawn from a stream of their own, and played after all else of a shift.
"""

from random import Random

from tests.simulation.models import Entry, Spec
from tests.simulation.triton import LOAD_THREADS

# Seconds after the one before, the verb, and its words after the model.
_Step = tuple[float, str, tuple[object, ...]]
_SCRIPTS: tuple[tuple[_Step, ...], ...] = (
    (  # a process that dies while its model is loaded
        (1.0, "unload", (None,)),
        (10.0, "fault", ("load", "stub dies")),
        (0.0, "load", (None,)),
    ),
    (  # a load that hangs, and is to be ended
        (1.0, "unload", (None,)),
        (10.0, "fault", ("load", "hang")),
        (0.0, "load", (None,)),
        (5.0, "unload", (None,)),
    ),
    (  # a model that has lost its process, and is used all the same
        (1.0, "load", (None,)),
        (40.0, "stub", ()),
        *((3.0, "invoke", (1, None)) for _ in range(3)),
    ),
    (  # a model that says of one input after the other that memory was short
        (1.0, "load", (None,)),
        (40.0, "fault", ("infer", "echo")),
        (0.0, "invoke", (1, None)),
        (10.0, "fault", ("infer", "echo")),
        (0.0, "invoke", (1, None)),
    ),
)
_LAST_SECONDS = 10.0  # before the faults stop
_LOAD_SECONDS = 50.0  # in which a load is done


def drawn_incident(random: Random, names: list[str], ends: list[float]) -> list[Entry]:
    """Draw an incident in one of the shifts, which end at `ends`; some days have none."""
    if random.random() < 0.4:
        return []
    shift, name = random.randrange(len(ends)), random.choice(names)
    at, found = ends[shift], []
    for pause, verb, words in random.choice(_SCRIPTS):
        at += pause
        about = (words[0], name, *words[1:]) if verb == "fault" else (name, *words)
        found.append(Entry(shift, at, verb, about))
    return [*found, Entry(shift, at + _LAST_SECONDS, "version", (name,))]


def drawn_restart(random: Random, models: dict[str, Spec], shift: int, at: float) -> list[Entry]:
    """Draw the loads of a few small models, one after the other, and an end of Triton; in half of
    the days it ends again while they come back.
    """
    names = sorted(models, key=lambda name: models[name].takes)[: random.choice((2, 3))]
    found = []
    for name in names:
        found.append(Entry(shift, at, "load", (name, None)))
        at += _LOAD_SECONDS
    ends = [at, at + random.uniform(1.0, 15.0)]
    found += [Entry(shift, end, "crash", ()) for end in ends[: random.choice((1, 2))]]
    return found


def drawn_hangs(models: dict[str, Spec], shift: int, at: float, seconds: float) -> list[Entry]:
    """Return loads of a model, `seconds` apart, that Triton never ends: no thread is left for the
    last one.
    """
    names = [name for name in models if not models[name].is_python]
    name = min(names, key=lambda name: models[name].takes)
    found = [Entry(shift, at, "unload", (name, None))]
    for number in range(1, LOAD_THREADS + 1):
        found.append(Entry(shift, at + number * seconds, "fault", ("load", name, "hang")))
        found.append(Entry(shift, at + number * seconds, "load", (name, None)))
    return [*found, Entry(shift, at + (LOAD_THREADS + 1) * seconds, "load", (name, None))]
