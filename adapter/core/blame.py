"""Decides which model makes Triton exit, holds it back, and gives it up.

Triton is one process for many models. If one model makes it exit, all models are lost. They are
loaded again, and if the culprit is among them, Triton exits again. So the culprit has to be found.
But Triton also exits because an operator, the kernel or a node ends it, and then no model is to
blame. The two look alike.

A model is *at work* while Triton loads it or has at least one of its requests. The culprit was at
work when Triton exited. (A crash in a background thread is the exception; these rules do not look
for it.) Healthy models were at work by accident, and the odds of the accident are known: a model
that is at work for a tenth of the time is at work at one exit in ten. So being at work says
something about a model that seldom is, and nothing about a busy one. But a busy model can be made
to be seldom at work: it is loaded after the others, alone. An exit at just that moment is a rare
accident, and three of them after pauses of different lengths are hardly possible by accident. An
exit while a model is away, or loaded and idle, had another cause.

**Each exit is charged to one model or to none:**

1. to the model whose turn it is, if it is at work, and was at work for at most half of that life
   of Triton. For its first charge an exit in the first ten seconds of its turn is enough;
2. else to the only model that Triton is loading, if the load took at most half of that life;
3. else to the only model at work that was at work for at most a tenth of that life.

If it is the turn of a model at work, rules 2 and 3 charge no other. A load of more than a minute is
never charged, because it meets too many accidents.

**The models that were at work are suspects and get turns.** Triton loads all other models at once.
Then each suspect gets a turn, after ten seconds at the latest. The one that was at work for the
shortest time comes first. A turn is the suspect's load and one second more, and no other load
begins during its first ten seconds. After ten seconds of turns the suspects without a charge are
released, so they wait for twenty seconds at most. If the exit is charged to the model that had the
turn, only models with a charge are suspects.

**A model with a charge is loaded after everything else**, after a pause of 5 s, then 10 s, then
20 s. If Triton broke its load off, the pause is at least twice as long as that load had taken: then
the next load takes less than half of that life of Triton, and can be charged. The pause is as long
for a suspect that had the turn, and was at work too late for a first charge.

**After three charges a model is given up for ten minutes.** It takes four if the model has passed a
turn since its first charge: it may kill with some of its requests only, but a healthy model had one
more chance of an accident. After the ten minutes one more charge is enough. A person who loads the
model tries it at once. A platform that loads it is refused, because it loads whatever is missing.

**Charges are forgotten** when Triton exits while the model is loaded and idle. They are also
forgotten when Triton exits without the model and nobody is charged, and after a day without an
exit.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from adapter.core import times
from adapter.core.model import ModelId

HALF = 0.5  # of a life of Triton
SELDOM = 0.1  # of a life of Triton
CHARGES = 3
CHARGES_AFTER_A_TURN = 4
MAX_DOUBLINGS = 2  # of the pause before a charged model is loaded


class Requester(Enum):
    """Tells who asks for a load, as far as it matters for a model that is given up."""

    PERSON = "person"  # a load by V2
    PLATFORM = "platform"  # SageMaker's and ModelMesh's contracts, calls, and the adapter itself


@dataclass(frozen=True, slots=True)
class Work:
    """Describes a model that Triton was loading, or that had a request, when Triton exited.

    A model that had requests while another version of it was being loaded counts as loading.
    """

    seconds: float  # of this load, or all seconds with a request in this life of Triton
    is_load: bool = False


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Says until when a model is not loaded, and why."""

    until: float
    exits: int  # how many exits were charged to the model


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says what an exit of Triton is charged to, and what follows from the charge."""

    charged: ModelId | None = None
    charges: int = 0  # of that model, with this one
    limit: int = CHARGES  # how many charges give that model up
    given_up: GivenUp | None = None


@dataclass(slots=True)
class Charges:
    """Counts the exits of Triton that were charged to one model.

    The count is 0 for a suspect that was at work during its turn, but too late for a first charge.
    """

    count: int = 0
    has_passed_turn: bool = False  # since its first charge
    broken_load_seconds: float = 0.0  # of its load that Triton broke off last

    @property
    def limit(self) -> int:
        """Return at how many charges the model is given up: at more once it has come through a turn
        of its own without an exit.
        """
        return CHARGES_AFTER_A_TURN if self.has_passed_turn else CHARGES

    @property
    def pause_seconds(self) -> float:
        """Return how long the model's load waits after all other loads."""
        doublings = min(max(self.count - 1, 0), MAX_DOUBLINGS)
        return max(times.FAILURE_SECONDS * 2.0**doublings, 2 * self.broken_load_seconds)


class Blame:
    """Charges exits of Triton to models, and decides which models may be loaded after an exit.

    All times are seconds of one clock, which is the caller's.
    """

    def __init__(self, now: float) -> None:
        self.charges: dict[ModelId, Charges] = {}
        self.suspects: list[ModelId] = []  # in the order of their turns
        self.turn: ModelId | None = None
        self._given_up: dict[ModelId, GivenUp] = {}
        self._last_exit_at = -math.inf
        self.start_life(now)

    # -- while Triton lives -----------------------------------------------------------------

    def start_life(self, now: float) -> None:
        """Mark the start of Triton, before the first load.

        No model has the turn, and turns and pauses begin anew. Charges and suspects stay.
        """
        self._started_at = now
        self._turn_began_at = -math.inf
        self._turns_began_at: float | None = None
        self._pause_began_at: float | None = None
        self.turn = None

    def select_loads(
        self,
        now: float,
        waiting: Collection[ModelId],
        loading: Mapping[ModelId, float],  # when each load was allowed to begin
        loaded: Mapping[ModelId, float],  # when each load ended
    ) -> set[ModelId]:
        """Give a turn to the next suspect if one is due, and return the loads that may begin now.

        Loads of models that are given up may not begin. Loads of other models come before those of
        suspects, but wait before a turn that is due and in its first ten seconds. The rules are at
        the top of this module. Call this at least each 0.2 s while a load waits.
        """
        self._update_turn(now, loaded)
        if self.turn is not None and self.turn not in {*waiting, *loading, *loaded}:
            self._end_turn()  # the load has failed, or the model was unloaded
        if self.turn is not None:
            if now < self._turn_began_at + times.PATIENCE_SECONDS:
                return {self.turn}.intersection(waiting)
            self._release_uncharged()
        allowed = {model_id for model_id in waiting if self.find_given_up(model_id, now) is None}
        suspects = [model_id for model_id in self.suspects if model_id in allowed]
        unsuspected = allowed.difference(suspects)
        if self.turn is not None or not suspects:
            return unsuspected
        is_loading = any(began_at > now - times.PATIENCE_SECONDS for began_at in loading.values())
        uncharged = [model_id for model_id in suspects if model_id not in self.charges]
        if uncharged:
            return self._select_uncharged(now, uncharged, unsuspected, is_loading=is_loading)
        if unsuspected or is_loading:
            return unsuspected
        return self._select_charged(now, suspects)

    def _select_uncharged(
        self,
        now: float,
        suspects: list[ModelId],
        others: set[ModelId],
        *,
        is_loading: bool,
    ) -> set[ModelId]:
        """Return the loads that may begin while suspects without a charge wait.

        They wait for the other loads, until ten seconds after the start of Triton. Then the first
        of them gets a turn, alone. After ten seconds of turns all of them are released.
        """
        if self._turns_began_at is None:
            is_patient = now < self._started_at + times.PATIENCE_SECONDS
            if is_patient and (others or is_loading):
                return others
            self._turns_began_at = now
        if now >= self._turns_began_at + times.PATIENCE_SECONDS:
            self._release_uncharged()
            return others.union(suspects)
        return set() if is_loading else self._begin_turn(now, suspects[0])

    def _release_uncharged(self) -> None:
        """Suspect only models with charges from now on."""
        self.suspects = [model_id for model_id in self.suspects if model_id in self.charges]

    def _select_charged(self, now: float, suspects: list[ModelId]) -> set[ModelId]:
        """Give the turn to the suspect with the fewest charges, once its pause is over.

        Return the loads that may begin: this one, or none during the pause.
        """
        if self._pause_began_at is None:
            self._pause_began_at = now
        model_id = min(suspects, key=lambda each: self.charges[each].count)
        if now < self._pause_began_at + self.charges[model_id].pause_seconds:
            return set()
        return self._begin_turn(now, model_id)

    def _begin_turn(self, now: float, model_id: ModelId) -> set[ModelId]:
        """Give the turn to a suspect. Return its load as the only one that may begin."""
        self.turn = model_id
        self._turn_began_at = now
        return {model_id}

    def _update_turn(self, now: float, loaded: Mapping[ModelId, float]) -> None:
        """End the turn if its load ended a second ago, or takes too long to be charged."""
        if self.turn is None:
            return
        if now >= loaded.get(self.turn, math.inf) + times.TURN_SECONDS:
            charges = self.charges.get(self.turn)
            if charges is not None and charges.count > 0:
                charges.has_passed_turn = True
            self._end_turn()
        elif now > self._turn_began_at + times.LONGEST_CHARGED_LOAD_SECONDS:
            self._end_turn()

    def _end_turn(self) -> None:
        """Release the model that has the turn from suspicion. The next one's pause begins anew."""
        self.suspects = [model_id for model_id in self.suspects if model_id != self.turn]
        self.turn = None
        self._pause_began_at = None

    # -- when Triton exits ------------------------------------------------------------------

    def judge_exit(
        self,
        now: float,
        at_work: Mapping[ModelId, Work],
        loaded: Mapping[ModelId, float],  # when each load ended
    ) -> Verdict:
        """Charge an exit of Triton to one model or to none, and choose the suspects."""
        self._update_turn(now, loaded)
        if now > self._last_exit_at + times.CHARGE_SECONDS:
            self.charges.clear()
        self._last_exit_at = now
        charged = self._choose_charged(now, at_work)
        self._forget_charges(charged, at_work, loaded)
        if charged is not None:
            self.charges.setdefault(charged, Charges()).count += 1
        elif self.turn is not None and self.turn in at_work:
            self.charges.setdefault(self.turn, Charges())
        self._remember_broken_loads(at_work)
        seldom_first = sorted(at_work, key=lambda model_id: at_work[model_id].seconds)
        is_charged_to_turn = charged is not None and charged == self.turn
        at_work_last = [] if is_charged_to_turn else seldom_first
        self.suspects = list(dict.fromkeys([*at_work_last, *self.charges]))
        self.turn = None
        return Verdict() if charged is None else self._judge_charged(now, charged)

    def _choose_charged(self, now: float, at_work: Mapping[ModelId, Work]) -> ModelId | None:
        """Return the model that the exit is charged to; None if it is charged to nobody.

        The first of three that applies decides: the model whose turn it is, if that was at work;
        the only model that was being loaded; the only one that was seldom at work. Whoever was at
        work for most of Triton's life is not charged: it would have made Triton exit before.
        """
        life_seconds = now - self._started_at
        seconds = {
            model_id: work.seconds
            for model_id, work in at_work.items()
            if not (work.is_load and work.seconds > times.LONGEST_CHARGED_LOAD_SECONDS)
        }
        if self.turn is not None and self.turn in at_work:
            is_first = self.turn not in self.charges
            is_early = now <= self._turn_began_at + times.PATIENCE_SECONDS
            is_short = seconds.get(self.turn, math.inf) <= HALF * life_seconds
            return self.turn if is_short or (is_first and is_early) else None
        loads = [model_id for model_id, work in at_work.items() if work.is_load]
        if len(loads) == 1 and seconds.get(loads[0], math.inf) <= HALF * life_seconds:
            return loads[0]
        seldom = [model_id for model_id in seconds if seconds[model_id] <= SELDOM * life_seconds]
        return seldom[0] if len(seldom) == 1 else None

    def _forget_charges(
        self,
        charged: ModelId | None,
        at_work: Mapping[ModelId, Work],
        loaded: Collection[ModelId],
    ) -> None:
        """Forget the charges of models that this exit shows to be healthy."""
        for model_id in self.charges.keys() - at_work.keys():
            is_idle = model_id in loaded
            if is_idle or charged is None:
                del self.charges[model_id]

    def _remember_broken_loads(self, at_work: Mapping[ModelId, Work]) -> None:
        """Record how long the load had taken that the exit broke off, of each model with charges.

        The model's pause is at least twice that. A model that had requests broke off no load: 0.
        """
        for model_id in self.charges.keys() & at_work.keys():
            work = at_work[model_id]
            self.charges[model_id].broken_load_seconds = work.seconds if work.is_load else 0.0

    def _judge_charged(self, now: float, charged: ModelId) -> Verdict:
        """Return the verdict on the charged model, and give it up if it has reached its limit."""
        self._given_up = {
            model_id: given_up
            for model_id, given_up in self._given_up.items()
            if now < given_up.until
        }
        count = self.charges[charged].count
        limit = self.charges[charged].limit
        if count < limit:
            return Verdict(charged, count, limit)
        given_up = GivenUp(until=now + times.GIVEN_UP_SECONDS, exits=count)
        self._given_up[charged] = given_up
        return Verdict(charged, count, count, given_up)

    # -- models that are given up -----------------------------------------------------------

    def find_given_up(self, model_id: ModelId, now: float) -> GivenUp | None:
        """Return until when the model is not loaded, and why; None if it may be loaded at `now`."""
        given_up = self._given_up.get(model_id)
        return given_up if given_up is not None and now < given_up.until else None

    def request_load(self, model_id: ModelId, requester: Requester, now: float) -> GivenUp | None:
        """Return why this load is refused, None if it is not. A person's load pardons the model."""
        if requester is Requester.PERSON:
            self.pardon(model_id)
        return self.find_given_up(model_id, now)

    def pardon(self, model_id: ModelId) -> None:
        """Let the model be loaded at once. Its charges stay: one more may give it up again."""
        self._given_up.pop(model_id, None)
        self.suspects = [suspect for suspect in self.suspects if suspect != model_id]
