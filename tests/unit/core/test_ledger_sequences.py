"""Any order of entries in the ledger, beside two plain dicts that are kept by the rules alone."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adapter.core.ledger import UNSEEN, Ledger
from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId

DEVICES = [Device("GPU-1"), Device("GPU-2"), HOST]
SIZES = st.integers(min_value=0, max_value=2**40)
NAMES = st.sampled_from([ModelId(name) for name in "abcd"])
READINGS = st.builds(
    MemoryReading, st.dictionaries(st.sampled_from(DEVICES), st.builds(DeviceReading, SIZES, SIZES))
)


def amounts(smallest: int):
    return st.dictionaries(
        st.sampled_from([*DEVICES, UNSEEN]), st.integers(smallest, 2**40), max_size=4
    )


class AnySequence(RuleBasedStateMachine):
    @initialize(limit=st.none() | SIZES, reading=st.none() | READINGS)
    def begin(self, limit, reading):
        self.ledger = Ledger(limit, lambda limit_bytes: limit_bytes // 20)
        self.reserved: dict[ModelId, dict[Device, int]] = {}
        self.held: dict[ModelId, dict[Device, int]] = {}
        self.ledger.open(reading)

    @rule(reading=st.none() | READINGS)
    def see_more(self, reading):
        before = self.ledger.snapshot().devices
        self.ledger.open(reading)
        after = self.ledger.snapshot().devices
        assert before.keys() - {UNSEEN} <= after.keys()
        assert {d: after[d] for d in before if d in after} == {
            d: before[d] for d in before if d in after
        }

    @rule(reading=READINGS)
    def rebase(self, reading):
        before = self.ledger.snapshot()
        self.ledger.rebase(reading)
        after = self.ledger.snapshot()
        if self.reserved:
            assert after == before
        for device, book in after.devices.items():
            if device in reading.devices and not self.reserved:
                used = reading.devices[device].used_bytes
                assert book.baseline_bytes == max(0, used - book.held_bytes)

    @rule(name=NAMES, needs=amounts(0))
    def reserve(self, name, needs):
        if name in self.reserved or name in self.held:
            with pytest.raises(ValueError, match="already"):
                self.ledger.reserve(name, needs)
        else:
            self.ledger.reserve(name, needs)
            self.reserved[name] = needs

    @rule(name=NAMES, measured=st.none() | amounts(-100))
    def settle(self, name, measured):
        if name not in self.reserved:
            with pytest.raises(KeyError):
                self.ledger.settle(name, measured)
        else:
            needs = self.reserved.pop(name)
            self.held[name] = needs if measured is None else floored(measured)
            assert self.ledger.settle(name, measured) == self.held[name]

    @rule(name=NAMES, held=amounts(-100))
    def hold(self, name, held):
        self.ledger.hold(name, held)
        self.reserved.pop(name, None)
        self.held[name] = floored(held)

    @rule(name=NAMES)
    def release(self, name):
        before, taken = self.ledger.snapshot(), self.ledger.of(name)
        self.ledger.release(name)
        after = self.ledger.snapshot()
        for device, book in after.devices.items():
            were = before.devices[device]
            given_back = (
                were.reserved_bytes + were.held_bytes - book.reserved_bytes - book.held_bytes
            )
            assert given_back == taken.get(device, 0)
        self.reserved.pop(name, None)
        self.held.pop(name, None)

    @invariant()
    def books_are_the_sums_of_the_models_parts(self):
        snapshot = self.ledger.snapshot()
        for device, book in snapshot.devices.items():
            assert book.reserved_bytes == on(device, self.reserved) >= 0
            assert book.held_bytes == on(device, self.held) >= 0
            assert book.baseline_bytes >= 0
        devices = snapshot.devices.values()
        assert snapshot.reserved_bytes == sum(book.reserved_bytes for book in devices)
        assert snapshot.held_bytes == sum(book.held_bytes for book in devices)
        assert snapshot.models == len(self.reserved) + len(self.held)
        for name in map(ModelId, "abcd"):
            assert self.ledger.of(name) == {**self.reserved, **self.held}.get(name, {})

    @invariant()
    def free_is_within_the_limit(self):
        snapshot = self.ledger.snapshot()
        for device, free in snapshot.free(None).items():
            book = snapshot.devices[device]
            assert 0 <= free <= book.limit_bytes - book.headroom_bytes
        assert (snapshot.free_bytes(None) is None) == (not snapshot.devices)

    def unloader(self):
        if hasattr(self, "ledger"):
            for name in map(ModelId, "abcd"):
                self.ledger.release(name)
            book = self.ledger.snapshot()
            assert (book.reserved_bytes, book.held_bytes, book.models) == (0, 0, 0)


def floored(figures: dict[Device, int]) -> dict[Device, int]:
    return {device: max(0, count) for device, count in figures.items()}


def on(device: Device, models: dict[ModelId, dict[Device, int]]) -> int:
    return sum(figures.get(device, 0) for figures in models.values())


TestAnySequence = AnySequence.TestCase
