"""Admit, wait or refuse. A refusal needs a known size, no room, and something that could go."""

import pytest

from adapter.core.admission import AdmissionInput, Answer, decide
from adapter.core.ledger import UNSEEN, DeviceBook, LedgerSnapshot
from adapter.core.memory import HOST, Device, DeviceReading, MemoryReading
from adapter.core.model import ModelId
from adapter.core.sizing import Basis, Estimate
from adapter.errors import InsufficientMemory, MemoryFigures, ModelTooLarge
from tests.cases import rows

M = ModelId("m")
MIB = 2**20
GPU, OTHER = Device("GPU-0"), Device("GPU-1")
KNOWN, GUESSED = [Basis.LEARNED, Basis.DECLARED], [Basis.DISK, Basis.DEFAULT]


def booked(limit=1000, held=600, headroom=100, baseline=0):
    return DeviceBook(limit * MIB, headroom * MIB, baseline * MIB, 0, held * MIB)


def a_book(devices=None, models=1, **figures):
    return LedgerSnapshot({HOST: booked(**figures)} if devices is None else devices, models)


def needs(mib, basis=Basis.LEARNED, *devices):
    return Estimate(dict.fromkeys(devices or (HOST,), mib * MIB), basis)


def reading(used, *devices):
    seen = DeviceReading(1000 * MIB, used * MIB)
    return MemoryReading(dict.fromkeys(devices or (HOST,), seen))


def answer(estimate, book=None, seen=None, **outlook):
    return decide(M, estimate, AdmissionInput(book or a_book(), seen, **outlook))


def refusal(estimate, book=None, seen=None, **outlook):
    with pytest.raises(InsufficientMemory) as caught:
        answer(estimate, book, seen, **outlook)
    return caught.value


# -- room ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", KNOWN)
def test_a_known_size_that_does_not_fit_beside_others_is_refused_with_the_figures(basis):
    error = refusal(needs(301, basis))
    assert str(error) == (
        f"model 'm' needs 301.0 MiB ({basis.value}); 300.0 MiB of 1000.0 MiB are free"
    )
    assert error.model_id == "m"
    assert error.figures == MemoryFigures(301 * MIB, 300 * MIB, 1000 * MIB, "host")
    assert error.matched is None


def test_what_just_fits_is_admitted():
    assert answer(needs(300)) is Answer.ADMIT


def test_an_observation_that_leaves_less_room_counts():
    assert answer(needs(300), seen=reading(600)) is Answer.ADMIT
    refusal(needs(300), seen=reading(601))


def test_with_nothing_else_loaded_it_is_tried_however_little_is_free():
    """A refusal asks the platform to evict; with nothing to evict it would ask for ever."""
    assert answer(needs(999), a_book(models=0, held=0)) is Answer.ADMIT


def test_without_a_device_in_the_book_everything_is_tried():
    book = a_book(devices={})
    assert answer(needs(10**9), book, reading(10**9), loads=1, unknown_loads=1) is Answer.ADMIT


def test_a_refusal_turns_into_an_attempt_once_the_others_are_gone():
    refusal(needs(400))
    assert answer(needs(400), a_book(held=100)) is Answer.ADMIT


def test_it_must_fit_on_every_device_and_the_tightest_is_told():
    book = a_book({GPU: booked(held=100), OTHER: booked(held=800)})
    error = refusal(needs(200, Basis.LEARNED, GPU, OTHER), book)
    assert str(error) == (
        "model 'm' needs 200.0 MiB (learned); 100.0 MiB of 1000.0 MiB are free on GPU-1"
    )
    assert error.figures == MemoryFigures(200 * MIB, 100 * MIB, 1000 * MIB, "GPU-1")
    assert answer(needs(200, Basis.LEARNED, GPU), book) is Answer.ADMIT


def test_memory_that_nobody_sees_is_not_told_as_a_place():
    book = a_book({UNSEEN: booked()})
    assert str(refusal(needs(301, Basis.LEARNED, UNSEEN), book)).endswith("are free")


# -- what can never fit -------------------------------------------------------------------------


@pytest.mark.parametrize("basis", KNOWN)
@pytest.mark.parametrize("models", [0, 1])
def test_a_known_size_above_the_device_can_never_fit(basis, models):
    book = a_book({GPU: booked(), OTHER: booked(limit=2000)}, models)
    with pytest.raises(ModelTooLarge) as caught:
        answer(needs(1001, basis, GPU, OTHER), book, unloads=1, loads=1)
    assert str(caught.value) == (
        f"model 'm' needs 1001.0 MiB ({basis.value}); it can never fit into 1000.0 MiB on GPU-0;"
        " see docs/memory.md#why-a-load-is-refused"
    )
    assert caught.value.model_id == "m"
    assert caught.value.figures == MemoryFigures(1001 * MIB, None, 1000 * MIB, "GPU-0")


def test_what_can_never_fit_is_told_what_takes_the_room_for_good():
    with pytest.raises(
        ModelTooLarge, match=r"1000\.0 MiB, of which 100\.0 MiB are used by something"
    ):
        answer(needs(1001), a_book(baseline=100))


@pytest.mark.parametrize(
    ("basis", "models", "may_be_wrong", "is_tried"),
    [
        (Basis.LEARNED, 0, True, True),
        (Basis.LEARNED, 1, True, False),
        (Basis.LEARNED, 0, False, False),
        (Basis.DECLARED, 0, True, False),
    ],
)
def test_what_was_learned_above_the_limit_is_tried_once_with_nothing_else_loaded(
    basis, models, may_be_wrong, is_tried
):
    book, estimate = a_book(models=models, held=0), needs(1001, basis)
    if is_tried:
        assert answer(estimate, book, may_be_wrong=may_be_wrong) is Answer.ADMIT
    else:
        with pytest.raises(ModelTooLarge):
            answer(estimate, book, may_be_wrong=may_be_wrong)


@pytest.mark.parametrize("basis", GUESSED)
@pytest.mark.parametrize(
    ("estimated", "supposed", "least", "needed"),
    [(10, 0, 64, 64), (10, 200, 200, 200), (300, 200, 200, 300)],
)
def test_so_much_must_be_free_for_a_model_of_unknown_size_beside_others(
    basis, estimated, supposed, least, needed
):
    estimate, outlook = needs(estimated, basis), {"unknown_bytes": supposed * MIB}
    assert answer(estimate, a_book(held=900 - least), **outlook) is Answer.ADMIT
    error = refusal(estimate, a_book(held=901 - least), **outlook)
    assert str(error) == (
        f"model 'm' is of unknown size, for which {least}.0 MiB must be free;"
        f" {least - 1}.0 MiB of 1000.0 MiB are free"
    )
    assert error.figures.needed_bytes == needed * MIB


def test_a_size_of_the_whole_device_may_fit():
    assert answer(needs(1000), a_book(models=0)) is Answer.ADMIT


@pytest.mark.parametrize("basis", GUESSED)
def test_a_guess_above_the_device_is_tried_when_nothing_else_is_there(basis):
    assert answer(needs(5000, basis), a_book(models=0)) is Answer.ADMIT


# -- guesses ------------------------------------------------------------------------------------


def test_a_size_nobody_knows_is_tried():
    assert answer(needs(10**9, Basis.DEFAULT)) is Answer.ADMIT


@pytest.mark.parametrize(("mib", "refused"), [(301, False), (700, False), (701, True)])
def test_a_size_on_disk_refuses_only_when_half_of_it_would_not_fit(mib, refused):
    """300 MiB are free and the headroom is 100 MiB."""
    if refused:
        assert "701.0 MiB (disk)" in str(refusal(needs(mib, Basis.DISK)))
    else:
        assert answer(needs(mib, Basis.DISK)) is Answer.ADMIT


# -- waiting for memory -------------------------------------------------------------------------

CHANGES = [{"unloads": 1}, {"loads": 1}, {"is_settling": True}]


@rows("basis", Basis)
@rows("change", CHANGES)
def test_what_does_not_fit_yet_waits_while_something_may_make_room(basis, change):
    assert answer(needs(900, basis), **change) is Answer.WAIT


@pytest.mark.parametrize("change", CHANGES)
def test_what_fits_waits_for_no_memory(change):
    assert answer(needs(300), **change) is Answer.ADMIT


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_has_waited_long_enough_gets_the_answer_of_now(change):
    refusal(needs(301), **change, may_wait=False)
    assert answer(needs(900, Basis.DEFAULT), **change, may_wait=False) is Answer.ADMIT
    assert answer(needs(301), a_book(models=0), **change, may_wait=False) is Answer.ADMIT


def test_where_a_refusal_evicts_other_loads_are_not_waited_for():
    refusal(needs(301), loads=1, can_evict=True)
    refusal(needs(301, Basis.DISK), loads=1, can_evict=True)
    assert answer(needs(301), loads=1, unloads=1, can_evict=True) is Answer.WAIT


# -- waiting for a turn -------------------------------------------------------------------------


@pytest.mark.parametrize("may_wait", [True, False])
@pytest.mark.parametrize("basis", GUESSED)
def test_where_memory_is_read_a_load_of_unknown_size_runs_alone(basis, may_wait):
    seen = reading(0)
    assert answer(needs(1, basis), seen=seen, loads=1, may_wait=may_wait) is Answer.WAIT
    assert answer(needs(1, basis), seen=seen, unloads=1) is Answer.ADMIT


@pytest.mark.parametrize("basis", KNOWN)
def test_where_memory_is_read_a_known_load_stays_out_of_an_unknown_ones_growth(basis):
    seen = reading(0)
    assert answer(needs(1, basis), seen=seen, loads=2, unknown_loads=1) is Answer.WAIT
    assert answer(needs(1, basis), seen=seen, loads=2) is Answer.ADMIT


@pytest.mark.parametrize("basis", Basis)
def test_where_nothing_is_read_nobody_waits_for_a_turn(basis):
    assert answer(needs(1, basis), loads=2, unknown_loads=1) is Answer.ADMIT


# -- loads that ModelMesh has planned -----------------------------------------------------------


def planned(estimate, **figures):
    return answer(estimate, a_book(**figures), is_planned=True)


@pytest.mark.parametrize("basis", KNOWN)
def test_a_planned_load_may_use_the_headroom(basis):
    assert planned(needs(400, basis)) is Answer.ADMIT
    with pytest.raises(InsufficientMemory, match=r"needs 401\.0 MiB"):
        planned(needs(401, basis))


@pytest.mark.parametrize("basis", GUESSED)
def test_a_planned_load_of_unknown_size_is_tried_while_anything_is_left(basis):
    assert planned(needs(900, basis), held=999) is Answer.ADMIT
    with pytest.raises(InsufficientMemory, match="nothing is left below the limit"):
        planned(needs(0, basis), held=1000)


def test_a_planned_load_is_refused_by_what_is_read_too():
    seen = reading(1000)
    with pytest.raises(InsufficientMemory, match="nothing is left"):
        answer(needs(0, Basis.DEFAULT), a_book(held=100), seen, is_planned=True)


# -- MPS ----------------------------------------------------------------------------------------


def shared(client, limit=1000):
    book = DeviceBook(limit * MIB, 0, 0, 0, 0, 0, client * MIB)
    return LedgerSnapshot({GPU: book}, models=1)


@pytest.mark.parametrize("basis", KNOWN)
def test_what_exceeds_the_limit_of_a_process_is_too_large_whatever_is_free(basis):
    with pytest.raises(ModelTooLarge) as caught:
        answer(needs(401, basis, GPU), shared(400), reading(0, GPU), processes=1)
    assert str(caught.value) == (
        f"model 'm' needs 401.0 MiB ({basis.value}); MPS allows 400.0 MiB on GPU-0"
        " to each of its processes: 1; see docs/memory.md#why-a-load-is-refused"
    )
    assert caught.value.figures == MemoryFigures(401 * MIB, None, 400 * MIB, "GPU-0")


def test_several_processes_may_take_the_limit_each():
    assert answer(needs(800, Basis.DECLARED, GPU), shared(400), processes=2) is Answer.ADMIT
    with pytest.raises(ModelTooLarge):
        answer(needs(801, Basis.DECLARED, GPU), shared(400), processes=2)


@pytest.mark.parametrize("processes", [None, 0])
def test_a_limit_of_processes_refuses_nothing_whose_processes_nobody_can_tell(processes):
    book = shared(400)
    assert answer(needs(800, Basis.DECLARED, GPU), book, processes=processes) is Answer.ADMIT


@pytest.mark.parametrize("basis", GUESSED)
def test_a_guess_above_the_limit_of_a_process_is_tried(basis):
    assert answer(needs(401, basis, GPU), shared(400), processes=1) is Answer.ADMIT
