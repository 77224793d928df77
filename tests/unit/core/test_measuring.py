"""Whose memory it is: loads alone and among others, and growth under traffic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core.account import Account
from adapter.core.measuring import Growth, Measured, Window
from adapter.core.memory import Bytes, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Basis, Estimate

A, B, C, D = (ModelId(name) for name in "abcd")
ONE, TWO = Device("GPU-1"), Device("GPU-2")
MIB = 2**20


def seen(one: int, two: int = 0, source: str = "nvml") -> MemoryReading:
    limit = 2**40
    devices = {ONE: DeviceReading(limit, one), TWO: DeviceReading(limit, two)}
    return MemoryReading(devices, source)


def opened(one: int = 1000, two: int = 0) -> Window:
    window = Window()
    window.open(seen(one, two))
    return window


def load(window: Window, model_id: ModelId, expected: int = 0, *, known: bool = False) -> None:
    window.loaded(model_id, f"key-{model_id}", {ONE: expected}, known=known)


def shares(measured: list[Measured]) -> dict[ModelId, int]:
    assert not any(each.exact for each in measured)
    return {each.name: each.bytes[ONE] for each in measured}


@pytest.mark.parametrize("known", [False, True])
def test_a_load_alone_takes_all_that_went_whatever_was_expected(known):
    window = opened(1000, 50)
    load(window, A, expected=5, known=known)
    assert window.close(seen(1300, 70)) == [Measured(A, "key-a", {ONE: 300, TWO: 20}, exact=True)]


def test_a_load_alone_takes_nothing_where_memory_came_back():
    window = opened(1000, 50)
    load(window, A)
    assert window.close(seen(900, 60)) == [Measured(A, "key-a", {ONE: 0, TWO: 10}, exact=True)]


def test_several_loads_share_in_proportion_to_what_was_expected():
    window = opened()
    load(window, A, expected=100)
    load(window, B, expected=300)
    assert shares(window.close(seen(1800))) == {A: 200, B: 600}


def test_loads_are_not_charged_with_what_another_took_that_had_begun_before():
    window = opened()
    load(window, A, expected=100)
    window.loaded_beside(B, {ONE: 300})
    assert shares(window.close(seen(1800))) == {A: 200}


def test_a_load_takes_no_more_than_is_used_in_all():
    """What has left had died before, and had less than the ledger said."""
    window = opened(60)
    load(window, A)
    window.released(B, {ONE: 2000})
    assert shares(window.close(seen(850))) == {A: 850}


def test_shares_are_by_device():
    window = opened()
    window.loaded(A, "a", {ONE: 7}, known=False)
    window.loaded(B, "b", {TWO: 7}, known=False)
    measured = window.close(seen(1400, 500))
    assert [each.bytes for each in measured] == [{ONE: 400, TWO: 0}, {ONE: 0, TWO: 500}]


def test_loads_of_which_nothing_was_expected_share_equally():
    window = opened()
    for model_id in (A, B, C):
        load(window, model_id)
    assert sorted(shares(window.close(seen(1100))).values()) == [33, 33, 34]


def test_a_load_of_unknown_size_counts_like_the_mean_of_those_beside_it():
    window = opened()
    load(window, A, expected=100)
    load(window, B, expected=300)
    load(window, C)
    assert shares(window.close(seen(1600))) == {A: 100, B: 300, C: 200}


def test_a_load_of_unknown_size_alone_takes_what_a_device_has_lost_that_no_other_uses():
    window = opened()
    window.loaded(A, "a", {TWO: 7}, known=False)
    load(window, B)
    measured = {each.name: each.bytes for each in window.close(seen(1400, 500))}
    assert measured == {A: {ONE: 0, TWO: 250}, B: {ONE: 400, TWO: 250}}


def test_what_the_known_loads_took_is_not_shared_and_not_reported():
    window = opened()
    load(window, A, expected=100, known=True)
    load(window, B, expected=1)
    load(window, C, expected=3)
    assert shares(window.close(seen(1500))) == {B: 100, C: 300}


def test_known_loads_together_teach_nothing():
    window = opened()
    load(window, A, expected=1, known=True)
    load(window, B, expected=1, known=True)
    assert window.close(seen(1500)) == []


def test_what_a_model_gave_back_meanwhile_was_taken_too():
    window = opened()
    load(window, A)
    window.released(D, {ONE: 200, Device("GPU-gone"): 9})
    assert window.close(seen(1100)) == [Measured(A, "key-a", {ONE: 300, TWO: 0}, exact=False)]


def test_expectations_on_a_device_that_nobody_reads_are_left_out():
    window = opened()
    window.loaded(A, "a", {Device("GPU-gone"): 9, ONE: 50}, known=True)
    load(window, B)
    assert window.close(seen(1100)) == [Measured(B, "key-b", {ONE: 50, TWO: 0}, exact=False)]


def test_a_load_that_was_disturbed_is_not_exact():
    window = opened()
    load(window, A)
    window.disturbed()
    assert window.close(seen(1100)) == [Measured(A, "key-a", {ONE: 100, TWO: 0}, exact=False)]


def test_a_model_loaded_and_released_within_the_window_leaves_nothing():
    window = opened()
    load(window, A, expected=100)
    window.released(A, {ONE: 100})
    assert window.close(seen(1000)) == []


def test_what_came_and_went_within_the_window_is_no_ones_but_denies_exactness():
    window = opened()
    load(window, A, expected=100)
    window.released(A, {ONE: 100})
    load(window, B)
    assert window.close(seen(1300)) == [Measured(B, "key-b", {ONE: 300, TWO: 0}, exact=False)]


def test_a_model_released_and_loaded_again_took_its_memory_anew():
    window = opened()
    window.released(A, {ONE: 100})
    load(window, A)
    assert shares(window.close(seen(1020))) == {A: 120}


def test_a_window_without_loads_teaches_nothing():
    assert opened().close(seen(5000)) == []


@pytest.mark.parametrize(
    "reading",
    [
        None,
        seen(1100, source="triton"),
        MemoryReading({ONE: DeviceReading(2**40, 1100)}, "nvml"),
    ],
)
def test_readings_that_cannot_be_compared_teach_nothing(reading):
    window = opened()
    load(window, A)
    assert window.close(reading) == []


def test_a_window_opened_without_a_reading_teaches_nothing():
    window = Window()
    window.open(None)
    load(window, A)
    assert window.close(seen(1100)) == []


def test_a_window_never_opened_or_closed_twice_teaches_nothing():
    window = Window()
    load(window, A)
    assert window.close(seen(1100)) == []
    window = opened()
    load(window, A)
    window.close(seen(1100))
    assert window.close(seen(1100)) == []


def test_a_new_window_knows_nothing_of_the_former():
    window = opened()
    load(window, A)
    window.released(B, {ONE: 500})
    window.open(seen(2000))
    load(window, C)
    assert window.close(seen(2100)) == [Measured(C, "key-c", {ONE: 100, TWO: 0}, exact=True)]


AMOUNTS = st.dictionaries(st.sampled_from([ONE, TWO]), st.integers(0, 2**40))
LOADED = st.tuples(st.just("loaded"), AMOUNTS, st.booleans())
RELEASED = st.tuples(st.just("released"), AMOUNTS)
# what may happen to one model within a window, in this order
STORIES = st.one_of(
    st.tuples(LOADED),
    st.tuples(RELEASED),
    st.tuples(LOADED, RELEASED),
    st.tuples(RELEASED, LOADED),
)
HISTORIES = st.dictionaries(st.sampled_from([A, B, C, D]), STORIES, max_size=4)
BASE = 2**40
DELTAS = st.fixed_dictionaries(dict.fromkeys([ONE, TWO], st.integers(-BASE, BASE)))


def told(events, delta, *, disturbed: bool) -> list[Measured]:
    window = Window()
    window.open(seen(BASE, BASE))
    if disturbed:
        window.disturbed()
    for model_id, (kind, *figures) in events:
        if kind == "loaded":
            window.loaded(model_id, f"key-{model_id}", figures[0], known=figures[1])
        else:
            window.released(model_id, figures[0])
    return window.close(seen(BASE + delta[ONE], BASE + delta[TWO]))


def one_after_another(histories):
    return [(model_id, event) for model_id, story in histories.items() for event in story]


@st.composite
def interleaved(draw):
    """The same events twice: model by model, and mixed as they may really come."""
    histories = draw(HISTORIES)
    left = {model_id: list(story) for model_id, story in histories.items()}
    mixed = []
    while any(left.values()):
        model_id = draw(st.sampled_from([m for m, story in left.items() if story]))
        mixed.append((model_id, left[model_id].pop(0)))
    return one_after_another(histories), mixed


@given(interleaved(), DELTAS, st.booleans())
def test_the_order_of_events_of_several_models_does_not_matter(orders, delta, disturbed):
    first, second = orders
    assert told(first, delta, disturbed=disturbed) == told(second, delta, disturbed=disturbed)


@given(HISTORIES, DELTAS, st.booleans())
def test_no_more_is_attributed_than_went_and_all_of_it_when_there_are_unknown_loads(
    histories, delta, disturbed
):
    measured = told(one_after_another(histories), delta, disturbed=disturbed)
    ends = {model_id: story[-1] for model_id, story in histories.items()}
    loads = {m: event for m, event in ends.items() if event[0] == "loaded"}
    gone = [story[0][1] for story in histories.values() if story[0][0] == "released"]
    is_exact = len(loads) == 1 and not disturbed and all(len(s) == 1 for s in histories.values())
    is_exact = is_exact and not gone
    reported = {m for m, (_, _, known) in loads.items() if is_exact or not known}
    assert [each.name for each in measured] == sorted(reported)
    assert all(each.exact == is_exact for each in measured)
    for device in (ONE, TWO):
        adjusted = delta[device] + sum(held.get(device, 0) for held in gone)
        adjusted = min(adjusted, BASE + delta[device])  # no more than is used in all
        if not is_exact:
            adjusted -= sum(e.get(device, 0) for _, e, known in loads.values() if known)
        assert all(each.bytes[device] >= 0 for each in measured)
        attributed = sum(each.bytes[device] for each in measured)
        assert attributed == (max(0, adjusted) if measured else 0)


def grown(**least: int) -> Growth:
    """Models of which so much was measured on ONE, and a look at as much in all."""
    accounts = {TritonName(name): account(name, count) for name, count in least.items()}
    growth = Growth(accounts)
    growth.tick(seen(sum(least.values())), [], {})
    return growth


def account(name: str, least: int) -> Account:
    record = ModelRecord(ModelId(name), TritonName(name), ModelSource(""))
    return Account(record, name, Estimate({}, Basis.DEFAULT), least={ONE: least})


def took(account: Account | None) -> tuple[str, Bytes | None]:
    assert account is not None
    return account.name, account.least


def test_growth_is_that_of_the_only_model_with_traffic():
    assert took(grown(a=5, b=7).tick(seen(15), [A], {})) == (A, {ONE: 8, TWO: 0})


@pytest.mark.parametrize("active", [[], [A, B]])
def test_growth_is_no_ones_when_none_or_several_had_traffic(active):
    growth = grown(a=5, b=7)
    assert growth.tick(seen(20), active, {}) is None
    assert took(growth.tick(seen(23), [A], {})) == (A, {ONE: 8, TWO: 0})


@pytest.mark.parametrize("active", [[], [A], [B], [A, B]])
def test_what_is_given_back_may_be_any_ones(active):
    growth = grown(a=50, b=70)
    assert growth.tick(seen(100), active, {}) is None
    assert took(growth.tick(seen(120), [A], {})) == (A, {ONE: 50, TWO: 0})


def test_what_one_takes_alone_and_gives_back_beside_others_never_adds_up():
    growth = grown(a=20, b=20)
    for _ in range(10):
        assert took(growth.tick(seen(140), [A], {})) == (A, {ONE: 120, TWO: 0})
        assert growth.tick(seen(40), [B], {}) is None


def test_nobody_takes_more_than_is_used_beyond_the_baseline():
    growth = grown(a=50)
    assert took(growth.tick(seen(60), [A], {ONE: 25})) == (A, {ONE: 35, TWO: 0})


def test_of_a_model_that_was_not_measured_no_growth_is_told():
    assert grown(a=5).tick(seen(15), [B], {}) is None


def test_growth_over_an_operation_is_no_ones():
    growth = grown(a=5)
    growth.end(seen(5))
    assert growth.tick(seen(20), [A], {}) is None
    assert took(growth.tick(seen(23), [A], {})) == (A, {ONE: 8, TWO: 0})


@pytest.mark.parametrize("between", [None, seen(5, source="triton"), MemoryReading({}, "nvml")])
def test_growth_is_told_only_between_readings_that_can_be_compared(between):
    growth = grown(a=5)
    assert growth.tick(between, [A], {}) is None
    assert growth.tick(seen(20), [A], {}) is None
    assert took(growth.tick(seen(23), [A], {})) == (A, {ONE: 8, TWO: 0})


def test_what_was_given_back_before_an_operation_seems_to_be_taken_by_nobody_after_it():
    growth = grown(a=50, b=70)
    growth.end(seen(100))
    growth.begin(seen(200))
    assert took(growth.tick(seen(220), [A], {})) == (A, {ONE: 50, TWO: 0})
