"""Plays a Triton that exits for causes which `Blame` does not know, and counts how it fares.

A run is a row of lives of Triton. In each life models are loaded as `Blame.select_loads` allows,
and serve, until something kills Triton: a model, or an operator outside. The outcome of a run says
which models were given up, how many exits that took, and how long healthy models were away.

Requests are not played one by one. Whether a healthy model has a request when Triton exits is drawn
with the odds that its rate and the time of a request give. A model that was just loaded again has
one at once, as callers waited for it. Triton is started again 1 to 2 s after a pause of 0.5 s. The
pause doubles up to 30 s with each exit, and is 0.5 s again once Triton has lived for a minute.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from adapter.core.blame import Blame, Work
from adapter.core.model import ModelId

TWENTY_MINUTES = 1200.0
_POLL_SECONDS = 0.2
_AGE_SECONDS = 3600.0  # of Triton when a run begins
_CALLERS_WAIT_SECONDS = 5.0  # for a model that is away
_KILL_SECONDS = 0.05  # from the request that kills to the exit
_FIRST_RESTART_SECONDS = 0.5
_LAST_RESTART_SECONDS = 30.0
_LONG_LIFE_SECONDS = 60.0

# Draws when Triton is killed from outside.
Kills = Callable[[random.Random], list[float]]


@dataclass(frozen=True)
class PlayedModel:
    """Describes a model: how it is loaded and called, and how it kills Triton, if it does."""

    model_id: ModelId
    load_seconds: float = 1.0
    rate: float = 0.0  # requests a second
    request_seconds: float = 0.01
    is_streaming: bool = False  # always has a request
    is_called_with_killer: bool = False  # by the same clients, at the same moment
    is_loaded_by_calls: bool = False  # instead of by the adapter
    kills_in_load: bool = False
    kills_in_request: float = 0.0  # odds of each request
    kills_each_seconds: float = 0.0  # mean seconds between two requests that kill
    kills_at: tuple[float, ...] = ()  # when a request kills, if the model is loaded then
    kills_after_load: float = 0.0  # seconds, in the background
    kills_after_request: float = 0.0  # seconds, in the background

    @property
    def is_killer(self) -> bool:
        """Return whether the model ever kills Triton."""
        seconds = self.kills_each_seconds + self.kills_after_load + self.kills_after_request
        return self.kills_in_load or self.kills_in_request + seconds > 0 or bool(self.kills_at)

    @property
    def busy_share(self) -> float:
        """Return the share of the time in which the model has a request."""
        return 1.0 if self.is_streaming else 1 - math.exp(-self.rate * self.request_seconds)


@dataclass(frozen=True)
class Setting:
    """Describes what is played: the models, and what kills Triton beside them."""

    models: Sequence[PlayedModel]
    kills_from_outside: Kills = lambda _: []
    exits_after_start_seconds: float = math.inf
    load_slots: int = 4
    is_cold: bool = False  # nothing is loaded when the run begins
    run_seconds: float = TWENTY_MINUTES

    @property
    def killers(self) -> set[ModelId]:
        """Return the models that have to be given up."""
        return {model.model_id for model in self.models if model.is_killer}


@dataclass
class Outcome:
    """Holds what happened in one run."""

    exits: list[float] = field(default_factory=list)
    given_up: list[tuple[float, ModelId]] = field(default_factory=list)

    def count_exits_until_found(self, killers: set[ModelId]) -> int | None:
        """Return the number of exits until all killers were given up, None if some never were."""
        found_at: dict[ModelId, float] = {}
        for at, model_id in self.given_up:
            found_at.setdefault(model_id, at)
        if not killers or not killers <= found_at.keys():
            return None
        last = max(found_at[killer] for killer in killers)
        return sum(at <= last for at in self.exits)

    def find_wrongly_given_up(self, killers: set[ModelId]) -> set[ModelId]:
        """Return the healthy models that were given up."""
        return {model_id for _, model_id in self.given_up} - killers


@dataclass(frozen=True)
class _Kill:
    """Describes what ends a life of Triton."""

    at: float
    killer: ModelId | None = None
    is_in_request: bool = False


def play(setting: Setting, seed: int) -> Outcome:
    """Play one run, from life to life of Triton."""
    random_numbers = random.Random(seed)
    outside = setting.kills_from_outside(random_numbers)
    outcome = Outcome()
    now = 0.0
    restart_seconds = _FIRST_RESTART_SECONDS
    blame = Blame(-_AGE_SECONDS)
    if setting.is_cold:
        blame.start_life(now)
    while now < setting.run_seconds:
        life = _Life(setting, blame, outcome, random_numbers, now)
        life.prepare(outside, is_old=now == 0.0 and not setting.is_cold)
        exited_at = life.play()
        if exited_at - now > _LONG_LIFE_SECONDS:
            restart_seconds = _FIRST_RESTART_SECONDS
        now = exited_at + restart_seconds + random_numbers.uniform(1, 2)
        restart_seconds = min(_LAST_RESTART_SECONDS, 2 * restart_seconds)
        blame.start_life(now)
    return outcome


class _Life:
    """Plays one life of Triton, from its start to its exit."""

    def __init__(
        self,
        setting: Setting,
        blame: Blame,
        outcome: Outcome,
        random_numbers: random.Random,
        started_at: float,
    ) -> None:
        self._setting = setting
        self._models = {model.model_id: model for model in setting.models}
        self._blame = blame
        self._outcome = outcome
        self._random = random_numbers
        self._started_at = started_at
        self._now = started_at
        self._waiting: dict[ModelId, None] = {}
        self._next_call_at: dict[ModelId, float] = {}  # of models that are loaded by calls
        self._loading: dict[ModelId, float] = {}
        self._load_ends_at: dict[ModelId, float] = {}
        self._loaded: dict[ModelId, float] = {}
        self._kills: list[_Kill] = []

    def prepare(self, outside: list[float], *, is_old: bool) -> None:
        """Have the models loaded if this Triton is old, else let them wait."""
        after_start = self._setting.exits_after_start_seconds * self._random.uniform(0.95, 1.05)
        self._kills = [_Kill(self._started_at + after_start)]
        self._kills.extend(_Kill(at) for at in outside if at >= self._started_at)
        for model in self._setting.models:
            if is_old and not model.kills_in_load:
                self._loaded[model.model_id] = self._started_at - _AGE_SECONDS
                self._kills.extend(self._draw_kills(model, are_callers_waiting=False))
            elif model.is_loaded_by_calls:
                self._next_call_at[model.model_id] = self._started_at + self._draw_pause(model)
            else:
                self._waiting[model.model_id] = None

    def play(self) -> float:
        """Play until Triton exits or the run is over; return when."""
        while True:
            allowed = self._blame.select_loads(
                self._now, [*self._waiting], self._loading, self._loaded
            )
            self._begin_loads(allowed)
            kill = min(self._kills, key=lambda kill: kill.at)
            then = min(kill.at, self._find_next_event(allowed))
            self._now = then
            if then >= self._setting.run_seconds:
                return then
            if then == kill.at:
                self._exit(kill)
                return then
            self._take_calls()
            self._end_loads()

    def _begin_loads(self, allowed: set[ModelId]) -> None:
        for model_id in [model_id for model_id in self._waiting if model_id in allowed]:
            if len(self._loading) == self._setting.load_slots:
                return
            model = self._models[model_id]
            seconds = model.load_seconds * self._random.uniform(0.7, 1.3)
            del self._waiting[model_id]
            self._loading[model_id] = self._now
            self._load_ends_at[model_id] = self._now + seconds
            if model.kills_in_load:
                kills_at = self._now + seconds * self._random.uniform(0.3, 0.99)
                self._kills.append(_Kill(kills_at, model_id))

    def _find_next_event(self, allowed: set[ModelId]) -> float:
        """Return when something happens next, or a held load has to be looked at again."""
        is_held = any(
            model_id not in allowed and self._blame.find_given_up(model_id, self._now) is None
            for model_id in self._waiting
        )
        poll_seconds = _POLL_SECONDS if is_held or self._blame.turn is not None else 60.0
        return min(
            self._now + poll_seconds,
            self._setting.run_seconds,
            *self._load_ends_at.values(),
            *self._next_call_at.values(),
        )

    def _take_calls(self) -> None:
        """Let calls ask for the load of their models; of models given up they are refused."""
        calls = [model_id for model_id, at in self._next_call_at.items() if at <= self._now]
        for model_id in calls:
            if self._blame.find_given_up(model_id, self._now) is None:
                del self._next_call_at[model_id]
                self._waiting[model_id] = None
            else:
                pause = self._draw_pause(self._models[model_id])
                self._next_call_at[model_id] = self._now + pause

    def _end_loads(self) -> None:
        ended = [model_id for model_id, at in self._load_ends_at.items() if at <= self._now]
        for model_id in ended:
            del self._load_ends_at[model_id]
            del self._loading[model_id]
            self._loaded[model_id] = self._now
            kills = self._draw_kills(self._models[model_id], are_callers_waiting=True)
            self._kills.extend(kills)

    def _draw_pause(self, model: PlayedModel) -> float:
        return self._random.expovariate(max(model.rate, 1 / 3))

    def _draw_kills(self, model: PlayedModel, *, are_callers_waiting: bool) -> Iterator[_Kill]:
        """Yield when a model that is loaded now kills Triton."""
        killer = model.model_id
        first_request_at = self._draw_first_request(model, are_callers_waiting=are_callers_waiting)
        if model.kills_in_request:
            at = first_request_at
            while self._random.random() >= model.kills_in_request:
                at += self._random.expovariate(model.rate)
            at += _KILL_SECONDS * self._random.uniform(0.3, 1)
            yield _Kill(at, killer, is_in_request=True)
        if model.kills_each_seconds:
            at = self._now + self._random.expovariate(1 / model.kills_each_seconds)
            yield _Kill(at + _KILL_SECONDS, killer, is_in_request=True)
        for at in model.kills_at:
            if at >= self._now:
                yield _Kill(at + _KILL_SECONDS, killer, is_in_request=True)
        if model.kills_after_load:
            seconds = model.kills_after_load * self._random.uniform(0.8, 1.2)
            yield _Kill(self._now + seconds, killer)
        if model.kills_after_request:
            seconds = model.kills_after_request * self._random.uniform(0.8, 1.2)
            yield _Kill(first_request_at + seconds, killer)

    def _draw_first_request(self, model: PlayedModel, *, are_callers_waiting: bool) -> float:
        if not model.rate:
            return math.inf
        if are_callers_waiting and self._random.random() < model.rate * _CALLERS_WAIT_SECONDS:
            return self._now + 0.01
        return self._now + self._random.expovariate(model.rate)

    def _exit(self, kill: _Kill) -> None:
        """Tell `Blame` which models were at work, and note which model it gives up."""
        at_work = {
            model_id: Work(self._now - began_at, is_load=True)
            for model_id, began_at in self._loading.items()
        }
        for model_id, loaded_at in self._loaded.items():
            seconds = self._draw_request_seconds(self._models[model_id], loaded_at, kill)
            if seconds is not None:
                at_work[model_id] = Work(seconds)
        self._outcome.exits.append(self._now)
        verdict = self._blame.judge_exit(self._now, at_work, self._loaded)
        if verdict.given_up is not None and verdict.charged is not None:
            self._outcome.given_up.append((self._now, verdict.charged))

    def _draw_request_seconds(
        self, model: PlayedModel, loaded_at: float, kill: _Kill
    ) -> float | None:
        """Return how long the model had requests in this life, or None if it is idle now."""
        loaded_seconds = self._now - loaded_at
        busy_seconds = model.busy_share * loaded_seconds
        is_killing = kill.is_in_request and kill.killer == model.model_id
        is_called_along = kill.is_in_request and model.is_called_with_killer
        if is_killing or is_called_along:
            return min(loaded_seconds, busy_seconds + _KILL_SECONDS)
        if model.is_streaming:
            return loaded_seconds
        is_new = loaded_at >= self._started_at
        has_callers = is_new and self._random.random() < model.rate * _CALLERS_WAIT_SECONDS
        if has_callers and loaded_seconds < model.request_seconds:
            return loaded_seconds
        lately_seconds = min(loaded_seconds, model.request_seconds)
        if self._random.random() < 1 - math.exp(-model.rate * lately_seconds):
            return min(loaded_seconds, busy_seconds + model.request_seconds)
        return None
