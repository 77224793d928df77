"""The simulated machines of scripts/simulation keep the adapter's rules, and the fleet Envoy's."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from adapter.core.artifacts import CacheUse
from scripts.simulation.clock import Clock
from scripts.simulation.fleet import TABLE_SIZE, Callers, Fleet, Traffic, zipf
from scripts.simulation.machine import Machine, Model, Size, Times
from scripts.simulation.maglev import Table, hash_of
from scripts.simulation.predict import predict

TIMES = Times(call=1.0, load=10.0, unload=2.0, fetch=100.0)
A, B, C, D = (Model(name) for name in "abcd")


class One:
    """One machine; `found`: what the calls found, and when they were answered."""

    def __init__(self, memory: int = 2, disk: int = 10, **sizes: int) -> None:
        self.clock = Clock()
        self.machine = Machine("one", Size(memory, disk, **sizes), TIMES, self.clock)
        self.found: list[tuple[str, CacheUse | None, float]] = []

    def call(self, *models: Model) -> "One":
        """At the same time."""
        for model in models:
            self.machine.call(model, lambda use, model=model: self._ended(model, use))
        return self

    def _ended(self, model: Model, use: CacheUse | None) -> None:
        self.found.append((model.id, use, self.clock.now))

    def settle(self) -> list[tuple[str, CacheUse | None, float]]:
        """Let all that is under way end."""
        self.clock.run(lambda: False)
        found, self.found = self.found, []
        return found

    def uses(self, *models: Model) -> list[CacheUse | None]:
        """One call after the other."""
        return [use for model in models for _, use, _ in self.call(model).settle()]


def test_a_call_takes_what_the_fetch_the_load_and_the_call_take():
    one = One()
    assert one.call(A).settle() == [("a", CacheUse.MISS, 111.0)]
    assert one.call(A).settle() == [("a", CacheUse.HIT, 112.0)]


def test_calls_of_one_model_share_one_fetch_and_one_load():
    one = One()
    found = one.call(A, A, A).settle()
    assert found == [("a", CacheUse.MISS, 111.0)] * 3
    assert one.machine.fetched_bytes == 1


def test_the_least_recently_used_model_is_evicted_and_its_files_stay():
    one = One(memory=2)
    one.uses(A, B, A, C)
    assert A.id in one.machine
    assert B.id not in one.machine
    begun = one.clock.now
    assert one.call(B).settle() == [("b", CacheUse.DISK, begun + 2 + 10 + 1)]


def test_a_model_with_a_call_in_flight_is_not_evicted():
    one = One(memory=1)
    one.uses(B, A)
    begun = one.clock.now
    assert one.call(A, B).settle() == [
        ("a", CacheUse.HIT, begun + 1),
        ("b", CacheUse.DISK, begun + 1 + 2 + 10 + 1),
    ]


def test_what_is_least_recently_used_leaves_the_disk_but_not_what_is_in_memory():
    one = One(memory=1, disk=2)
    assert one.uses(A, B, C) == [CacheUse.MISS] * 3  # A leaves for C
    assert one.uses(B, A) == [CacheUse.DISK, CacheUse.MISS]


def test_a_model_is_unloaded_where_the_disk_has_no_other_room():
    one = One(memory=2, disk=2)
    assert one.uses(A, B, C) == [CacheUse.MISS] * 3
    assert A.id not in one.machine


def test_further_loads_wait_for_their_turn():
    one = One(memory=4, loads=2)
    found = one.call(A, B, C, D).settle()
    assert [at for _, _, at in found] == [111.0, 111.0, 121.0, 121.0]


def test_a_model_larger_than_the_memory_is_refused():
    one = One(memory=2)
    assert one.uses(A, Model("large", 3)) == [CacheUse.MISS, None]


def made(machines: int = 4, factor: int = 0, callers: int = 1) -> tuple[Fleet, Callers]:
    clock = Clock()
    models = [Model(f"m{number}") for number in range(400)]
    fleet = Fleet(Size(100, 400), TIMES, clock, balance_factor=factor)
    fleet.join(*(f"machine-{number}" for number in range(machines)))
    return fleet, Callers(fleet, clock, Traffic(models, zipf(400, 1.0), callers))


def test_each_model_has_one_machine_while_none_is_overloaded():
    fleet, callers = made()
    assert callers.run(2000).away == 0
    assert sum(len(each) for each in fleet.machines) <= 400


def test_calls_of_a_hot_model_go_to_a_second_machine_with_a_bound_alone():
    assert made(factor=0, callers=40)[1].run(4000).away == 0
    seen = made(factor=150, callers=40)[1].run(4000)
    assert 0 < seen.away < seen.calls / 4


def test_a_machine_that_is_killed_fails_the_calls_that_it_had_and_no_other():
    fleet, callers = made(callers=20)
    callers.run(2000)
    had = fleet.machines[0].in_flight
    callers.run(0)
    fleet.leave("machine-0")
    assert callers.seen.uses == {None: had}
    assert callers.run(2000).uses[None] == 0


def moved(fleet: Fleet, change: Callable[[], object]) -> list[tuple[str, str]]:
    """Return where from and where to, of each model whose machine is another one then."""
    models = [Model(f"m{number}") for number in range(2000)]
    before = [fleet.home(model).name for model in models]
    change()
    after = [fleet.home(model).name for model in models]
    return [each for each in zip(before, after, strict=True) if len(set(each)) > 1]


def test_of_four_machines_one_that_goes_moves_its_models_and_hardly_any_of_the_others():
    fleet, _ = made(machines=4)
    found = Counter(old == "machine-0" for old, _ in moved(fleet, lambda: fleet.leave("machine-0")))
    assert 0.2 < found[True] / 2000 < 0.3
    assert found[False] / 2000 < 0.01


def test_of_five_machines_one_that_joins_takes_its_models_and_hardly_any_move_elsewhere():
    fleet, _ = made(machines=4)
    found = moved(fleet, lambda: fleet.join("machine-4"))
    taken = Counter(old for old, new in found if new == "machine-4")
    assert len(taken) == 4
    assert 0.15 < taken.total() / 2000 < 0.25
    assert (len(found) - taken.total()) / 2000 < 0.01


NAMES = [f"m{number}.tar.gz" for number in range(100)]
MACHINES = ["machine-0", "machine-1", "machine-2"]


@pytest.mark.parametrize("callers", [2, 16, 64])
def test_a_prediction_is_the_same_each_time(callers):
    first = predict(NAMES, MACHINES, room=20, callers=callers, calls=500)
    assert predict(NAMES, MACHINES, room=20, callers=callers, calls=500) == first
    assert 0 < first.hits < 1


def test_with_room_for_all_models_all_calls_after_the_first_ones_are_predicted_to_hit():
    found = predict(NAMES, MACHINES, room=100, callers=2, warm_up=10_000)
    assert found.hits > 0.999
    assert found.failed == 0


def test_without_callers_beside_each_other_the_hit_ratio_is_that_of_an_lru_of_each_machine():
    """One caller, and a second way to reckon: a list for each machine."""
    table, dice, lists, hits = Table(MACHINES, TABLE_SIZE), Random(0), [[], [], []], 0
    weights = zipf(100, 1.0)
    for number in range(30_000):
        [name] = dice.choices(NAMES, weights)
        recent = lists[table.index_of(hash_of(name))]
        hits += name in recent and number >= 10_000
        if name in recent:
            recent.remove(name)
        recent.append(name)
        del recent[:-20]
    found = predict(NAMES, MACHINES, room=20, callers=1, calls=20_000, seeds=1)
    assert found.hits == pytest.approx(hits / 20_000, abs=0.01)
