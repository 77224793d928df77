"""Days that were wrong once, until a fault was mended. Where the plan of days changes, a seed is
another day: look for one that the fault, put back, makes wrong (tests/simulation/faults).
"""

from pathlib import Path

import pytest

from tests.simulation.faults import FAULTS, MISSED
from tests.simulation.plan import drawn
from tests.simulation.world import played

# The seed; the fault that it finds; the shortest story of what the oracle sees.
FOUND = [
    (
        2607,
        "a load is refused for room that the undo of another makes",
        "The load of a model is ended and undone; another is refused meanwhile, at once.",
    ),
    (
        1097,
        "a load that was not read is never measured",
        "Memory cannot be read while b is loaded. Later the ledger has 0 bytes of b, of 687 MiB.",
    ),
    (
        52,
        "a failed undo leaves a model that no record has",
        "The undo of y's load stalls, loads y again and gives up: Triton has y, no record does.",
    ),
    (
        40083,
        "a load of V2 is content with one that read older files",
        "A version of y comes while it is loaded. The next load of y is content with the old one.",
    ),
    (
        100118,
        "a load of V2 asks again at once while another waits for Triton to come back",
        "Triton ends, and z waits to be loaded again. A load of z never gives up its turn.",
    ),
    (
        60099,
        "a load of V2 does not take the failure of another for its own",
        "y hangs. Of three loads of it that came together one is answered after three of them.",
    ),
    (
        101204,
        "what a load that is undone gives back is charged to others",
        "The undo of c frees memory while b is loaded: b seems to take 279 MiB, of 1067.",
    ),
    (
        300007,
        "a model that Triton never ends loading again is unloaded again and again",
        "A model has died, and Triton never ends the load by which it is to be unloaded.",
    ),
    (
        500457,
        "an adopted model is not known by its package",
        "b repeats a caller's words about CUDA's memory, once when adopted and once loaded anew.",
    ),
    (
        500103,
        "what an earlier run left is taken for Triton's own memory",
        "A start unloads what a killed run has left. Triton's own memory then includes it.",
    ),
    (
        810532,
        "a load that Triton does not end is tried again without its files",
        "The process of m dies while m is loaded. Loaded anew, m is a model that no call loaded.",
    ),
    (
        700762,
        "a load of unknown size is taken to need nothing of what several took",
        "n of unknown size is measured with o, which is charged with both: 3.6 GiB, of 3.5.",
    ),
]

each = pytest.mark.parametrize(("seed", "fault", "story"), FOUND)


@each
def test_the_day_is_right(seed, fault, story):
    assert played(drawn(seed)).violation is None


@pytest.mark.nightly
@each
def test_the_day_is_wrong_with_the_fault_that_it_found(seed, fault, story):
    with FAULTS[fault].put_back():
        assert played(drawn(seed)).violation is not None, story


def test_what_a_minute_of_days_does_not_find_has_a_day_or_a_test_of_its_own():
    tests = {name: FAULTS[name].test for name in MISSED if FAULTS[name].test}
    assert tests.keys() | {fault for _, fault, _ in FOUND} >= MISSED
    for place, _, name in (test.partition("::") for test in tests.values()):
        assert f"def {name}(" in Path(place).read_text()


def test_a_model_may_be_given_up_once_three_hangs_have_met_its_loads():
    """Each hang of an external Triton closes the connection, which looks like an end."""
    outcome = played(drawn(1000133))
    assert outcome.violation is None
    assert any("model.return_given_up" in line for line in outcome.story.lines)
