"""A model that runs out of memory whatever goes for it must stop costing others their place."""

import pytest

from adapter.core import sizing
from adapter.core.limits import EvictionLoopBreaker, Hopeless

GIB = 2**30


def fails(guard, key="m", *, alone=True, asked=None, limit=16 * GIB):
    said = guard.out_of_memory(key, alone=alone, requested_bytes=asked, limit_bytes=limit)
    return said is not None


def test_with_nothing_else_resident_the_budget_is_three_507s():
    guard = EvictionLoopBreaker()
    assert [fails(guard) for _ in range(5)] == [False, False, False, True, True]


def test_the_budget_can_be_set():
    guard = EvictionLoopBreaker(budget=1)
    assert [fails(guard) for _ in range(2)] == [False, True]


def test_a_failure_beside_others_neither_counts_nor_wipes_out_the_count():
    guard = EvictionLoopBreaker(budget=2)
    assert not any(fails(guard, alone=False) for _ in range(5))
    assert [fails(guard), fails(guard, alone=False), fails(guard), fails(guard)] == [
        *(False, False, False),
        True,
    ]
    assert not fails(guard, alone=False)


def test_a_success_forgives_all():
    guard = EvictionLoopBreaker(budget=1)
    fails(guard)
    fails(guard, asked=17 * GIB)
    guard.succeeded("m")
    assert not fails(guard)
    assert not fails(guard, alone=False, asked=17 * GIB)


def test_a_success_of_the_unknown_is_nothing():
    EvictionLoopBreaker().succeeded("m")


@pytest.mark.parametrize("alone", [True, False])
def test_more_than_the_device_has_is_believed_the_second_time(alone):
    guard = EvictionLoopBreaker()
    assert not fails(guard, alone=alone, asked=17 * GIB)
    assert not fails(guard, alone=alone, asked=16 * GIB)
    assert fails(guard, alone=alone, asked=17 * GIB)
    assert fails(guard, alone=alone, asked=17 * GIB)


@pytest.mark.parametrize(("asked", "limit"), [(None, GIB), (GIB, None), (None, None), (GIB, GIB)])
def test_a_size_that_nobody_knows_is_not_too_large(asked, limit):
    guard = EvictionLoopBreaker()
    assert not any(fails(guard, alone=False, asked=asked, limit=limit) for _ in range(5))


def test_each_key_has_its_own_count():
    guard = EvictionLoopBreaker(budget=1)
    fails(guard, "a")
    assert not fails(guard, "b")
    assert fails(guard, "a")


def test_the_key_that_failed_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(sizing, "MAX_REMEMBERED", 100)
    guard = EvictionLoopBreaker(budget=2)
    for key in ("kept", "old", "kept", "old", "kept"):
        fails(guard, key)
    for number in range(99):
        fails(guard, str(number))
    assert repr(guard) == "<EvictionLoopBreaker [100 keys]>"
    assert fails(guard, "kept")
    assert not fails(guard, "old")


def test_it_says_which_of_its_reasons_it_was():
    guard = EvictionLoopBreaker(budget=1)
    known = {"requested_bytes": None, "limit_bytes": 16 * GIB}
    assert guard.out_of_memory("m", alone=True, **known) is None
    assert guard.out_of_memory("m", alone=True, **known) is Hopeless.ALONE
    known["requested_bytes"] = 17 * GIB
    assert guard.out_of_memory("m", alone=False, **known) is None
    assert guard.out_of_memory("m", alone=False, **known) is Hopeless.OVERSIZED
