"""Models that are wanted from the start on: what happens to one, and who is missing then."""

import itertools

import pytest

from adapter.core.model import ModelId, ModelSource
from adapter.core.residency.wanted import Want, WantedModel, WantEvent, Wants

M = ModelId("m")
HOME = ModelSource("/models/m")


@pytest.fixture
def wants() -> Wants:
    wants = Wants()
    wants.add(WantedModel(M, HOME.url))
    return wants


def state(wants: Wants) -> Want:
    return wants.models()[0].state


def test_one_that_a_caller_unloads_is_wanted_no_more_whatever_it_was():
    for before in set(Want) - {Want.UNLOADED}:
        model = WantedModel(M, HOME.url, before, "broken")
        assert model.apply(WantEvent.UNLOAD_ASKED)
        assert (model.state, model.reason) == (Want.UNLOADED, "")


def test_only_a_load_has_one_that_was_unloaded_be_wanted_again():
    others = set(WantEvent) - {WantEvent.LOADED}
    for events in itertools.permutations(others, 3):
        model = WantedModel(M, HOME.url, Want.UNLOADED)
        assert [model.apply(event) for event in events] == [False] * 3
    assert model.apply(WantEvent.LOADED)
    assert model.state is Want.LOADED


@pytest.mark.parametrize("url", ["/models/m", "/models/m/", "file:///models/m"])
def test_one_that_is_loaded_again_from_its_place_is_wanted_again(wants, url):
    wants.unload_asked(M)
    wants.loaded(M, ModelSource(url))
    assert state(wants) is Want.LOADED


def test_one_that_is_loaded_from_elsewhere_is_no_wanted_one(wants):
    wants.unload_asked(M)
    wants.loaded(M, ModelSource("/models/other"))
    assert state(wants) is Want.UNLOADED


def test_a_restart_of_triton_loses_the_loaded_and_gives_the_refused_another_try(wants):
    for event in (WantEvent.LOADED, WantEvent.REFUSED):
        wants.models()[0].apply(event)
        wants.triton_restarted()
        assert state(wants) is Want.WAITING


def test_what_is_wanted_no_more_is_counted_apart_and_not_as_missing(wants):
    assert wants.count(lambda _: False) == {"loaded": 0, "missing": 1, "unloaded": 0}
    wants.unload_asked(M)
    assert wants.count(lambda _: False) == {"loaded": 0, "missing": 0, "unloaded": 1}
    assert wants.wanted() == []
