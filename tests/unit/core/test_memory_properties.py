"""Random sequences of loads, unloads, failures and readings, and what must hold in all of them.

`TrueWorld` knows what each model takes, and shows it in its readings. `AnyBooks` has readings that
may say anything: decisions must be consistent with the books all the same. Figures are MiB.
"""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from adapter.core import times
from adapter.core.admission import (
    Answer,
    Evictable,
    MemoryRequest,
    Purpose,
    Reason,
    decide,
)
from adapter.core.ledger import DeviceBook, Ledger
from adapter.core.memory import Device
from adapter.core.model import TritonName
from adapter.core.sizes import Basis, Need
from tests.unit.core.books import GPU, MIB, package

LIMIT = 1000
TRITON = 40
KEYS = "abcdefgh"
LEAST = 64


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
            self.ledger.fail_load(TritonName(key), self.now, is_memory=True)
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

DEVICES = ("0", "1")
COUNTS = st.integers(0, 1200)
SIZES = st.dictionaries(st.sampled_from(DEVICES), COUNTS, min_size=1)
NAMES = st.sampled_from(KEYS)


def size_of(size):
    return {Device(device): count * MIB for device, count in size.items()}


class AnyBooks(RuleBasedStateMachine):
    """Two devices and any sequence of calls, with readings that may say anything."""

    @initialize(headroom=st.sampled_from([0, 50]))
    def begin(self, headroom):
        self.ledger = Ledger(
            {Device(device): DeviceBook(LIMIT * MIB, headroom * MIB) for device in DEVICES}
        )
        self.now = 0.0

    @rule(
        used=st.dictionaries(st.sampled_from(DEVICES), st.integers(0, 1500)), lag=st.integers(0, 9)
    )
    def observe(self, used, lag):
        self.now += 1
        self.ledger.observe(size_of(used), self.now, lag)
        for device in used:
            book = self.ledger.devices[device]
            if book.used_bytes is not None:
                moving = self.ledger.reserved(device) + self.ledger.leaving(device)
                assert book.used_bytes - moving <= book.settled_bytes <= book.used_bytes

    @rule(seconds=st.integers(0, 9))
    def wait(self, seconds):
        self.now += seconds
        self.ledger.advance(self.now)

    @rule(name=NAMES, size=SIZES, is_known=st.booleans(), is_declared=st.booleans())
    def begin_load(self, name, size, is_known, is_declared):
        if name not in self.ledger.models and name not in self.ledger.loads:
            self.ledger.begin_load(TritonName(name), self.need(name, size, is_known, is_declared))

    def need(self, key, size, is_known, is_declared):
        count = size_of(size)
        known = count if is_known else {}
        basis = Basis.MEASURED if is_known else Basis.FILES
        declared = count if is_known and is_declared else {}
        return Need(key, count, basis, is_known=is_known, declared=declared, known_bytes=known)

    @rule(name=NAMES)
    def end_load(self, name):
        if name in self.ledger.loads:
            self.ledger.end_load(TritonName(name), self.now)

    @rule(name=NAMES, reported=st.just({}) | SIZES)
    def settle(self, name, reported):
        if name in self.ledger.loads and self.ledger.can_settle(name):
            settlement = self.ledger.settle(TritonName(name), size_of(reported))
            assert all(count >= 0 for count in settlement.booked.values())

    @rule(name=NAMES, is_memory=st.booleans())
    def fail_load(self, name, is_memory):
        if name in self.ledger.loads:
            self.ledger.fail_load(TritonName(name), self.now, is_memory=is_memory)

    @rule(name=NAMES)
    def begin_unload(self, name):
        if name in self.ledger.models and name not in self.ledger.unloads:
            self.ledger.begin_unload(TritonName(name))

    @rule(name=NAMES)
    def end_unload(self, name):
        self.ledger.end_unload(TritonName(name), self.now)

    @rule(name=NAMES)
    def strand(self, name):
        is_known = name in self.ledger.loads or name in self.ledger.unloads
        if is_known and name not in self.ledger.stuck:
            self.ledger.strand(TritonName(name))

    @rule(name=NAMES)
    def free_stuck(self, name):
        self.ledger.free_stuck(TritonName(name), self.now)

    @rule(name=NAMES)
    def note_futile_eviction(self, name):
        self.ledger.record_futile_eviction(name, self.now)

    @rule()
    def exit(self):
        self.ledger.start_life()

    @rule(
        key=NAMES,
        size=SIZES,
        flags=st.tuples(st.booleans(), st.booleans()),
        evictable=st.sets(NAMES),
        busy=st.sets(NAMES),
        terms=st.tuples(st.sampled_from(Purpose), st.integers(0, 9), st.integers(-3, 9)),
    )
    def ask(self, *, key, size, flags, evictable, busy, terms):
        need = self.need(key, size, *flags)
        purpose, waited, remaining = terms
        candidates = tuple(Evictable(TritonName(name), name in busy) for name in sorted(evictable))
        request = MemoryRequest(purpose, self.now - waited, self.now + remaining, candidates)
        decision = decide(self.ledger, need, request, self.now)
        self.check_figures(decision)
        if decision.answer is Answer.TOO_LARGE:
            self.check_permanent_refusal(decision)
        elif decision.answer is Answer.EVICT:
            self.check_eviction(decision, evictable, busy)
        elif decision.answer is Answer.INSUFFICIENT:
            self.check_refusal(decision)

    def check_figures(self, decision):
        figures = decision.figures
        assert figures.device in decision.need.bytes
        assert figures.needed_bytes >= 0
        assert figures.free_bytes >= 0
        assert figures.limit_bytes == LIMIT * MIB

    def check_permanent_refusal(self, decision):
        """Check that the reason of a refusal for good still holds."""
        book = self.ledger.devices[decision.figures.device]
        if decision.reason is Reason.DECLARED:
            count = decision.need.declared[decision.figures.device]
            assert count > book.limit_bytes - (book.empty_bytes or 0)
            return
        assert decision.reason is Reason.TRIED
        tried = self.ledger.tried[decision.need.package_key]
        for device in decision.need.bytes.keys() & tried.keys():
            book = self.ledger.devices[device]
            stays = book.settled_bytes - self.ledger.booked(device)
            assert book.limit_bytes - stays <= tried[device] + LEAST * MIB

    def check_eviction(self, decision, evictable, busy):
        """Check that by the books the eviction can be enough."""
        ledger = self.ledger
        assert decision.victims
        loaded = ledger.evictable()
        assert set(decision.victims) <= (evictable - busy) & loaded.keys()
        evicted_at = ledger.futile_evictions.get(decision.need.package_key, -100)
        assert self.now - evicted_at >= times.RECENT_SECONDS
        for device, count in decision.need.bytes.items():
            book = ledger.devices[device]
            stays = sum(
                booked.get(device, 0)
                for name, booked in ledger.models.items()
                if name not in evictable
            )
            unbooked = sum(
                size.get(device, 0)
                for name, size in loaded.items()
                if name in evictable and name not in ledger.models
            )
            room = book.limit_bytes - book.headroom_bytes - (book.empty_bytes or 0)
            assert count <= room - (ledger.reserved(device) - unbooked) - stays

    def check_refusal(self, decision):
        """Check that something is on a lacking device: on an empty one a load is tried."""
        lacking = [
            device
            for device, count in decision.need.bytes.items()
            if count > self.ledger.free(device)
        ]
        ledger = self.ledger
        sizes = list(ledger.models.values())
        sizes += [load.reserved for load in ledger.loads.values()]
        sizes += [leaving.booked for leaving in ledger.unloads.values()]
        sizes += [leaving.booked for leaving in ledger.returning]
        sizes += ledger.stuck.values()
        assert any(device in size for size in sizes for device in lacking)


TestAnyBooks = AnyBooks.TestCase
