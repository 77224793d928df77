"""Plays lives of Triton for tests of `Blame`, with loads that take as long as a test says."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from adapter.core.blame import Blame, GivenUp, Requester, Verdict, Work
from adapter.core.model import ModelId

HOUR = 3600.0
POLL_SECONDS = 0.25  # exact as a binary fraction, so that times in tests are exact
ONE_REQUEST = Work(0.05)
_DOWN_SECONDS = 2.0


def loading(seconds: float) -> Work:
    """Describe a model whose load Triton broke off after these seconds."""
    return Work(seconds, is_load=True)


@dataclass(frozen=True)
class Exit:
    """Describes one exit of Triton, and the model that it has to be charged to."""

    life_seconds: float
    at_work: Mapping[str, Work]
    charged: str | None
    turn: str | None = None  # whose turn it is
    idle: tuple[str, ...] = ()  # loaded, without a request


class Player:
    """Lets Triton start, load models and exit, and asks `Blame` as the adapter does."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.blame = Blame(self.now)
        self.started_at = self.now
        self.began_after: dict[str, float] = {}  # seconds of this life until a load began
        self._waiting: dict[ModelId, float] = {}  # how long each load takes
        self._loading: dict[ModelId, float] = {}
        self._loaded: dict[ModelId, float] = {}
        self._seconds: dict[ModelId, float] = {}

    def start(self) -> None:
        """Start Triton, with nothing loaded."""
        self.now += _DOWN_SECONDS
        self.started_at = self.now
        self.began_after = {}
        self._waiting.clear()
        self._loading.clear()
        self._loaded.clear()
        self.blame.start_life(self.now)

    def ask_for(self, models: Collection[str], load_seconds: float = 1.0) -> None:
        """Ask for the loads of these models."""
        self._waiting.update(dict.fromkeys(map(ModelId, models), load_seconds))

    def run(self, seconds: float) -> dict[str, float]:
        """Let loads begin and end for some seconds; return when each load of this life began."""
        until = self.now + seconds
        while True:
            self._end_loads()
            allowed = self.blame.select_loads(
                self.now, [*self._waiting], self._loading, self._loaded
            )
            for model_id in allowed:
                self._seconds[model_id] = self._waiting.pop(model_id)
                self._loading[model_id] = self.now
                self.began_after[model_id] = self.now - self.started_at
            if self.now >= until:
                return self.began_after
            self.now += POLL_SECONDS

    def _end_loads(self) -> None:
        for model_id, began_at in [*self._loading.items()]:
            if self.now >= began_at + self._seconds[model_id]:
                del self._loading[model_id]
                self._loaded[model_id] = self.now

    def fail_load(self, model: str) -> None:
        """Let a load fail that Triton was working on."""
        del self._loading[ModelId(model)]

    def exit(self, at_work: Mapping[str, Work], idle: Collection[str] = ()) -> Verdict:
        """Let Triton exit now; return what the exit is charged to."""
        works = {ModelId(model): work for model, work in at_work.items()}
        loaded = {ModelId(model): self.started_at for model in idle}
        for model_id, work in works.items():
            if not work.is_load:
                loaded[model_id] = self.now - work.seconds
        return self.blame.judge_exit(self.now, works, {**loaded, **self._loaded})

    def charge(self, model: str, times: int = 1) -> None:
        """Charge a model with exits at which no other model was at work."""
        for _ in range(times):
            self.start()
            self.now += HOUR
            assert self.exit({model: ONE_REQUEST}).charged == model

    def suspect(self, *models: str) -> None:
        """Let Triton exit while these models are at work, the first of them for the shortest time.

        The models are too busy for a charge.
        """
        self.start()
        self.now += HOUR
        at_work = {model: Work(HOUR / 2 + number) for number, model in enumerate(models)}
        assert self.exit(dict(reversed(at_work.items()))).charged is None

    def give_turn(self, model: str) -> None:
        """Load a suspect for which the turn has come; its load takes as long as the test wants."""
        self.ask_for([model], load_seconds=HOUR)
        while self.blame.turn != model:
            self.run(POLL_SECONDS)
            assert self.now < self.started_at + HOUR
        self._loading.clear()

    def play(self, played: Exit) -> Verdict:
        """Play one life of Triton and its exit."""
        self.start()
        if played.turn is not None:
            self.give_turn(played.turn)
        until = self.started_at + played.life_seconds
        assert self.now <= until, "the turn comes later than the exit"
        self.now = until
        return self.exit(played.at_work, played.idle)

    def find_given_up(self, model: str) -> GivenUp | None:
        """Return until when a model is given up."""
        return self.blame.find_given_up(ModelId(model), self.now)

    def request_load(self, model: str, requester: Requester) -> GivenUp | None:
        """Ask for a load as a person or a platform."""
        return self.blame.request_load(ModelId(model), requester, self.now)
