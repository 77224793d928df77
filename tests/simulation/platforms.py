"""Draw who else than SageMaker calls the adapter in a shift."""

from dataclasses import dataclass
from random import Random

from tests.simulation.memory import MIB

Operation = tuple[str, tuple[object, ...]]
DEFAULT_BYTES = 1_000_000  # predicted of a model that nothing is known of
_GPU_BYTES = 2000 * MIB  # on smaller ones ModelMesh does not start


@dataclass(frozen=True, slots=True)
class Mesh:
    """ModelMesh. `tells_disk`: it knows how large the files of a model are."""

    load_concurrency: int
    churn_seconds: float
    tells_disk: bool

    def operation(self, random: Random, names: list[str]) -> Operation:
        leaves = random.choice((0.05, 0.5, 3.0)) if random.random() < 0.1 else None
        return "use", (random.choice(names), random.choice((1, 1, 3, 10)), leaves)


@dataclass(frozen=True, slots=True)
class V2:
    """Callers of V2's model repository."""

    def operation(self, random: Random, names: list[str]) -> Operation:
        verbs = {"load": 6, "reload": 2, "unload": 4, "invoke": 8, "version": 1}
        [verb] = random.choices([*verbs], weights=[*verbs.values()])
        name = random.choice([*names, *"yzyz"])
        leaves = random.choice((0.0, 0.05, 0.5, 3.0)) if random.random() < 0.1 else None
        words = {
            "invoke": (name, random.choice((1, 1, 3, 10)), leaves),
            "version": (name,),
        }
        return verb, words.get(verb, (name, leaves))


Platform = Mesh | V2


def drawn_platform(random: Random, device_bytes: int, reader: str) -> Platform | None:
    """Return the platform of a day's last shift; None where it is as all others."""
    if random.random() < 0.5:
        return None
    is_small = reader in {"nvml", "triton"} and device_bytes < _GPU_BYTES
    if is_small or Random(random.random()).random() < 0.4:
        return V2()
    return Mesh(
        load_concurrency=random.choice((1, 2, 4)),
        churn_seconds=random.choice((3.0, 100.0)),
        tells_disk=random.random() < 0.5,
    )
