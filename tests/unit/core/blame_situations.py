"""Situations for `Blame`, and the figures that it must not exceed.

The figures were counted over 200 runs of each situation. Another sample exceeds them by chance, by
what `allow_noise` says.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from adapter.core.model import ModelId
from tests.unit.core.blame_world import Kills, Outcome, PlayedModel, Setting

_UNSEEN_SHARE = 0.005  # an event that 200 runs may miss
_FIRST_KILL_SECONDS = 30.0
_MINUTE = 60.0
_HOUR = 3600.0
_TWO_DAYS = 48 * _HOUR
_ELEVEN_MINUTES = 11 * _MINUTE


@dataclass(frozen=True)
class Exits:
    """Says how many exits of Triton it takes until all killers are given up."""

    median: int
    most_of_95_percent: int
    most: int
    found_percent: float = 100.0


@dataclass(frozen=True)
class Situation:
    """Describes what is played, and the figures that it must not exceed."""

    setting: Setting
    exits: Exits | None = None  # None if no killer is looked for
    wrong_percent: float = 0.0  # of the runs, in which a healthy model is given up


def allow_noise(runs: int, share: float, deviations: float) -> int:
    """Return in how many runs something with these odds may happen by chance."""
    odds = min(1.0, share + _UNSEEN_SHARE)
    return math.floor(runs * odds + deviations * math.sqrt(runs * odds * (1 - odds)))


def count_wrong(setting: Setting, outcomes: Sequence[Outcome]) -> int:
    """Return in how many runs a healthy model was given up."""
    return sum(bool(outcome.find_wrongly_given_up(setting.killers)) for outcome in outcomes)


def find_excess(
    situation: Situation, outcomes: Sequence[Outcome], *, deviations: float
) -> list[str]:
    """Return which figures the outcomes exceed by more than chance explains."""
    runs = len(outcomes)
    happened = {"a healthy model is given up": count_wrong(situation.setting, outcomes)}
    shares = {"a healthy model is given up": situation.wrong_percent / 100}
    if situation.exits is not None:
        killers = situation.setting.killers
        counts = [outcome.count_exits_until_found(killers) for outcome in outcomes]
        finds = [count for count in counts if count is not None]
        figures = situation.exits
        limits = {0.5: figures.median, 0.05: figures.most_of_95_percent, 0.0: figures.most}
        for share, limit in limits.items():
            event = f"it takes more than {limit} exits"
            happened[event] = sum(count > limit for count in finds)
            shares[event] = share
        happened["a killer is not given up"] = runs - len(finds)
        shares["a killer is not given up"] = 1 - figures.found_percent / 100
    return [
        f"{event}: in {count} of {runs} runs"
        for event, count in happened.items()
        if count > allow_noise(runs, shares[event], deviations)
    ]


# -- models and kills ---------------------------------------------------------------------------


def healthy(
    count: int,
    rate: float = 20,
    request_seconds: float = 0.005,
    load_seconds: float = 1.0,
    *,
    is_streaming: bool = False,
) -> list[PlayedModel]:
    """Return models that never kill Triton."""
    return [
        PlayedModel(
            ModelId(f"healthy{number}"),
            load_seconds=load_seconds,
            rate=rate,
            request_seconds=request_seconds,
            is_streaming=is_streaming,
        )
        for number in range(count)
    ]


def killer(name: str = "killer", *, rate: float = 1.0, **more: object) -> PlayedModel:
    """Return a model that kills Triton, and that the adapter loads again."""
    return PlayedModel(ModelId(name), rate=rate, **more)


def called_killer(name: str = "killer", *, rate: float = 0.5, **more: object) -> PlayedModel:
    """Return a model that kills Triton, and that its callers load."""
    return killer(name, rate=rate, is_loaded_by_calls=True, **more)


def kill_at_random(count: int, seconds: float) -> Kills:
    """Return kills from outside, spread over some seconds by chance."""

    def draw(random_numbers: random.Random) -> list[float]:
        return sorted(
            _FIRST_KILL_SECONDS + random_numbers.uniform(0, seconds) for _ in range(count)
        )

    return draw


def kill_regularly(count: int, seconds: float) -> Kills:
    """Return kills from outside, at regular intervals."""

    def draw(random_numbers: random.Random) -> list[float]:
        first = _FIRST_KILL_SECONDS + random_numbers.uniform(0, seconds)
        return [first + seconds * number for number in range(count)]

    return draw


def exits_after(seconds: float) -> Situation:
    """Return a Triton that exits at the same time after each start."""
    return Situation(Setting(_FIVE, exits_after_start_seconds=seconds))


_FIVE = healthy(5)
_SLOW = PlayedModel(ModelId("slow"), load_seconds=300)
_BUSY = PlayedModel(ModelId("busy"), rate=50, request_seconds=0.02)
_STREAMS = healthy(3, rate=1, is_streaming=True)
_CALLED_ALONG = PlayedModel(ModelId("along"), rate=1, is_called_with_killer=True)
_THREE_PACKAGES = [
    called_killer(f"killer{number}", rate=0.15, kills_in_load=True) for number in range(3)
]
_LOAD_AND_INFERENCE = [
    called_killer("killer0", kills_in_load=True),
    killer("killer1", kills_in_request=1),
]

_LOAD = Exits(3, 4, 5)
_INFERENCE = Exits(3, 4, 4)
_TWO = Exits(6, 10, 14)

# -- the table ----------------------------------------------------------------------------------

SITUATIONS = {
    "a load kills, called again": Situation(
        Setting([*healthy(3), called_killer(kills_in_load=True)]), _LOAD
    ),
    "a load kills, among five at the start": Situation(
        Setting([*healthy(4), killer(kills_in_load=True)], is_cold=True), _LOAD
    ),
    "a load of 20 s kills, at the start": Situation(
        Setting([*healthy(4), killer(load_seconds=20, kills_in_load=True)], is_cold=True),
        Exits(5, 6, 7),
    ),
    "three packages kill in turn": Situation(
        Setting([*healthy(1), *_THREE_PACKAGES]),
        Exits(11, 20, 36),  # the most in 2000 runs
    ),
    "each inference kills, alone": Situation(Setting([killer(kills_in_request=1)]), _INFERENCE),
    "each inference kills, beside 500/s": Situation(
        Setting([*healthy(1, rate=500), killer(kills_in_request=1)]), _INFERENCE
    ),
    "each inference kills, among six": Situation(
        Setting([*_FIVE, killer(kills_in_request=1)]), _INFERENCE
    ),
    "each inference kills, beside streams": Situation(
        Setting([*_STREAMS, killer(kills_in_request=1)]), _INFERENCE
    ),
    "each inference kills, another is called along": Situation(
        Setting([*healthy(2), _CALLED_ALONG, killer(kills_in_request=1)]), Exits(4, 4, 4)
    ),
    "one inference in ten kills, 1/s": Situation(
        Setting([*healthy(2), killer(kills_in_request=0.1)]), Exits(4, 7, 8)
    ),
    "a kill each two minutes, at work for 5 %": Situation(
        Setting([*healthy(2), killer(request_seconds=0.05, kills_each_seconds=120)]),
        Exits(5, 7, 10, found_percent=96),
    ),
    "two kill, by load and by inference": Situation(
        Setting([*healthy(3), *_LOAD_AND_INFERENCE]), _TWO
    ),
    "5 kills in ten minutes": Situation(Setting(_FIVE, kills_from_outside=kill_at_random(5, 600))),
    "a kill each 20 s, for two minutes": Situation(
        Setting(_FIVE, kills_from_outside=kill_regularly(6, 20))
    ),
    "30 kills in ten minutes": Situation(
        Setting(_FIVE, kills_from_outside=kill_at_random(30, 600)), wrong_percent=1
    ),
    "a kill each 15 s, for ten minutes": Situation(
        Setting(_FIVE, kills_from_outside=kill_regularly(40, 15)), wrong_percent=1
    ),
    "30 kills in ten minutes, loads of 10 s": Situation(
        Setting(healthy(4, load_seconds=10), kills_from_outside=kill_at_random(30, 600)),
        wrong_percent=9.5,
    ),
    "a kill each two minutes, a load of 5 min": Situation(
        Setting([*healthy(3), _SLOW], kills_from_outside=kill_regularly(9, 120)),
        wrong_percent=1.5,
    ),
    "Triton exits 1 s after each start": exits_after(1),
    "Triton exits 15 s after each start": exits_after(15),
    "a background thread kills 4 s after a load": Situation(
        Setting([*healthy(4), killer(kills_after_load=4)]), wrong_percent=0.5
    ),
    "a background thread kills 3 s after a request": Situation(
        Setting([*healthy(4), killer(rate=0.2, kills_after_request=3)]), wrong_percent=0.5
    ),
    "a kill each two minutes, at work for 63 %": Situation(
        Setting([*healthy(2), killer(rate=50, request_seconds=0.02, kills_each_seconds=120)]),
        wrong_percent=0.5,
    ),
}

# A hundred models, of which three are loaded at a time; a run takes seconds.
LARGE_SITUATIONS = {
    "a load kills, among 100 at the start": Situation(
        Setting(
            [*healthy(99, 1, 0.01, 2), killer(load_seconds=2, kills_in_load=True)],
            is_cold=True,
            load_slots=3,
        ),
        Exits(4, 4, 5),
    ),
    "5 kills in ten minutes, 100 models, 30 % busy": Situation(
        Setting(healthy(100, 5, 0.07, 2), kills_from_outside=kill_at_random(5, 600))
    ),
}

# -- days ---------------------------------------------------------------------------------------

_MODELS = [
    *healthy(3),
    _BUSY,
    PlayedModel(ModelId("streaming"), rate=1, is_streaming=True),
    PlayedModel(ModelId("seldom"), rate=0.01, request_seconds=0.05),
    PlayedModel(ModelId("slow"), load_seconds=40, rate=2),
]
_EACH_ELEVEN_MINUTES = tuple(
    number * _ELEVEN_MINUTES for number in range(1, int(_TWO_DAYS / _ELEVEN_MINUTES) + 1)
)

KILLER_FOR_TWO_DAYS = Setting(
    [*_MODELS, killer(rate=0.1, request_seconds=0.05, kills_at=_EACH_ELEVEN_MINUTES)],
    run_seconds=_TWO_DAYS,
)
OPERATOR_FOR_TWO_DAYS = Setting(
    _MODELS,
    kills_from_outside=lambda _: [*_EACH_ELEVEN_MINUTES],
    run_seconds=_TWO_DAYS,
)
