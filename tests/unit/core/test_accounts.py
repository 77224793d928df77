"""No learned size is larger than what the model truly took, whatever traffic there is."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from adapter.core.account import Account, Stage
from adapter.core.accounts import Accounts, MemorySplit
from adapter.core.ledger import Ledger
from adapter.core.memory import HOST, DeviceReading, MemoryReading, total
from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord
from adapter.core.sizing import Basis, Estimate, Sizes
from adapter.core.state import IllegalTransition

MIB = 2**20
LIMIT = 100_000 * MIB
BASELINE = 40 * MIB
A, B = ModelId("a"), ModelId("b")
NAMES = st.sampled_from([A, B, ModelId("c")])
AMOUNTS = st.integers(1, 400).map(lambda count: count * MIB)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), NAMES, AMOUNTS),
        st.tuples(st.just("unload"), NAMES, AMOUNTS),
        st.tuples(st.just("take"), NAMES, AMOUNTS),
        st.tuples(st.just("give back"), NAMES, AMOUNTS),
        st.tuples(st.just("parse"), NAMES, AMOUNTS),
        st.tuples(st.just("look"), NAMES, AMOUNTS),
    ),
    max_size=60,
)


def account(model_id: ModelId) -> Account:
    record = ModelRecord(model_id, TritonName(model_id), ModelSource(""))
    return Account(record, model_id, Estimate({}, Basis.DEFAULT))


@dataclass
class World:
    """Models that truly hold something, and what is believed of them. With `is_apart` readings tell
    the models' processes apart, else only totals are read.
    """

    is_apart: bool
    holds: dict[ModelId, int] = field(default_factory=dict)
    most: dict[ModelId, int] = field(default_factory=dict)
    parsing: int = 0
    active: set[ModelId] = field(default_factory=set)
    requests: int = 0

    def __post_init__(self) -> None:
        self.accounts, self.sizes = Accounts(), Sizes()
        self.ledger = Ledger(None, lambda _: 0)
        self.ledger.open(self.read())
        self.ledger.rebase(self.read())

    def read(self) -> MemoryReading:
        used = BASELINE + self.parsing + sum(self.holds.values())
        of_models = dict(self.holds) if self.is_apart else None
        return MemoryReading({HOST: DeviceReading(LIMIT, used)}, of_models=of_models)

    def learn(self, found) -> None:
        for measured in found:
            self.sizes.learn(measured.package_key, measured.bytes, exact=measured.exact)

    def change(self, model_id: ModelId, amount: int) -> None:
        self.holds[model_id] = max(0, self.holds[model_id] + amount)
        self.most[model_id] = max(self.most.get(model_id, 0), self.holds[model_id])

    def look(self) -> None:
        reading, active = self.read(), self.active
        self.active = set()
        baseline = self.ledger.snapshot().baseline
        self.learn(self.accounts.tick(reading, reading, active, baseline))

    def load(self, model_id: ModelId, amount: int, traffic: dict[ModelId, int]) -> None:
        """`traffic`: what others take meanwhile, asked to."""
        before = self.requests
        self.accounts.add(account(model_id))
        self.accounts.open(self.read(), before)
        self.holds[model_id] = 0
        self.change(model_id, amount)
        for other, more in traffic.items():
            self.change(other, more)
            self.requests += 1
        self.accounts.models[model_id].names = frozenset({model_id})
        found = self.accounts.loaded(self.accounts.models[model_id], self.read(), known=False)
        self.learn([found] if found else [])
        self.learn(self.accounts.close(self.read(), self.requests))

    def unload(self, model_id: ModelId) -> None:
        self.accounts.open(self.read(), self.requests)
        del self.holds[model_id]
        self.accounts.released(model_id, {})
        gone = self.accounts.forget(model_id)
        if gone is not None and gone.most is not None:
            self.sizes.lived(model_id, gone.most)

    def learned(self, model_id: ModelId) -> int:
        return (self.sizes.learned(model_id) or {}).get(HOST, 0)

    def check(self) -> None:
        for model_id, most in self.most.items():
            if self.sizes.is_exact(model_id):
                assert self.learned(model_id) <= most * 1.1 + 16 * MIB


@given(steps=STEPS)
@settings(max_examples=3 * settings().max_examples)
def test_no_size_is_larger_than_what_was_taken_where_processes_are_told_apart(steps):
    """Whatever goes on at the same time: loads, traffic, and large requests that Triton reads."""
    world = World(is_apart=True)
    for step, model_id, amount in steps:
        match step:
            case "load" if model_id not in world.holds:
                world.load(model_id, amount, dict.fromkeys(world.holds, amount // 2))
            case "unload" if model_id in world.holds:
                world.unload(model_id)
            case "take" | "give back" if model_id in world.holds:
                world.active.add(model_id)
                world.change(model_id, amount if step == "take" else -amount)
            case "parse":
                world.parsing = amount
            case _:
                world.look()
        world.check()


@given(steps=STEPS, sole=st.booleans())
@example(
    steps=[
        ("load", A, 30 * MIB),
        ("give back", A, 30 * MIB),
        ("load", B, 20 * MIB),
        ("look", A, MIB),
        ("take", A, 20 * MIB),
    ],
    sole=False,
)
@settings(max_examples=3 * settings().max_examples)
def test_no_size_is_larger_than_what_was_taken_where_only_totals_are_read(steps, sole):
    """What is taken and what is given back lie in different looks, and nothing is given back while
    a load is measured: totals cannot tell these.
    """
    world = World(is_apart=False)
    for step, model_id, amount in steps:
        match step:
            case "load" if model_id not in world.holds:
                busy = {} if sole else dict.fromkeys(world.holds, amount // 2)
                world.load(model_id, amount, busy)
            case "unload" if model_id in world.holds:
                world.unload(model_id)
            case "take" if model_id in world.holds:
                world.active.add(model_id)
                world.change(model_id, amount)
                world.look()
            case "give back" if model_id in world.holds:
                world.active.add(model_id if amount % 2 else min(world.holds))
                world.change(model_id, -amount)
                world.look()
            case _:
                world.look()
        world.check()


# -- rules in words -----------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["apart", "totals"])
def world(request):
    return World(request.param)


def test_what_one_takes_and_gives_back_while_another_has_requests_does_not_add_up(world):
    world.load(A, 20 * MIB, {})
    world.load(B, 20 * MIB, {})
    world.look()
    for _ in range(10):
        for model_id, change in ((A, 100), (B, 0), (A, -100), (B, 0)):
            world.change(model_id, change * MIB)
            world.active = {A} if change > 0 else {B}
            world.look()
    assert world.learned(A) == 120 * MIB
    assert world.learned(B) == 20 * MIB


def test_what_others_take_while_a_model_is_loaded_is_not_its_own():
    world = World(is_apart=True)
    world.load(A, 20 * MIB, {})
    world.load(B, 20 * MIB, {A: 100 * MIB})
    assert world.learned(B) == 20 * MIB


def test_where_only_totals_are_read_a_load_beside_requests_is_no_exact_measurement():
    world = World(is_apart=False)
    world.load(A, 20 * MIB, {})
    world.load(B, 20 * MIB, {A: 100 * MIB})
    assert not world.sizes.is_exact(B)
    world.unload(B)
    world.load(B, 20 * MIB, {})
    assert world.learned(B) == 20 * MIB


def test_what_triton_takes_to_read_requests_is_no_models():
    world = World(is_apart=True)
    world.load(A, 20 * MIB, {})
    world.parsing, world.active = 200 * MIB, {A}
    world.look()
    assert world.learned(A) == 20 * MIB


def test_a_model_without_a_process_of_its_own_is_measured_by_what_triton_itself_takes():
    world = World(is_apart=True)
    world.load(A, 20 * MIB, {})
    world.accounts.add(account(B))
    world.accounts.open(world.read(), 0)
    world.accounts.models[B].names = frozenset({B})
    world.parsing = 70 * MIB
    assert world.accounts.loaded(world.accounts.models[B], world.read(), known=False) is None
    assert not world.accounts.is_measured(B)
    world.change(A, 30 * MIB)
    world.learn(world.accounts.close(world.read(), 0))
    assert world.accounts.is_measured(B)
    assert world.learned(B) == 70 * MIB


def test_a_learned_size_comes_nearer_to_what_is_taken_from_life_to_life(world):
    world.sizes.learn(A, {HOST: 1000 * MIB}, exact=True)
    learned = []
    for _ in range(12):
        world.load(A, 100 * MIB, {})
        world.unload(A)
        learned.append(world.learned(A) // MIB)
    assert learned[:2] == [775, 606]
    assert 100 <= learned[-1] < 130


def test_a_load_that_was_undone_is_not_measured_later():
    world = World(is_apart=False)
    world.accounts.open(world.read(), 0)
    for model_id in (A, B):
        world.accounts.add(account(model_id))
        world.holds[model_id] = 50 * MIB
        world.accounts.loaded(world.accounts.models[model_id], world.read(), known=False)
    world.accounts.undone(ModelId("gone"), {})
    world.accounts.forget(A)
    assert [each.name for each in world.accounts.close(world.read(), 0)] == [B]


def test_a_load_in_processes_of_its_own_that_stands_still_has_no_share_of_the_rest():
    """Python code may read files for minutes beside a load in Triton's own process."""
    world = World(is_apart=True)
    world.accounts.open(world.read(), 0)
    for each in (account(A), account(B)):
        each.names = frozenset({each.name})
        each.estimate = Estimate({HOST: 80 * MIB}, Basis.DECLARED)
        world.accounts.add(each)
    still, loaded = world.accounts.models.values()
    world.holds[A], still.still_since = 40 * MIB, 0.0
    world.parsing = 80 * MIB  # what B takes of Triton's own process
    world.accounts.loaded(loaded, world.read(), known=False)
    [found] = world.accounts.close(world.read(), 0)
    assert (found.name, found.bytes) == (B, {HOST: 80 * MIB})


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_a_load_takes_that_stood_still_is_not_charged_to_one_beside_it(goes_on):
    """It stands still in the window of the other, or goes on in it and ends."""
    world = World(is_apart=False)
    for model_id, count in ((A, 30), (B, 50)):
        world.accounts.add(account(model_id))
        world.accounts.models[model_id].estimate = Estimate({HOST: count * MIB}, Basis.DECLARED)
    still, beside = world.accounts.models.values()
    still.still_since = 0.0 if goes_on else None
    world.accounts.open(world.read(), 0)
    world.holds |= {A: 30 * MIB, B: 50 * MIB}
    world.accounts.loaded(beside, world.read(), known=False)
    if goes_on:
        world.accounts.loaded(still, world.read(), known=False)
    still.still_since = 1.0
    found = {each.name: each.bytes for each in world.accounts.close(world.read(), 0)}
    assert found == {B: {HOST: 50 * MIB}}


def test_a_load_that_is_not_measured_at_its_end_is_due_until_the_next_quiet_moment():
    world = World(is_apart=False)
    world.accounts.open(world.read(), 0)
    first, second = account(A), account(B)
    for each in (first, second):
        world.accounts.add(each)
        world.holds[each.name] = 50 * MIB
    world.accounts.loaded(first, world.read(), known=False)
    assert (first.stage, second.stage) == (Stage.LOADED, Stage.LOADING)
    world.accounts.load_ended(first, world.read())
    assert (first.stage, world.accounts.loads) == (Stage.DUE, [second])
    world.accounts.loaded(second, world.read(), known=False)
    world.accounts.close(world.read(), 0)
    assert (first.stage, second.stage) == (Stage.SETTLED, Stage.SETTLED)
    world.accounts.load_ended(second, world.read())
    assert world.accounts.is_measured(B)
    world.accounts.forget(A)
    assert first.stage is Stage.GONE


def test_without_a_reading_no_load_is_due():
    accounts, load = Accounts(), account(A)
    accounts.add(load)
    accounts.loaded(load, None, known=False)
    assert not accounts.is_measured(A)
    accounts.load_ended(load, None)
    assert accounts.is_measured(A)


def test_a_stage_out_of_order_raises_and_changes_nothing():
    accounts, load = Accounts(), account(A)
    accounts.add(load)
    accounts.loaded(load, None, known=False)
    with pytest.raises(IllegalTransition, match="LOADED after LOADED"):
        accounts.loaded(load, None, known=False)
    assert (load.stage, accounts.loads) == (Stage.LOADED, [load])


@pytest.mark.parametrize("is_apart", [False, True])
def test_only_a_model_in_processes_of_its_own_is_known_by_their_names(is_apart):
    world = World(is_apart)
    world.load(A, 5 * MIB, {})
    assert world.accounts.apart(A) == ({A} if is_apart else set())
    assert world.accounts.apart(B) == set()


@pytest.mark.parametrize("reads_next", ["a tick", "the next measurement"])
def test_a_model_that_was_loaded_while_nothing_was_read_is_measured_by_the_next_reading(reads_next):
    world = World(is_apart=True)
    accounts, load = world.accounts, account(A)
    load.names = frozenset({A})
    accounts.add(load)
    accounts.open(world.read(), 0)
    world.holds[A] = 20 * MIB
    assert accounts.loaded(load, None, known=False) is None
    assert accounts.are_unread
    assert accounts.tick(None, None, (), {}) == []
    if reads_next == "a tick":
        world.look()
    else:
        world.learn(accounts.close(world.read(), 0))
    assert not accounts.are_unread
    assert world.learned(A) == 20 * MIB
    assert accounts.apart(A) == {A}


def test_all_are_apart_once_those_that_are_not_have_gone():
    world = World(is_apart=False)
    assert world.accounts.are_apart
    world.load(A, 5 * MIB, {})
    assert not world.accounts.are_apart
    world.unload(A)
    assert world.accounts.are_apart


def quiet_after(script, *, unloads=False) -> list[float | None]:
    """Watch the loads of A and B, in processes of their own, by a reading each second: those of A
    and of all the others hold what the script says. Return since when A was quiet.
    """
    accounts, load = Accounts(), account(A)
    for each in (load, account(B)):
        each.names = frozenset({each.name})
        each.begun = 100.0
        accounts.add(each)
    quiet = []
    for second, (own, shared) in enumerate(script):
        devices = {HOST: DeviceReading(LIMIT, own + shared + MIB)}
        reading = MemoryReading(devices, of_models={A: own, B: MIB})
        split = MemorySplit(total(reading.shared.used), reading.of_models or {})
        accounts.watch(split, 100.0 + second, 1.5, unloads=unloads)
        quiet.append(load.quiet_since)
    return quiet


@pytest.mark.parametrize(
    "script",
    [
        [(20 * MIB + second % 2 * 600 * 1024, 90 * MIB) for second in range(60)],
        [(20 * MIB - second % 7 * 3 * MIB, 90 * MIB) for second in range(60)],
        [(20 * MIB, 90 * MIB - second % 5 * 9 * MIB) for second in range(60)],
    ],
    ids=["noise", "its pages are shared more and less", "those of the others are"],
)
def test_a_load_is_quiet_whatever_comes_back_after_a_dip(script):
    assert quiet_after(script)[-1] == 100.0


def test_a_load_in_processes_of_its_own_is_quiet_whatever_the_others_take():
    script = [(20 * MIB, (90 + 5 * second) * MIB) for second in range(60)]
    assert quiet_after(script)[-1] == 100.0


def test_a_load_that_takes_more_than_ever_is_not_quiet():
    growing = [(min(second, 40) * 5 * MIB, 90 * MIB) for second in range(60)]
    assert quiet_after(growing)[-1] == 140.0
    in_triton = [(0, (90 + min(second, 40) * 5) * MIB) for second in range(60)]
    assert quiet_after(in_triton)[-1] == 140.0


def test_what_unloads_free_and_a_load_takes_again_is_its_growth():
    script = [(0, 900 * MIB), *((0, (100 + second * 5) * MIB) for second in range(9))]
    assert quiet_after(script, unloads=True)[-1] is None
