"""The hit ratio of a small fleet, predicted for a run with real machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from adapter.core.artifacts import CacheUse
from adapter.core.model import ModelId
from scripts.simulation.clock import Clock
from scripts.simulation.fleet import BALANCE_FACTOR, Callers, Fleet, Traffic, zipf
from scripts.simulation.machine import Model, Size, Times

# A call and a load of a small model of Triton's python backend, three Tritons on two cores.
SMALL = Times(call=0.005, load=0.5, unload=0.1)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Shares of the calls: `hits` found their model in memory, `away` went to another machine than
    the model's own, `failed` found no room anywhere. `spread`: the standard deviation of `hits`
    from one seed to the next.
    """

    hits: float
    spread: float
    away: float
    failed: float


def predict(
    models: Sequence[str],
    machines: Sequence[str],
    *,
    room: int,
    callers: int,
    times: Times = SMALL,
    exponent: float = 1.0,
    balance_factor: int = BALANCE_FACTOR,
    warm_up: int = 1000,
    calls: int = 2000,
    seeds: int = 5,
) -> Prediction:
    """Predict what callers see who each call again once they were answered.

    `models`: what Envoy hashes of each; the k-th is asked for k**-exponent times as often as the
    first. `machines`: their names, or addresses, in the order of Envoy's configuration. `room`: how
    many models fit into the memory of each; all fit on its disk. `times`: of a call that finds its
    model in memory, a load and an unload, measured where the prediction is for. Of each seed,
    `warm_up` calls do not count and `calls` do.
    """
    known = [Model(ModelId(name)) for name in models]
    weights = zipf(len(known), exponent)
    found = []
    for seed in range(seeds):
        clock = Clock()
        size = Size(memory_bytes=room, disk_bytes=len(known))
        fleet = Fleet(size, times, clock, balance_factor=balance_factor)
        fleet.join(*machines)
        them = Callers(fleet, clock, Traffic(known, weights, callers, seed=seed))
        them.run(warm_up)
        found.append(them.run(calls))
    hits = [seen.share(CacheUse.HIT) for seen in found]
    return Prediction(
        hits=fmean(hits),
        spread=pstdev(hits),
        away=fmean(seen.away / seen.calls for seen in found),
        failed=fmean(seen.share(None) for seen in found),
    )
