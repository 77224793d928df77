"""Checks which records there are: look-ups, names in Triton, versions, and moves."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adapter.core.model import ModelId, ModelSource, Placement, TritonName, numbered_name
from adapter.core.record import LoadedFor, ModelRecord, OnExit, Step
from adapter.core.registry import Move, Registry
from adapter.core.states import (
    AT_REST,
    TRANSITIONS,
    IllegalTransition,
    ModelEvent,
    ModelState,
)
from adapter.errors import ModelNotFound, ModelNotReady

M = ModelId("m")
N = ModelId("n")
# from absent to each state, without `load_started`
WAYS = {
    ModelState.PREPARING: [],
    ModelState.LOADING: [ModelEvent.LOAD_SENT],
    ModelState.READY: [ModelEvent.LOAD_SENT, ModelEvent.LOADED],
    ModelState.DEAD: [ModelEvent.LOAD_SENT, ModelEvent.LOADED, ModelEvent.PROCESS_DIED],
    ModelState.UNLOADING: [ModelEvent.LOAD_SENT, ModelEvent.LOAD_FAILED],
    ModelState.STUCK: [ModelEvent.LOAD_SENT, ModelEvent.LOAD_FAILED, ModelEvent.GIVEN_UP],
    ModelState.LOST: [ModelEvent.LOST],
}


class Clock:
    """Stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry() -> Registry:
    return Registry(Clock())


def make_record(registry: Registry, model_id: ModelId = M) -> ModelRecord:
    name = registry.free_name(model_id)
    return ModelRecord(model_id, name, ModelSource(f"/{model_id}"), LoadedFor.PLATFORM)


def bring(
    registry: Registry, state: ModelState, model_id: ModelId = M, *, beside: bool = False
) -> ModelRecord:
    """Bring a new record of the model into a state."""
    record = make_record(registry, model_id)
    add = registry.add_beside if beside else registry.add
    add(record)
    for event in WAYS[state]:
        registry.apply(record, event)
    assert record.state is state
    return record


def walk(registry: Registry, limit: int) -> list[list[str]]:
    """Return all pages as a client sees them: asked for while more are promised."""
    pages: list[list[str]] = []
    after = None
    has_more = True
    while has_more:
        records, has_more = registry.page(after, limit)
        pages.append([record.id for record in records])
        after = records[-1].id if records else after
    return pages


def snapshot(registry: Registry) -> object:
    """Return all that anybody can see of the registry."""
    records = registry.records()
    return (
        [(record, record.state, record.name, record.placement) for record in records],
        {record.id: registry.get(record.id) for record in records},
        {name: registry.owner_of(name) for record in records for name in names_of(record)},
        registry.counts(),
        registry.page(None, 100),
    )


def names_of(record: ModelRecord) -> set[TritonName]:
    return {record.name, *record.placement.names}


# -- look-ups -----------------------------------------------------------------------------------


def test_ready_model_is_served(registry):
    record = bring(registry, ModelState.READY)
    assert registry.serving(M) is registry.get(M) is record
    assert registry.is_serving(record)
    assert registry.owner_of(record.name) is record
    assert registry.records() == registry.records_of(M) == [record]
    assert len(registry) == 1


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (None, ModelNotFound, "model 'm' is not loaded"),
        (ModelState.PREPARING, ModelNotReady, "model 'm' is being loaded"),
        (ModelState.LOADING, ModelNotReady, "model 'm' is being loaded"),
        (ModelState.DEAD, ModelNotFound, "model 'm' has lost its process; load it again"),
        (ModelState.UNLOADING, ModelNotFound, "model 'm' is not loaded"),
        (ModelState.STUCK, ModelNotFound, "model 'm' is not loaded"),
        (ModelState.LOST, ModelNotReady, "model 'm' is being loaded again"),
    ],
)
def test_absence_is_explained_by_state(registry, state, error, text):
    if state is not None:
        record = bring(registry, state)
        assert not registry.is_serving(record)
    with pytest.raises(error) as caught:
        registry.serving(M)
    assert str(caught.value) == text
    assert caught.value.model_id == M
    assert type(caught.value) is error


def test_pages_have_each_serving_model_once(registry):
    for name in "dbacfe":
        bring(registry, ModelState.READY, ModelId(name))
    bring(registry, ModelState.LOADING, ModelId("g"))
    bring(registry, ModelState.READY, ModelId("a"), beside=True)
    assert walk(registry, 4) == [["a", "b", "c", "d"], ["e", "f"]]
    assert walk(registry, 3) == [["a", "b", "c"], ["d", "e", "f"]]


def test_longest_idle_model_counts(registry):
    assert registry.longest_idle_seconds(9.0) is None
    first, second = (bring(registry, ModelState.READY, model_id) for model_id in (M, N))
    first.usage.used_at = 2.0
    second.usage.used_at = 5.0
    assert registry.longest_idle_seconds(9.0) == 7.0
    first.usage.in_flight = 1
    assert registry.longest_idle_seconds(9.0) == 4.0


# -- names in Triton ----------------------------------------------------------------------------


def test_taken_name_is_followed_by_numbered_ones(registry):
    names = []
    for _ in range(3):
        record = bring(registry, ModelState.STUCK)
        names.append(record.name)
    assert names == ["m", numbered_name(ModelId("m"), 1), numbered_name(ModelId("m"), 2)]


def test_parts_of_a_package_have_names(registry):
    record = bring(registry, ModelState.LOADING)
    step = TritonName("step")
    registry.place(record, Placement((record.name,), along=(step,)))
    assert registry.owner_of(step) is record
    assert registry.free_name(ModelId("step")) == numbered_name(ModelId("step"), 1)
    registry.apply(record, ModelEvent.LOADED)
    registry.apply(record, ModelEvent.TRITON_EXITED)
    assert registry.free_name(ModelId("step")) == "step"


def test_rename_moves_the_name(registry):
    record = bring(registry, ModelState.PREPARING)
    registry.rename(record, TritonName("other"))
    assert record.name == "other"
    assert registry.owner_of(TritonName("other")) is record
    assert registry.is_free(TritonName("m"))


@pytest.mark.parametrize("state", list(ModelState)[1:])
def test_rename_is_refused_once_triton_was_asked(registry, state):
    record = bring(registry, state)
    with pytest.raises(ValueError, match="not being prepared"):
        registry.rename(record, TritonName("other"))


# -- states -------------------------------------------------------------------------------------


def test_adopted_model_serves_at_once(registry):
    record = make_record(registry)
    registry.add(record, ModelEvent.ADOPTED)
    assert registry.serving(M) is record


def test_lost_model_makes_room_for_its_load(registry):
    lost = bring(registry, ModelState.LOST)
    lost.usage.used_at = 7.0
    lost.gpu = 1
    record = make_record(registry)
    registry.add(record)
    assert registry.records() == [record]
    assert lost.state is None
    assert registry.counts()[ModelState.LOST] == 0
    assert record.usage.used_at == 7.0
    assert record.gpu == 1
    with pytest.raises(IllegalTransition):
        registry.apply(lost, ModelEvent.FORGOTTEN)


def test_dead_model_is_lost_with_triton(registry):
    record = bring(registry, ModelState.DEAD)
    registry.apply(record, ModelEvent.LOST)
    assert registry.records() == [record]
    assert record.state is ModelState.LOST


def test_freed_model_leaves_the_later_load(registry):
    stuck = bring(registry, ModelState.STUCK)
    record = bring(registry, ModelState.READY)
    registry.apply(stuck, ModelEvent.FREED)
    assert registry.serving(M) is record
    assert registry.records() == [record]


def test_move_clears_the_step(registry):
    clock = Clock()
    registry = Registry(clock)
    record = bring(registry, ModelState.PREPARING)
    record.step = Step.MEMORY
    record.blockers = (N,)
    clock.now = 3.0
    registry.apply(record, ModelEvent.LOAD_SENT)
    assert (record.step, record.blockers) == (None, ())
    assert record.state_since == 3.0


def test_listeners_hear_of_each_move(registry):
    heard: list[object] = []

    def first(move: Move) -> None:
        heard.append((move.before, move.event, move.after))
        assert move.record.state is move.after

    registry.subscribe(first)
    registry.subscribe(lambda move: heard.append(move.record.id))
    record = bring(registry, ModelState.LOST)
    bring(registry, ModelState.PREPARING)
    with pytest.raises(IllegalTransition):
        registry.apply(record, ModelEvent.LOADED)
    assert heard == [
        (None, ModelEvent.LOAD_STARTED, ModelState.PREPARING),
        "m",
        (ModelState.PREPARING, ModelEvent.LOST, ModelState.LOST),
        "m",
        (ModelState.LOST, ModelEvent.LOAD_STARTED, ModelState.PREPARING),
        "m",
    ]


# -- versions -----------------------------------------------------------------------------------


def test_switch_gives_callers_the_new_version(registry):
    old = bring(registry, ModelState.READY)
    new = bring(registry, ModelState.READY, beside=True)
    assert registry.serving(M) is old
    registry.switch(old, new)
    assert registry.serving(M) is new
    assert not registry.is_serving(old)
    assert old.state is ModelState.READY
    registry.apply(old, ModelEvent.UNLOAD_STARTED)
    registry.apply(old, ModelEvent.UNLOADED)
    assert registry.serving(M) is new
    assert walk(registry, 5) == [["m"]]


def test_switch_from_a_dead_version_serves(registry):
    old = bring(registry, ModelState.DEAD)
    new = bring(registry, ModelState.READY, beside=True)
    registry.switch(old, new)
    assert registry.serving(M) is new
    assert walk(registry, 5) == [["m"]]


def test_only_the_version_of_callers_returns(registry):
    old = bring(registry, ModelState.READY)
    new = bring(registry, ModelState.READY, beside=True)
    for record in (old, new):
        record.on_exit = OnExit.RELOAD
    assert registry.should_reload(old)
    assert not registry.should_reload(new)
    before = snapshot(registry)
    with pytest.raises(ValueError, match="version that is lost"):
        registry.apply(new, ModelEvent.LOST)
    assert snapshot(registry) == before
    old.on_exit = OnExit.FORGET
    assert not registry.should_reload(old)


# -- any order of events ------------------------------------------------------------------------

IDS = st.sampled_from([M, N, ModelId("m#1")])


class AnyOrder(RuleBasedStateMachine):
    """Adds, moves, places and switches records in any order; what may not be changes nothing."""

    records = Bundle("records")

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(lambda: 0.0)
        self.states: dict[ModelRecord, ModelState | None] = {}
        self.registry.subscribe(self.hear)

    def hear(self, move: Move) -> None:
        known = self.states.get(move.record)
        if move.event is ModelEvent.LOAD_STARTED and move.before is ModelState.LOST:
            assert known is None
        else:
            assert move.before is known
        assert TRANSITIONS[move.before, move.event] is move.after
        self.states[move.record] = move.after

    def attempt(self, act, *arguments: object) -> None:
        before = snapshot(self.registry)
        try:
            act(*arguments)
        except (IllegalTransition, ValueError):
            assert snapshot(self.registry) == before

    @rule(target=records, model_id=IDS, beside=st.booleans(), on_exit=st.sampled_from(OnExit))
    def add(self, model_id, beside, on_exit):
        record = make_record(self.registry, model_id)
        record.on_exit = on_exit
        known = self.registry.get(model_id)
        add = self.registry.add_beside if beside else self.registry.add
        self.attempt(add, record)
        if known is not None and known.state is None:  # a LOST one has made room
            self.states[known] = None
        return record

    @rule(record=records, event=st.sampled_from(ModelEvent))
    def move(self, record, event):
        self.attempt(self.registry.apply, record, event)

    @precondition(lambda self: self.states)
    @rule(record=records, steps=st.integers(1, 4))
    def bring_on(self, record, steps):
        """Take the usual way of a load, so that models get to be READY often enough."""
        for event in WAYS[ModelState.READY][:steps]:
            self.attempt(self.registry.apply, record, event)

    @rule()
    def exit_triton(self):
        """Move all records at rest and all loads, as the watcher and the operations do."""
        for record in self.registry.records():
            if record.state in AT_REST | {ModelState.LOADING}:
                returns = self.registry.should_reload(record)
                event = ModelEvent.LOST if returns else ModelEvent.TRITON_EXITED
                self.registry.apply(record, event)
        served = [r for r in self.registry.records() if self.registry.is_serving(r)]
        assert served == []

    @rule(record=records, parts=st.lists(st.sampled_from(["m", "n", "step"]), max_size=2))
    def place(self, record, parts):
        names = tuple(map(TritonName, parts))
        self.attempt(self.registry.place, record, Placement((*names, record.name)))

    @rule(record=records, name=st.sampled_from(["m", "n", "step"]))
    def rename(self, record, name):
        self.attempt(self.registry.rename, record, TritonName(name))

    @rule(old=records, new=records)
    def switch(self, old, new):
        served = self.registry.get(old.id)
        self.attempt(self.registry.switch, old, new)
        has_switched = self.registry.get(old.id) is not served
        if has_switched:
            assert served is old
            assert self.registry.get(old.id) is new
            assert new.state is ModelState.READY

    @invariant()
    def states_are_what_listeners_heard(self):
        living = {record: state for record, state in self.states.items() if state is not None}
        assert {record: record.state for record in self.registry.records()} == living

    @invariant()
    def names_are_unique(self):
        owners: dict[TritonName, ModelRecord] = {}
        for record in self.registry.records():
            if record.state is not ModelState.LOST:
                for name in names_of(record):
                    assert owners.setdefault(name, record) is record
                    assert self.registry.owner_of(name) is record
        for name in ("m", "n", "step"):
            assert self.registry.owner_of(TritonName(name)) is owners.get(TritonName(name))

    @invariant()
    def ids_have_one_record(self):
        for model_id in {record.id for record in self.states}:
            record = self.registry.get(model_id)
            assert record is None or record.state not in {None, ModelState.STUCK}
            lost = [r for r in self.registry.records_of(model_id) if r.state is ModelState.LOST]
            assert lost in ([], [record])

    @invariant()
    def figures_match_the_records(self):
        records = self.registry.records()
        for state, count in self.registry.counts().items():
            assert count == sum(record.state is state for record in records)
        serving = {record.id for record in records if self.registry.is_serving(record)}
        assert walk(self.registry, 100) == [sorted(serving)]


def test_registry_is_consistent_in_any_order():
    run_state_machine_as_test(AnyOrder)
