"""Random sequences of loads, unloads, failures and readings, and what must hold in all of them.

`TrueWorld` knows what each model takes, and shows it in its readings. Figures are MiB.
"""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from adapter.core.admission import (
    Answer,
    Evictable,
    MemoryRequest,
    decide,
)
from adapter.core.ledger import DeviceBook, Ledger
from adapter.core.memory import Device
from adapter.core.model import TritonName
from tests.unit.core.books import GPU, MIB, package

LIMIT = 1000
TRITON = 40
KEYS = "abcdefgh"


class TrueWorld(RuleBasedStateMachine):
    """One device without neighbours, whose models do not leak. Each event takes a second."""

    @initialize(
        is_declared=st.booleans(),
        headroom=st.sampled_from([0, 50]),
        lag=st.sampled_from([0, 1, 3]),
        sizes=st.lists(st.integers(1, LIMIT - TRITON), min_size=len(KEYS), max_size=len(KEYS)),
        factors=st.lists(st.sampled_from([0.1, 0.5, 1, 2, 4]), min_size=8, max_size=8),
    )
    def begin(self, is_declared, headroom, lag, sizes, factors):
        self.is_declared = is_declared
        self.sizes = dict(zip(KEYS, sizes, strict=True))
        self.factors = dict(zip(KEYS, factors, strict=True))
        self.ledger = Ledger({Device(GPU): DeviceBook(LIMIT * MIB, headroom * MIB)})
        self.ledger.sizes.size_factor = 1.0
        self.lag = lag
        self.loading: dict[str, int] = {}  # bytes taken so far, in MiB
        self.loaded: dict[str, int] = {}
        self.leaving: dict[str, int] = {}
        self.history = [TRITON]  # in use, by second
        self.now = 0
        self.pass_second()
        self.read()

    def used(self):
        parts = (self.loading, self.loaded, self.leaving)
        return TRITON + sum(sum(part.values()) for part in parts)

    def pass_second(self):
        self.now += 1
        self.history.append(self.used())

    @rule()
    def read(self):
        shown_at = max(0, self.now - self.lag)
        self.ledger.observe({GPU: self.history[shown_at] * MIB}, self.now, self.lag)
        self.ledger.advance(self.now)
        self.settle()
        self.pass_second()

    @rule()
    def wait_without_a_reading(self):
        self.ledger.advance(self.now)
        self.settle()
        self.pass_second()

    def settle(self):
        for name in list(self.ledger.loads):
            if self.ledger.can_settle(name):
                assert self.ledger.settle(name).overrun is None

    @rule(key=st.sampled_from(KEYS), evicts=st.booleans())
    def load(self, key, evicts):
        if key in self.loading or key in self.loaded or key in self.leaving:
            return
        declared = self.sizes[key] if self.is_declared else None
        files = int(self.sizes[key] * self.factors[key])
        need = self.ledger.need_of(package(key, declared=declared, files=files))
        candidates = tuple(Evictable(TritonName(name)) for name in self.ledger.models)
        request = MemoryRequest(started_at=self.now - 5, candidates=candidates if evicts else ())
        decision = decide(self.ledger, need, request, self.now)
        # each package fits an empty device, and nothing but models takes memory
        assert decision.answer is not Answer.TOO_LARGE
        if decision.answer in {Answer.ADMIT, Answer.TRY}:
            self.ledger.begin_load(TritonName(key), need)
            self.loading[key] = 0
        for victim in decision.victims:
            self.begin_unload(victim)
        self.pass_second()

    @rule(key=st.sampled_from(KEYS), share=st.sampled_from([0.3, 0.7, 1, 1, 1]))
    def take(self, key, share):
        load = self.ledger.loads.get(key)
        if load is None or load.ended_at is not None:
            return
        self.loading[key] = max(self.loading[key], int(self.sizes[key] * share))
        if self.used() > LIMIT:
            assert self.leaving or not self.is_declared
            del self.loading[key]
            self.ledger.fail_load(TritonName(key), self.now, is_out_of_memory=True)
        elif share == 1:
            self.loaded[key] = self.loading.pop(key)
            self.ledger.end_load(TritonName(key), self.now)
        self.pass_second()

    @rule(key=st.sampled_from(KEYS))
    def unload(self, key):
        if key in self.ledger.models:
            self.begin_unload(key)
            self.pass_second()

    def begin_unload(self, key):
        self.ledger.begin_unload(TritonName(key))
        self.leaving[key] = self.loaded.pop(key)

    @rule(key=st.sampled_from(KEYS), share=st.sampled_from([0, 0, 0.5]))
    def give_back(self, key, share):
        if key in self.leaving:
            self.leaving[key] = int(self.leaving[key] * share)
            if self.leaving[key] == 0:
                del self.leaving[key]
                self.ledger.end_unload(TritonName(key), self.now)
            self.pass_second()

    @rule(key=st.sampled_from(KEYS), more=st.integers(1, 100))
    def grow(self, key, more):
        if not self.is_declared and key in self.ledger.models and self.used() + more <= LIMIT:
            self.loaded[key] += more
            self.pass_second()

    @invariant()
    def true_sizes_stay_below_the_limit(self):
        """Check that what was admitted fits to its end, if all is declared and nothing grows.

        The formula takes it that what is leaving has left before a load takes its memory.
        """
        if getattr(self, "is_declared", False):
            admitted = sum(self.sizes[key] for key in [*self.loading, *self.loaded])
            assert TRITON + admitted <= LIMIT

    @invariant()
    def books_are_exact_in_quiet(self):
        """Check that the reading counts when nothing is in progress, whatever happened before."""
        ledger = getattr(self, "ledger", None)
        if ledger is None or ledger.is_in_progress([GPU]):
            return
        book = ledger.devices[GPU]
        if book.used_bytes is not None:
            assert book.settled_bytes == book.used_bytes


TestTrueWorld = TrueWorld.TestCase
