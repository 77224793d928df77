"""The book of memory: scenarios, and what holds after any sequence of entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapter.core.ledger import Ledger, LedgerSnapshot
from adapter.core.model import ModelId

A, B = ModelId("a"), ModelId("b")
SIZES = st.integers(min_value=0, max_value=2**40)


def free(ledger: Ledger, used: int | None = None) -> int | None:
    return ledger.snapshot().free_bytes(used)


def test_a_reservation_counts_until_it_is_settled_and_then_as_held():
    ledger = Ledger(1000)
    ledger.reserve(A, 300)
    assert (ledger.snapshot().reserved_bytes, ledger.snapshot().held_bytes) == (300, 0)
    assert ledger.settle(A, 250) == 250
    assert (ledger.snapshot().reserved_bytes, ledger.snapshot().held_bytes) == (0, 250)
    assert ledger.of(A) == 250
    assert free(ledger) == 750


def test_without_a_measurement_the_estimate_stands():
    ledger = Ledger(1000)
    ledger.reserve(A, 300)
    assert ledger.settle(A, None) == 300


def test_a_measurement_below_zero_holds_nothing():
    ledger = Ledger(1000)
    ledger.reserve(A, 300)
    assert ledger.settle(A, -5) == 0


def test_release_gives_back_reserved_and_held_alike_and_may_come_twice():
    ledger = Ledger(1000)
    before = ledger.snapshot()
    ledger.reserve(A, 300)
    ledger.release(A)
    ledger.reserve(B, 200)
    ledger.settle(B, 100)
    ledger.release(B)
    ledger.release(B)
    assert ledger.snapshot() == before
    assert ledger.of(B) == 0


@pytest.mark.parametrize("settled", [False, True])
def test_a_model_is_booked_once(settled):
    ledger = Ledger(1000)
    ledger.reserve(A, 1)
    if settled:
        ledger.settle(A, 1)
    with pytest.raises(ValueError, match="'a' is in the ledger already"):
        ledger.reserve(A, 1)
    assert ledger.snapshot().models == 1


def test_negative_bytes_cannot_be_reserved():
    with pytest.raises(ValueError, match="-1 bytes"):
        Ledger(1000).reserve(A, -1)


def test_what_was_not_reserved_cannot_be_settled():
    ledger = Ledger(1000)
    with pytest.raises(KeyError):
        ledger.settle(A, 5)
    assert ledger.of(A) == 0


def test_free_is_the_worse_of_book_and_observation_less_the_headroom():
    ledger = Ledger(1000, headroom_bytes=50)
    ledger.baseline_bytes = 100
    ledger.reserve(A, 200)
    ledger.settle(A, None)
    assert free(ledger, None) == 650
    assert free(ledger, 120) == 650  # the book knows more
    assert free(ledger, 500) == 450  # others take memory too


def test_an_observation_does_not_see_what_is_only_reserved():
    ledger = Ledger(1000)
    ledger.reserve(A, 200)
    assert free(ledger, 500) == 300


def test_without_a_limit_nothing_is_known_of_free_memory():
    ledger = Ledger(None)
    ledger.reserve(A, 200)
    assert free(ledger, 500) is None


def test_its_picture_says_what_it_holds():
    assert "limit_bytes=7" in repr(Ledger(7))


BOOKS = st.builds(LedgerSnapshot, SIZES, SIZES, SIZES, SIZES, SIZES, st.just(1))


@given(BOOKS, st.none() | SIZES)
def test_free_is_never_negative_nor_above_limit_less_headroom(book, used):
    found = book.free_bytes(used)
    assert 0 <= found <= max(0, book.limit_bytes - book.headroom_bytes)
    assert found <= max(0, book.limit_bytes - (used or 0))


class AnySequence(RuleBasedStateMachine):
    """The ledger beside two plain dicts that are kept by the rules alone."""

    @initialize(limit=st.none() | SIZES)
    def open(self, limit):
        self.ledger = Ledger(limit)
        self.reserved: dict[str, int] = {}
        self.held: dict[str, int] = {}

    @rule(name=st.sampled_from("abcd"), size=SIZES)
    def reserve(self, name, size):
        if name in self.reserved or name in self.held:
            with pytest.raises(ValueError, match="already"):
                self.ledger.reserve(ModelId(name), size)
        else:
            self.ledger.reserve(ModelId(name), size)
            self.reserved[name] = size

    @rule(name=st.sampled_from("abcd"), measured=st.none() | st.integers(-100, 2**40))
    def settle(self, name, measured):
        if name not in self.reserved:
            with pytest.raises(KeyError):
                self.ledger.settle(ModelId(name), measured)
        else:
            expected = self.reserved.pop(name)
            self.held[name] = expected if measured is None else max(0, measured)
            assert self.ledger.settle(ModelId(name), measured) == self.held[name]

    @rule(name=st.sampled_from("abcd"))
    def release(self, name):
        self.ledger.release(ModelId(name))
        self.reserved.pop(name, None)
        self.held.pop(name, None)

    @invariant()
    def sums_are_right(self):
        book = self.ledger.snapshot()
        assert book.reserved_bytes == sum(self.reserved.values()) >= 0
        assert book.held_bytes == sum(self.held.values()) >= 0
        assert book.models == len(self.reserved) + len(self.held)
        assert (book.free_bytes(0) is None) == (book.limit_bytes is None)
        for name in "abcd":
            assert self.ledger.of(ModelId(name)) == {**self.reserved, **self.held}.get(name, 0)

    def teardown(self):
        if hasattr(self, "ledger"):
            for name in "abcd":
                self.ledger.release(ModelId(name))
            assert self.ledger.snapshot() == Ledger(self.ledger.limit_bytes).snapshot()


TestAnySequence = AnySequence.TestCase
