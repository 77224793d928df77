"""Which models exist: look-ups, pages, and records that are no longer in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core.artifacts import ArtifactKey, StoreFiles
from adapter.core.model import ModelId, ModelSource, Placement, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelEvent, ModelState
from adapter.errors import AlreadyLoaded, ModelNotFound, ModelNotReady


def begun(registry: Registry, name: str) -> ModelRecord:
    return registry.begin_load(ModelId(name), TritonName(name), ModelSource(f"/{name}"))


def ready(registry: Registry, name: str) -> ModelRecord:
    record = begun(registry, name)
    registry.apply(record, ModelEvent.LOADED)
    return record


def unload(registry: Registry, name: str) -> None:
    registry.apply(registry.begin_unload(ModelId(name)), ModelEvent.UNLOADED)


def ids(records: list[ModelRecord]) -> list[str]:
    return [record.id for record in records]


def walk(registry: Registry, limit: int) -> list[list[str]]:
    """All pages as a client sees them: asked for while more are promised."""
    pages, after, more = [], None, True
    while more:
        found, more = registry.page(after, limit)
        pages.append(ids(found))
        after = found[-1].id if found else after
    return pages


def test_a_ready_model_is_served():
    registry = Registry()
    record = ready(registry, "m")
    assert registry.serving(ModelId("m")) is record
    assert ModelId("m") in registry
    assert registry.records() == [record]


@pytest.mark.parametrize(
    ("state", "is_on_demand", "may"),
    [(ModelState.READY, True, True), (ModelState.READY, False, False)]
    + [(state, True, False) for state in ModelState if state is not ModelState.READY],
)
def test_only_a_ready_model_that_calls_have_loaded_may_be_evicted(state, is_on_demand, may):
    registry = Registry()
    record = ready(registry, "m")
    record.state, record.is_on_demand = state, is_on_demand
    if may:
        registry.refuse_unless_evictable(record)
    else:
        with pytest.raises(ModelNotFound, match="was unloaded meanwhile, or is a platform's now"):
            registry.refuse_unless_evictable(record)


def test_a_model_is_not_evicted_whose_name_another_one_has():
    registry = Registry()
    record, other = ready(registry, "m"), ready(registry, "n")
    record.is_on_demand = other.is_on_demand = True
    registry.exchange(record, other)
    with pytest.raises(ModelNotFound):
        registry.refuse_unless_evictable(record)


def test_an_unknown_model_is_not_found():
    with pytest.raises(ModelNotFound, match="'m' is not loaded") as caught:
        Registry().serving(ModelId("m"))
    assert caught.value.model_id == "m"


def test_a_model_being_loaded_is_not_ready():
    registry = Registry()
    begun(registry, "m")
    with pytest.raises(ModelNotReady, match="'m' is being loaded") as caught:
        registry.serving(ModelId("m"))
    assert caught.value.model_id == "m"


def test_a_model_being_unloaded_is_not_found():
    registry = Registry()
    ready(registry, "m")
    registry.begin_unload(ModelId("m"))
    with pytest.raises(ModelNotFound, match="'m' is not loaded"):
        registry.serving(ModelId("m"))


def test_a_dead_model_is_not_found_and_the_answer_says_what_to_do():
    registry = Registry()
    registry.died(ready(registry, "m"))
    with pytest.raises(ModelNotFound, match="load it again"):
        registry.serving(ModelId("m"))


def test_a_second_load_is_a_conflict_that_says_how_far_the_first_is():
    registry = Registry()
    record = begun(registry, "m")
    with pytest.raises(AlreadyLoaded, match="is being loaded"):
        begun(registry, "m")
    registry.apply(record, ModelEvent.LOADED)
    with pytest.raises(AlreadyLoaded, match="is loaded already"):
        begun(registry, "m")
    assert registry.get(ModelId("m")) is record


def test_a_model_that_is_about_to_be_loaded_again_is_not_ready_until_that_load_begins():
    registry = Registry()
    lost = ready(registry, "m")
    registry.apply(lost, ModelEvent.LOST)
    with pytest.raises(ModelNotReady, match="'m' is being loaded again"):
        registry.serving(ModelId("m"))
    with pytest.raises(ModelNotFound):
        registry.begin_unload(ModelId("m"))
    again = begun(registry, "m")
    assert registry.records() == [again]
    registry.died(lost)
    registry.apply(again, ModelEvent.LOADED)
    assert registry.serving(ModelId("m")) is again
    assert registry.counts()[ModelState.LOST] == 0


def test_a_stuck_model_leaves_its_id_free_and_keeps_its_name_until_it_is_freed():
    registry = Registry()
    stuck = begun(registry, "m")
    registry.apply(stuck, ModelEvent.GIVEN_UP)
    with pytest.raises(ModelNotFound):
        registry.serving(ModelId("m"))
    with pytest.raises(ModelNotFound):
        registry.begin_unload(ModelId("m"))
    name = registry.free_name(ModelId("m"))
    assert name != "m"
    registry.apply(registry.begin_load(ModelId("m"), name, ModelSource("/m")), ModelEvent.GIVEN_UP)
    assert registry.free_name(ModelId("m")) not in {"m", name}
    assert (registry.records(), list(registry.stuck)) == ([], ["m", name])
    registry.apply(stuck, ModelEvent.FREED)
    assert registry.free_name(ModelId("m")) == "m"


def test_a_model_of_an_earlier_run_is_ready_at_once_or_stuck():
    registry = Registry()
    adopted = registry.adopt(ModelId("m"), TritonName("m"), ModelSource("/m"))
    assert registry.serving(ModelId("m")) is adopted
    registry.apply(ModelRecord(ModelId("n"), TritonName("n"), ModelSource("")), ModelEvent.GIVEN_UP)
    assert registry.free_name(ModelId("n")) != "n"


def test_no_model_gets_the_name_that_another_has_while_it_comes_or_goes():
    registry = Registry()
    new = (ModelId("m#2"), TritonName("m"), ModelSource("/m"), ModelId("m"))
    record = registry.begin_load(*new)
    for event in (ModelEvent.LOADED, ModelEvent.UNLOAD_BEGUN):
        assert registry.free_name(ModelId("m")) != "m"
        registry.apply(record, event)
    assert registry.free_name(ModelId("m")) != "m"
    registry.apply(record, ModelEvent.UNLOADED)
    assert registry.free_name(ModelId("m")) == "m"


def test_the_first_free_name_of_several_ids_is_taken():
    registry = Registry()
    begun(registry, "m")
    assert registry.free_name(ModelId("m"), ModelId("m2")) == "m2"
    assert registry.free_name(ModelId("n"), ModelId("m2")) == "n"


def test_a_model_that_comes_back_keeps_its_name():
    registry = Registry()
    record = begun(registry, "m")
    assert registry.free_name(ModelId("m"), replaced=record) == "m"


def test_a_load_that_failed_leaves_no_record():
    registry = Registry()
    registry.apply(begun(registry, "m"), ModelEvent.LOAD_FAILED)
    assert registry.records() == []
    ready(registry, "m")


def test_unload_of_an_unknown_model_is_not_found():
    with pytest.raises(ModelNotFound):
        Registry().begin_unload(ModelId("m"))


def test_an_unload_that_failed_brings_the_model_back_into_the_list():
    registry = Registry()
    ready(registry, "m")
    record = registry.begin_unload(ModelId("m"))
    assert walk(registry, 10) == [[]]
    registry.apply(record, ModelEvent.UNLOAD_FAILED)
    assert walk(registry, 10) == [["m"]]


def test_a_failed_unload_of_a_dead_model_leaves_it_dead():
    registry = Registry()
    registry.died(ready(registry, "m"))
    record = registry.begin_unload(ModelId("m"))
    registry.apply(record, ModelEvent.DEAD_UNLOAD_FAILED)
    assert record.state is ModelState.DEAD
    assert walk(registry, 10) == [[]]


def test_only_ready_models_are_listed():
    registry = Registry()
    begun(registry, "loading")
    registry.died(ready(registry, "dead"))
    ready(registry, "ready")
    ready(registry, "unloading")
    registry.begin_unload(ModelId("unloading"))
    registry.apply(ready(registry, "returning"), ModelEvent.LOST)
    registry.apply(begun(registry, "stuck"), ModelEvent.GIVEN_UP)
    registry.begin_fetch(ModelId("fetching"), ArtifactKey("", "m"))
    registry.put_on_disk(ModelId("on disk"), StoreFiles(ArtifactKey("", "m")))
    assert walk(registry, 10) == [["ready"]]
    assert registry.counts() == dict.fromkeys(ModelState, 1)


def test_a_second_notice_of_the_same_death_is_harmless():
    registry = Registry()
    record = ready(registry, "m")
    registry.died(record)
    registry.died(record)
    assert record.state is ModelState.DEAD


@pytest.mark.parametrize("state", [ModelState.LOADING, ModelState.UNLOADING])
def test_a_death_notice_during_a_change_is_left_to_the_change(state):
    registry = Registry()
    record = begun(registry, "m")
    if state is ModelState.UNLOADING:
        registry.apply(record, ModelEvent.LOADED)
        registry.begin_unload(record.id)
    registry.died(record)
    assert record.state is state


def test_a_death_notice_of_a_vanished_model_touches_no_other_model():
    """A request of before a restart of Triton may end after the restart was noticed."""
    registry = Registry()
    ready(registry, "b")
    gone = ready(registry, "a")
    registry.apply(gone, ModelEvent.VANISHED)
    registry.died(gone)
    assert walk(registry, 10) == [["b"]]
    assert registry.records() == [registry.serving(ModelId("b"))]


def test_a_death_notice_of_the_last_run_does_not_touch_the_new_one():
    registry = Registry()
    old = ready(registry, "m")
    registry.apply(old, ModelEvent.VANISHED)
    new = ready(registry, "m")
    registry.died(old)
    assert registry.serving(ModelId("m")) is new
    assert registry.page(None, 10) == ([new], False)


@pytest.mark.parametrize(
    ("count", "pages"),
    [(0, [0]), (1, [1]), (2, [2]), (3, [3]), (4, [3, 1]), (6, [3, 3]), (7, [3, 3, 1])],
)
def test_pages_are_sorted_and_never_empty_at_the_end(count, pages):
    registry = Registry()
    names = [f"m{number:02}" for number in range(count)]
    for name in reversed(names):
        ready(registry, name)
    walked = walk(registry, 3)
    assert [len(page) for page in walked] == pages
    assert [name for page in walked for name in page] == names


@given(st.sets(st.text(min_size=1), max_size=12), st.integers(min_value=1, max_value=5))
def test_a_walk_finds_every_model_once_in_order(names, limit):
    registry = Registry()
    for name in names:
        ready(registry, name)
    assert [name for page in walk(registry, limit) for name in page] == sorted(names)


def test_models_may_come_and_go_between_pages():
    registry = Registry()
    for name in "bdfh":
        ready(registry, name)
    first, more = registry.page(None, 2)
    assert (ids(first), more) == (["b", "d"], True)
    unload(registry, "d")  # the page mark itself
    ready(registry, "a")  # before it: not seen in this walk
    ready(registry, "e")  # after it: seen
    assert (ids(registry.page(first[-1].id, 2)[0])) == ["e", "f"]
    second, more = registry.page(ModelId("f"), 2)
    assert (ids(second), more) == (["h"], False)


def test_a_page_behind_the_last_model_is_empty():
    registry = Registry()
    ready(registry, "a")
    assert registry.page(ModelId("z"), 5) == ([], False)


def test_a_record_says_whether_triton_knows_another_name():
    source = ModelSource("/m")
    assert not ModelRecord(ModelId("m"), TritonName("m"), source).is_renamed
    assert ModelRecord(ModelId("a b"), TritonName("ta.u.a_20b"), source).is_renamed


def test_the_least_recently_used_ready_model_is_the_one_idle_for_longest():
    registry = Registry()
    assert registry.longest_idle_seconds(100.0) is None
    for name, used_at in (("old", 10.0), ("new", 90.0)):
        ready(registry, name).usage.used_at = used_at
    begun(registry, "loading")
    assert registry.longest_idle_seconds(100.0) == 90.0


def test_a_model_at_work_is_not_idle():
    registry = Registry()
    record = ready(registry, "busy")
    record.usage.in_flight, record.usage.used_at = 1, 10.0
    assert registry.longest_idle_seconds(100.0) == 0.0


def test_names_in_triton_are_owned_until_their_model_leaves_the_table():
    registry = Registry()
    record = begun(registry, "m")
    assert not registry.is_owned(TritonName("m"))

    registry.place(record, Placement((TritonName("m"),), (TritonName("step"),)))
    registry.apply(record, ModelEvent.LOADED)
    registry.begin_unload(record.id)
    assert registry.is_owned(TritonName("m"))
    assert registry.is_owned(TritonName("step"))

    with registry.disowned() as before:
        pass
    with registry.disowned() as gone, registry.disowned() as gone_too:
        registry.apply(record, ModelEvent.UNLOADED)
    assert not registry.is_owned(TritonName("m"))
    assert (before, gone, gone_too) == (set(), {"m", "step"}, {"m", "step"})


def test_a_load_in_place_of_a_lost_model_does_not_own_the_names_of_that():
    registry = Registry()
    lost = ready(registry, "m")
    registry.place(lost, Placement((TritonName("m"),)))
    registry.apply(lost, ModelEvent.LOST)
    assert registry.is_owned(TritonName("m"))

    again = begun(registry, "m")
    assert not registry.is_owned(TritonName("m"))

    registry.place(again, Placement((TritonName("m"),)))
    registry.apply(again, ModelEvent.GIVEN_UP)
    assert not registry.is_owned(TritonName("m"))
