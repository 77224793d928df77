"""A short day in which the new rules of memory are asked beside today's."""

from dataclasses import replace

from tests.simulation.memory import MIB
from tests.simulation.models import Entry, Spec
from tests.simulation.plan import Settings, drawn
from tests.simulation.shadow import Comparisons, Difference, ShadowedDay, shadowed
from tests.simulation.world import played

SMALL = Spec("a", 1, is_python=True, takes=300 * MIB, declared=300 * MIB, grows=0, seconds=1.0)
LARGE = replace(SMALL, model_id="b", takes=800 * MIB, declared=None)
SETTINGS = Settings(
    memory_limit=None,
    reserve=0,
    loads_again=None,
    load_seconds=60.0,
    unload_seconds=40.0,
    warms_up=False,
    is_killed=False,
)


def make_day(*entries):
    """Return a day of one shift on a host with 1000 MiB, of which Triton has 20."""
    listed = tuple(Entry(0, at, verb, tuple(words)) for at, verb, *words in entries)
    day = replace(drawn(2), catalog=None, device_bytes=1000 * MIB, baseline=20 * MIB, more_gpus=())
    day = replace(day, is_embedded=True, reader="host", models={"a": SMALL, "b": LARGE})
    return replace(day, shifts=(SETTINGS,), entries=listed)


def play(day):
    comparisons = Comparisons()
    with shadowed():
        outcome = played(day, ShadowedDay(comparisons, day.seed).build)
    assert outcome.violation is None
    return comparisons, outcome


def test_shadow_agrees_about_a_load_that_fits():
    comparisons, _ = play(make_day((1, "load", "a", None)))
    assert comparisons.decisions["load"] == 1
    assert not comparisons.classes


def test_shadow_classifies_a_load_that_only_it_refuses():
    """Today's control tries a guess that may fit; the new one refuses it beside other models."""
    comparisons, _ = play(make_day((1, "load", "a", None), (20, "load", "b", None)))
    expected = Difference("load", "admit", "507", "DOES_NOT_FIT", "fits an emptied device")
    assert len(comparisons.classes[expected].loads) == 1


def test_shadow_changes_nothing_in_a_day():
    plain = played(drawn(1))
    _, shadowed_outcome = play(drawn(1))
    assert shadowed_outcome.story.digest == plain.story.digest
