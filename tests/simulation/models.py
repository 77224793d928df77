"""The models of a run: what their files are and really take; calls for them, and what is wrong."""

from dataclasses import dataclass, replace
from random import Random

from tests.simulation.memory import MIB

NAMES = "abcdefgh"
SIZE_FACTOR = 1.25  # of the size on disk, what a load is supposed to take


@dataclass(frozen=True, slots=True)
class Spec:
    """Describes one version of a model, which may be a package of several models."""

    model_id: str
    version: int
    is_python: bool  # in processes of its own
    takes: int  # bytes after its load
    declared: int | None  # bytes, by its config
    grows: int  # bytes more under traffic, at most
    seconds: float  # of its load
    steps: int = 0  # further models, of an ensemble
    helpers: int = 0  # further models, which its Python code calls
    whole: "Spec | None" = None  # the package, of one of its parts

    @property
    def package(self) -> "Spec":
        return self.whole or self

    def parts(self) -> list["Spec"]:
        """Return the models of the package: helpers and steps, and the entry, which of an ensemble
        takes next to nothing.
        """
        others = self.helpers + self.steps
        if not others:
            return [self]
        share = self.takes // (others if self.steps else others + 1)
        part = replace(self, takes=share, declared=None, grows=0, steps=0, helpers=0, whole=self)
        entry = replace(part, takes=self.takes - share * others, steps=self.steps)
        if self.steps:
            return [*[part] * others, replace(entry, is_python=False)]
        return [*[part] * others, replace(entry, grows=self.grows)]

    @property
    def url(self) -> str:
        return f"/models/{self.model_id}@{self.version}"


def steps_of(name: str, spec: Spec) -> list[str]:
    """Return the names in Triton of the steps of the ensemble under this name."""
    return [f"{name}.s{number}" for number in range(spec.steps)]


@dataclass(frozen=True, slots=True)
class Entry:
    """Is one operation or fault of a shift."""

    shift: int
    at: float  # seconds after the begin of the shift
    verb: str
    words: tuple[object, ...] = ()  # as the verb needs them

    def __str__(self) -> str:
        return f"{self.at:.1f} s: {' '.join(map(str, (self.verb, *self.words)))}"


@dataclass(slots=True)
class Call:
    """A caller's load, unload or inference, since `begun`. `extra`: the seconds that others' calls
    for the model may take before it.
    """

    verb: str
    model_id: str
    begun: float
    extra: float = 0.0


class Violated(Exception):
    """Raised by the oracle when a rule is broken."""

    def __init__(
        self,
        rule: str,  # its number and name
        said: str,  # the text
    ) -> None:
        super().__init__(f"{rule}: {said}")
        self.rule = rule
        self.said = said


def drawn_models(random: Random, room: int) -> dict[str, Spec]:
    """Draw models of which some, not all, fit into `room` bytes together."""
    return {
        name: drawn_model(name, random, room) for name in NAMES[: random.randint(2, len(NAMES))]
    }


def drawn_model(name: str, random: Random, room: int) -> Spec:
    """Draw the first version of a model."""
    takes = int(room * random.choice((0.02, 0.1, 0.2, 0.3, 0.45, 0.7))) + random.randrange(4 * MIB)
    declares = random.choice((None, None, 1.0, 1.0, 1.3))
    return Spec(
        model_id=name,
        version=1,
        is_python=random.random() < 0.6,
        takes=takes,
        declared=None if declares is None else int(takes * declares),
        grows=random.choice((0, 0, takes // 4)),
        seconds=random.choice((0.05, 0.3, 1.0, 4.0, 20.0)),
    )


def drawn_packages(random: Random, room: int) -> dict[str, Spec]:
    """Draw a package with an ensemble, and one whose Python code calls others by name."""
    ensemble, helped = drawn_model("y", random, room), drawn_model("z", random, room)
    steps, helpers = random.choice((1, 2, 3)), random.choice((1, 2))
    helped_by = random.choice((0, 0, 1))
    return {
        "y": replace(ensemble, steps=steps, helpers=helped_by, grows=0),
        "z": replace(helped, helpers=helpers),
    }
