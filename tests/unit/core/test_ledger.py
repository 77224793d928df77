"""The book of memory: scenarios. What holds after any sequence is in test_ledger_sequences.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core.ledger import UNSEEN, DeviceBook, Ledger, LedgerSnapshot
from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId

A, B = ModelId("a"), ModelId("b")
ONE, TWO = Device("GPU-1"), Device("GPU-2")
SIZES = st.integers(min_value=0, max_value=2**40)


def seen(**used: int) -> MemoryReading:
    """Of `one` and `two`, with limits of 1000 and 2000 bytes, and the host with 500."""
    known = {"one": (ONE, 1000, 0), "two": (TWO, 2000, 1), "host": (HOST, 500, None)}
    readings = {}
    for name, bytes_used in used.items():
        device, limit, index = known[name]
        readings[device] = DeviceReading(limit, bytes_used, index)
    return MemoryReading(readings)


def opened(memory_limit: int | None = None, headroom_bytes: int = 0) -> Ledger:
    ledger = Ledger(memory_limit, lambda _: headroom_bytes)
    ledger.open(seen(one=0, two=0))
    return ledger


def test_a_reservation_counts_until_it_is_settled_and_then_as_held():
    ledger = opened()
    ledger.reserve(A, {ONE: 300, TWO: 100})
    book = ledger.snapshot()
    assert (book.devices[ONE].reserved_bytes, book.devices[ONE].held_bytes) == (300, 0)
    assert (book.reserved_bytes, book.held_bytes) == (400, 0)
    assert ledger.settle(A, {ONE: 250}) == {ONE: 250}
    book = ledger.snapshot()
    assert (book.reserved_bytes, book.held_bytes, book.models) == (0, 250, 1)
    assert ledger.of(A) == {ONE: 250}
    assert book.free(None) == {ONE: 750, TWO: 2000}
    assert book.free_bytes(None) == 2750


def test_without_a_measurement_the_estimate_stands():
    ledger = opened()
    ledger.reserve(A, {ONE: 300})
    assert ledger.settle(A, None) == {ONE: 300}


def test_a_measurement_below_zero_holds_nothing():
    ledger = opened()
    ledger.reserve(A, {ONE: 300})
    assert ledger.settle(A, {ONE: -5, TWO: 4}) == {ONE: 0, TWO: 4}


def test_a_held_figure_below_zero_is_none():
    ledger = opened()
    ledger.hold(A, {ONE: -5})
    assert ledger.of(A) == {ONE: 0}


def test_release_gives_back_reserved_and_held_alike_and_may_come_twice():
    ledger = opened()
    before = ledger.snapshot()
    ledger.reserve(A, {ONE: 300})
    ledger.release(A)
    ledger.reserve(B, {TWO: 200})
    ledger.settle(B, {TWO: 100})
    ledger.release(B)
    ledger.release(B)
    assert ledger.snapshot() == before
    assert ledger.of(B) == {}


@pytest.mark.parametrize("settled", [False, True])
def test_a_model_is_booked_once(settled):
    ledger = opened()
    ledger.reserve(A, {ONE: 1})
    if settled:
        ledger.settle(A, None)
    with pytest.raises(ValueError, match="'a' is in the ledger already"):
        ledger.reserve(A, {ONE: 1})
    assert ledger.snapshot().models == 1


def test_negative_bytes_cannot_be_reserved():
    ledger = opened()
    with pytest.raises(ValueError, match="not negative"):
        ledger.reserve(A, {ONE: 5, TWO: -1})
    assert ledger.snapshot().models == 0


def test_what_was_not_reserved_cannot_be_settled():
    ledger = opened()
    with pytest.raises(KeyError):
        ledger.settle(A, {ONE: 5})
    assert ledger.of(A) == {}


def test_a_model_found_after_a_restart_is_held_without_a_reservation():
    ledger = opened()
    ledger.hold(A, {ONE: 70})
    assert ledger.snapshot().devices[ONE].held_bytes == 70


def test_a_figure_learned_later_takes_the_place_of_the_former():
    ledger = opened()
    ledger.hold(A, {ONE: 70})
    ledger.hold(A, {TWO: 90})
    assert (ledger.of(A), ledger.snapshot().held_bytes) == ({TWO: 90}, 90)


def test_what_is_held_is_no_longer_reserved():
    ledger = opened()
    ledger.reserve(A, {ONE: 70})
    ledger.hold(A, {ONE: 60})
    book = ledger.snapshot()
    assert (book.reserved_bytes, book.held_bytes, book.models) == (0, 60, 1)


def test_what_the_caller_does_to_its_figures_afterwards_changes_no_book():
    ledger, needs = opened(), {ONE: 70}
    ledger.reserve(A, needs)
    needs[ONE] = 0
    assert ledger.of(A) == {ONE: 70}


def test_the_limit_set_and_the_headroom_are_for_each_device():
    ledger = Ledger(1500, headroom=lambda limit: limit // 10)
    ledger.open(seen(one=0, two=0))
    devices = ledger.snapshot().devices
    assert (devices[ONE].limit_bytes, devices[ONE].headroom_bytes) == (1000, 100)
    assert (devices[TWO].limit_bytes, devices[TWO].headroom_bytes) == (1500, 150)
    assert (devices[ONE].index, devices[TWO].index) == (0, 1)
    assert (ledger.snapshot().limit_bytes, ledger.snapshot().headroom_bytes) == (2500, 250)


def test_a_device_seen_later_is_added_and_the_others_stay():
    ledger = Ledger(None, lambda _: 0)
    ledger.open(seen(one=10))
    ledger.rebase(seen(one=10))
    ledger.reserve(A, {ONE: 5, TWO: 7})
    ledger.open(seen(one=999, two=0))
    devices = ledger.snapshot().devices
    assert devices[ONE] == DeviceBook(1000, 0, 10, 5, 0, 0)
    assert devices[TWO] == DeviceBook(2000, 0, 0, 7, 0, 1)


def test_a_reading_without_a_known_device_takes_none_away():
    ledger = opened()
    ledger.open(seen(two=0))
    assert ledger.snapshot().devices.keys() == {ONE, TWO}


def test_a_limit_without_a_reading_is_that_of_one_unseen_device():
    ledger = Ledger(800, lambda _: 50)
    ledger.open(None)
    assert ledger.snapshot().devices == {UNSEEN: DeviceBook(800, 50, 0, 0, 0)}
    assert ledger.snapshot().free_bytes(None) == 750


def test_without_a_reading_the_known_devices_are_enough():
    ledger = opened(memory_limit=800)
    ledger.open(None)
    assert ledger.snapshot().devices.keys() == {ONE, TWO}


def test_the_unseen_device_goes_once_others_are_seen():
    ledger = Ledger(800, lambda _: 0)
    ledger.open(None)
    ledger.open(seen(one=0))
    assert ledger.snapshot().devices.keys() == {ONE}


@pytest.mark.parametrize("settled", [False, True])
def test_the_unseen_device_stays_while_a_model_has_bytes_on_it(settled):
    ledger = Ledger(800, lambda _: 0)
    ledger.open(None)
    ledger.reserve(A, {UNSEEN: 5})
    if settled:
        ledger.settle(A, None)
    ledger.open(seen(one=0))
    assert ledger.snapshot().devices.keys() == {UNSEEN, ONE}
    ledger.release(A)
    ledger.open(seen(one=0))
    assert ledger.snapshot().devices.keys() == {ONE}


def test_a_reading_without_devices_leaves_the_unseen_one():
    ledger = Ledger(800, lambda _: 0)
    ledger.open(None)
    ledger.open(MemoryReading({}))
    assert ledger.snapshot().devices.keys() == {UNSEEN}


def test_without_any_limit_nothing_is_known_of_free_memory():
    ledger = Ledger(None, lambda _: 0)
    ledger.open(None)
    ledger.reserve(A, {ONE: 200})
    book = ledger.snapshot()
    assert (book.limit_bytes, book.free_bytes(None), book.free(None)) == (None, None, {})
    assert book.tightest({ONE: 1}, None) is None
    assert (book.models, ledger.of(A)) == (1, {ONE: 200})


def test_the_baseline_is_what_is_used_and_no_models():
    ledger = opened()
    ledger.hold(A, {ONE: 100, TWO: 100})
    ledger.rebase(seen(one=150, two=60))
    devices = ledger.snapshot().devices
    assert (devices[ONE].baseline_bytes, devices[TWO].baseline_bytes) == (50, 0)
    assert ledger.snapshot().baseline_bytes == 50


def test_the_baseline_stays_where_nobody_reads():
    ledger = opened()
    ledger.rebase(seen(one=150, two=60))
    ledger.rebase(seen(two=70))
    ledger.rebase(None)
    devices = ledger.snapshot().devices
    assert (devices[ONE].baseline_bytes, devices[TWO].baseline_bytes) == (150, 70)


def test_the_baseline_stays_while_something_is_reserved():
    ledger = opened()
    ledger.reserve(A, {ONE: 100})
    ledger.rebase(seen(one=150))
    assert ledger.snapshot().baseline_bytes == 0


def test_free_is_the_worse_of_book_and_observation_less_the_headroom():
    ledger = opened(headroom_bytes=50)
    ledger.rebase(seen(one=100, two=0))
    ledger.hold(A, {ONE: 200})
    book = ledger.snapshot()
    assert book.free(None)[ONE] == 650
    assert book.free(seen(one=120))[ONE] == 650  # the book knows more
    assert book.free(seen(one=500))[ONE] == 450  # others take memory too
    assert book.free(seen(one=5000))[ONE] == 0


def test_an_observation_does_not_see_what_is_only_reserved():
    ledger = opened()
    ledger.reserve(A, {ONE: 200})
    assert ledger.snapshot().free(seen(one=500)) == {ONE: 300, TWO: 2000}


@pytest.mark.parametrize(
    ("needs", "tightest"),
    [
        ({ONE: 1100, TWO: 2050}, ONE),
        ({ONE: 1050, TWO: 2100}, TWO),
        ({ONE: 10, TWO: 1900}, TWO),  # both fit: 990 bytes would be left, and 100
        ({}, ONE),
    ],
)
def test_the_tightest_device_is_the_one_with_most_missing_or_least_left(needs, tightest):
    assert opened().snapshot().tightest(needs, None) == tightest


def test_the_tightest_device_depends_on_what_is_seen():
    assert opened().snapshot().tightest({ONE: 10, TWO: 10}, seen(one=0, two=1990)) == TWO


BOOKS = st.builds(DeviceBook, SIZES, SIZES, SIZES, SIZES, SIZES)


@given(BOOKS, st.none() | SIZES)
def test_free_is_never_negative_nor_above_limit_less_headroom(book, used):
    found = book.free_bytes(used)
    assert 0 <= found <= max(0, book.limit_bytes - book.headroom_bytes)
    assert found <= max(0, book.limit_bytes - (used or 0) - book.reserved_bytes)


@given(
    st.dictionaries(st.sampled_from([ONE, TWO, HOST]), BOOKS, min_size=1),
    st.dictionaries(st.sampled_from([ONE, TWO, HOST]), SIZES),
    st.none() | st.builds(seen, one=SIZES, two=SIZES),
)
def test_all_fits_exactly_when_the_tightest_device_has_room(books, needs, reading):
    book = LedgerSnapshot(books, models=1)
    free = book.free(reading)
    tightest = book.tightest(needs, reading)
    fits = all(needs.get(device, 0) <= free[device] for device in books)
    assert (needs.get(tightest, 0) <= free[tightest]) == fits


# -- what nothing accounts for ------------------------------------------------------------------


def unaccounted(ledger: Ledger) -> dict[Device, int | None]:
    return {d: book.unaccounted_bytes for d, book in ledger.snapshot().devices.items()}


def test_what_is_used_beyond_a_fresh_triton_and_its_models_is_unaccounted_for():
    ledger = opened()
    assert unaccounted(ledger) == {ONE: None, TWO: None}
    ledger.started(seen(one=50, two=0))
    ledger.hold(A, {ONE: 300})
    ledger.audit(seen(one=360, two=0))
    assert unaccounted(ledger) == {ONE: 10, TWO: 0}


def test_a_leak_stays_unaccounted_for_when_the_baseline_has_taken_it_in():
    ledger = opened()
    ledger.started(seen(one=50, two=0))
    ledger.rebase(seen(one=250, two=0))
    ledger.audit(seen(one=250, two=0))
    assert unaccounted(ledger)[ONE] == 200


def test_models_that_take_less_than_they_hold_leave_nothing_unaccounted_for():
    ledger = opened()
    ledger.started(seen(one=50, two=0))
    ledger.hold(A, {ONE: 300})
    ledger.audit(seen(one=200, two=0))
    assert unaccounted(ledger)[ONE] == 0


def test_a_triton_that_starts_anew_has_nothing_unaccounted_for():
    ledger = opened()
    ledger.started(seen(one=50, two=0))
    ledger.audit(seen(one=250, two=0))
    ledger.started(seen(one=60, two=0))
    assert unaccounted(ledger)[ONE] == 0
    ledger.audit(seen(one=70, two=0))
    assert unaccounted(ledger)[ONE] == 10
