"""Days that were wrong once. Each docstring is the shortest story of what the oracle saw."""

import pytest

from tests.simulation.faults import FAULTS
from tests.simulation.plan import drawn
from tests.simulation.world import played

# the seed, and the fault that it found
FOUND = {
    1005: "a Triton that has only been slow counts as another one",
    106: "what stands still is charged to others",
    125: "a load is refused for room that the undo of another makes",
    7245: "what stood still takes nothing any more",
    1743: "a load that was not read is never measured",
}


def test_a_load_is_not_charged_with_what_another_took_that_stood_still():
    """2.4 s: b, of unknown size, and c are asked for; b takes nothing for 1.5 s, so that c is let
    in; then both take their memory. 25.6 s: c is loaded, and learned to take 3.5 GiB, which are
    b's and c's. A crash; 3668.4 s: the load of d is refused, as c is to come back.
    """
    assert played(drawn(122)).violation is None


def test_a_model_that_is_known_is_not_charged_with_one_that_warms_up_beside_it():
    """45.0 s: b, of a known share, and f are asked for; f takes 797 MiB and then warms up for 6 s,
    which looks as if it hung. 52.6 s: b is loaded, and learned to take f's memory as well. 120.0 s:
    the load of d is refused, though 1.3 GiB are free.
    """
    assert played(drawn(106)).violation is None


def test_a_triton_that_answers_again_keeps_no_model_that_was_given_up():
    """11.5 s: the load of c; 26.2 s: Triton answers nothing for 15 s; 26.5 s: c is to be unloaded,
    and counts as stuck at 38.0 s. 41.2 s: Triton answers again, taken for a restarted one: c was
    forgotten, and its folder removed, while Triton went on to load it, and kept it.
    """
    assert played(drawn(1005)).violation is None


def test_a_model_that_was_loaded_while_nothing_was_read_is_measured_later():
    """3626.3 s: memory cannot be read for a second, in which c is loaded. 3647.5 s: the ledger has
    nothing of c, and c takes 360 MiB.
    """
    assert played(drawn(1743)).violation is None


def test_a_known_model_is_not_charged_with_a_load_that_went_on_after_it_had_stood_still():
    """7549.7 s: f is asked for, and takes nothing for 5 s. 7554.8 s: the load of d, whose size is
    known. Then f takes 0.9 GiB, and at 7560.1 s d, of 82 MiB, is loaded, and learned to take both.
    """
    assert played(drawn(7245)).violation is None


def test_a_load_waits_for_the_memory_of_one_that_is_being_undone():
    """3653.1 s: the caller of g, which is being loaded, leaves; 3656.8 s: the unload of g ends its
    load, which is undone. 3657.1 s: the load of a is refused at once.
    """
    assert played(drawn(125)).violation is None


@pytest.mark.parametrize("seed", FOUND)
def test_the_day_is_wrong_with_the_fault_that_it_found(seed):
    with FAULTS[FOUND[seed]].put_back():
        assert played(drawn(seed)).violation is not None
