"""Which models exist: look-ups, pages, and records that are no longer in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapter.core.model import ModelId, ModelSource, TritonName
from adapter.core.registry import ModelRecord, Registry
from adapter.core.state import ModelState
from adapter.errors import AlreadyLoaded, ModelNotFound, ModelNotReady


def begun(registry: Registry, name: str) -> ModelRecord:
    return registry.begin_load(ModelId(name), TritonName(name), ModelSource(f"/{name}"))


def ready(registry: Registry, name: str) -> ModelRecord:
    record = begun(registry, name)
    registry.finish_load(record)
    return record


def unload(registry: Registry, name: str) -> None:
    registry.finish_unload(registry.begin_unload(ModelId(name)))


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
    registry.finish_load(record)
    with pytest.raises(AlreadyLoaded, match="is loaded already"):
        begun(registry, "m")
    assert registry.get(ModelId("m")) is record


def test_a_load_that_failed_leaves_no_record():
    registry = Registry()
    registry.abort_load(begun(registry, "m"))
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
    registry.unload_failed(record)
    assert walk(registry, 10) == [["m"]]


def test_a_failed_unload_of_a_dead_model_leaves_it_dead():
    registry = Registry()
    registry.died(ready(registry, "m"))
    record = registry.begin_unload(ModelId("m"))
    registry.unload_failed(record, was_dead=True)
    assert record.state is ModelState.DEAD
    assert walk(registry, 10) == [[]]


def test_only_ready_models_are_listed():
    registry = Registry()
    begun(registry, "loading")
    registry.died(ready(registry, "dead"))
    ready(registry, "ready")
    ready(registry, "unloading")
    registry.begin_unload(ModelId("unloading"))
    assert walk(registry, 10) == [["ready"]]
    assert registry.counts() == dict.fromkeys(ModelState, 1)
    assert repr(registry) == "<Registry [1 loading, 1 ready, 1 dead, 1 unloading]>"


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
        registry.finish_load(record)
        registry.begin_unload(record.id)
    registry.died(record)
    assert record.state is state


def test_a_death_notice_of_a_vanished_model_touches_no_other_model():
    """A request of before a restart of Triton may end after the restart was noticed."""
    registry = Registry()
    ready(registry, "b")
    gone = ready(registry, "a")
    registry.vanished(gone)
    registry.died(gone)
    assert walk(registry, 10) == [["b"]]
    assert registry.records() == [registry.serving(ModelId("b"))]


def test_a_death_notice_of_the_last_run_does_not_touch_the_new_one():
    registry = Registry()
    old = ready(registry, "m")
    registry.vanished(old)
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
    assert registry.idle_seconds(100.0) is None
    for name, used_at in (("old", 10.0), ("new", 90.0)):
        ready(registry, name).used_at = used_at
    begun(registry, "loading")
    assert registry.idle_seconds(100.0) == 90.0


def test_a_model_at_work_is_not_idle():
    registry = Registry()
    record = ready(registry, "busy")
    record.in_flight, record.used_at = 1, 10.0
    assert registry.idle_seconds(100.0) == 0.0
