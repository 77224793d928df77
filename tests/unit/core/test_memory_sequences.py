"""Sequences of memory beyond the table: lives of Triton, several devices, failures, limits, waits.

Figures are MiB, to be checked by head.
"""

import math

import pytest

from adapter.core.admission import (
    Answer,
    MemoryRequest,
    Purpose,
    Reason,
    decide,
    make_overrun_refusal,
    make_refusal,
)
from adapter.core.ledger import DeviceBook, Ledger
from adapter.core.memory import HOST, UNSEEN, Device
from adapter.errors import InsufficientMemory, ModelTooLarge
from tests.unit.core.books import GPU, MIB, Books, gpu, guess, known, to_bytes, to_mib

# -- what is in progress -------------------------------------------------------------------------


def test_undone_load_is_awaited_in_readings():
    books = gpu(1000)
    books.add("a", 300)
    books.load("b", guess(200, key="b"))
    books.read(700)  # b has taken 400
    books.now += 1
    books.fail("b")
    books.read(700, lag=3)  # still shows b
    assert books.settled() == 300  # with 700, a would be evicted
    assert books.decide(known(600), evict="a").reason is Reason.LEAVING
    books.read(300, lag=3, after=3)
    assert books.answer(known(600)) is Answer.ADMIT


def test_dead_models_unload_returns_its_memory():
    """Readings have shown that the memory of its process is back: to subtract it from the books
    once more would promise it twice.
    """
    books = gpu(1000, used=50)
    books.add("a", 600)
    books.read(70)  # the process of a has died, and 20 are left
    books.load("b", known(300, key="b"))
    leaving = books.ledger.begin_unload("a")
    assert to_mib(leaving.booked) == {GPU: 20}
    assert (books.settled(), books.free()) == (50, 650)
    books.read(70)  # b has not taken anything
    assert (books.settled(), books.free()) == (50, 650)


def test_stuck_unload_keeps_its_bytes():
    books = gpu(1000)
    books.add("a", 300)
    books.ledger.begin_unload("a")
    books.ledger.strand("a")
    assert books.free() == 700
    assert books.answer(known(800), waited=0) is Answer.INSUFFICIENT  # nobody waits for a
    books.read(300)
    books.ledger.free_stuck("a", books.now + 1)
    assert books.answer(known(800)) is Answer.WAIT
    books.read(0)
    assert books.answer(known(800)) is Answer.ADMIT


def test_memory_of_a_freed_stuck_load_measures_nothing():
    books = gpu(1000)
    books.load("s", known(300, key="s"))
    books.read(300)
    books.ledger.strand("s")
    books.load("a", guess(200, key="a"))
    books.ledger.free_stuck("s", books.now + 1)
    books.read(200)  # s has left with 300, and a has taken 200
    books.settle("a")
    assert books.size("a") == ({GPU: 200}, False)


def test_load_is_not_booked_with_leaving_memory():
    """The reading shows the load and a model that is being unloaded meanwhile."""
    books = gpu(1000)
    books.add("a", 300)
    books.ledger.begin_unload("a")
    books.load("b", known(200, key="b"))
    books.read(500)
    books.settle("b")
    assert books.booked("b") == 200
    books.read(200)
    books.ledger.end_unload("a", books.before_reading)
    assert books.free() == 800


def test_adoption_during_a_load_ends_its_measurement():
    books = gpu(1000)
    books.load("b", known(200, key="b"))
    books.ledger.adopt("a", to_bytes({GPU: 300}))
    books.read(500)
    assert not books.settle("b").is_measured


def test_load_is_measured_beside_another_device():
    books = Books({"0": 1000, "1": 1000})
    books.read(**{"0": 0, "1": 0})
    books.load("a", guess(key="a", **{"0": 100}))
    books.load("b", guess(key="b", **{"1": 100}))
    books.read(**{"0": 150, "1": 250})
    assert (books.reserved("a", "0"), books.reserved("b", "1")) == (150, 250)
    books.settle("a")
    books.settle("b")
    assert books.size("a") == ({"0": 150}, True)
    assert books.size("b") == ({"1": 250}, True)


def test_reading_without_device_leaves_it_to_books():
    books = Books({"0": 1000, "1": 1000})
    books.read(**{"0": 100, "1": 100})
    books.add("a", 200, "1")
    books.read(**{"0": 150})
    assert (books.free("0"), books.free("1")) == (850, 700)
    books.ledger.begin_unload("a")
    assert books.free("1") == 700  # 200 are leaving
    books.read(**{"0": 150, "1": 100})
    assert books.free("1") == 900


def test_reading_from_before_a_booked_end_is_ignored():
    books = gpu(1000)
    books.load("a", known(400, key="a"))
    books.ledger.end_load("a", books.now)
    books.wait(5)
    books.ledger.settle("a")
    books.read(0, lag=6)  # shows the moment of the end: a is not complete
    assert books.free() == 600
    books.read(450, lag=6)
    assert books.free() == 550


def test_reading_of_adopted_models_is_not_empty():
    """A new adapter reads memory before it knows what an earlier run has loaded."""
    books = gpu(1000, used=450)
    assert books.empty() == 450
    books.ledger.adopt("a", to_bytes({GPU: 300}))
    assert books.empty() is None
    declared = known(900, declared=900)  # 400 otherwise: no unload could make enough room
    assert books.answer(declared, waited=math.inf) is Answer.INSUFFICIENT


def test_memory_of_unload_in_progress_ends_no_load():
    """It will be back: a load that is ended for it would have fitted."""
    books = gpu(400)
    books.add("a", 300)
    books.load("b", guess(100, key="b"))
    books.ledger.begin_unload("a")
    books.read(410)
    assert books.ledger.overrun_of("b") is None
    books.read(710)
    assert books.ledger.overrun_of("b").name == "b"


def test_guess_beside_failure_books_the_rest():
    """The growth of the other one belonged to no model, and nothing was left for this one."""
    books = gpu(1000, used=20)
    books.load("a", guess(100, key="a"))
    books.load("b", guess(300, key="b"))
    books.read(920)  # 500 more than both have reserved
    books.read(320)  # a has failed, and nobody knows yet
    books.settle("b")
    assert (books.booked("b"), books.settled()) == (300, 320)
    books.fail("a")
    books.read(320)
    assert books.not_attributed() == 0


def test_load_needs_a_reading_after_its_end():
    """A model may be unloaded before readings that lag have shown its load."""
    books = gpu(1000, used=20)
    books.load("n", guess(300))
    books.ledger.end_load("n", books.now + 1)
    settlement = books.ledger.settle("n")
    assert to_mib(settlement.booked) == {GPU: 300}
    assert not settlement.is_measured
    assert (books.settled(), books.free()) == (320, 680)
    assert to_mib(books.ledger.begin_unload("n").booked) == {GPU: 300}


def test_new_triton_has_nothing_loaded():
    books = gpu(1000, used=50)
    books.add("a", 300)
    books.add("s", 100)
    books.load("b", known(200, key="b"))
    books.ledger.begin_unload("s")
    books.ledger.start_life()
    assert books.ledger.models == {}
    books.ledger.end_unload("s", books.before_reading)  # its operation ends later
    books.fail("b", is_out_of_memory=False)
    books.read(80)
    assert (books.free(), books.empty(), books.not_attributed()) == (920, 80, 0)


def test_new_triton_gives_nothing_back():
    """Triton exits before a reading has shown the memory of its last unload."""
    books = gpu(1000)
    books.add("a", 300)
    books.ledger.begin_unload("a")
    books.ledger.end_unload("a", books.now)
    assert books.ledger.leaving(GPU) == 300 * MIB
    books.ledger.start_life()
    assert books.ledger.leaving(GPU) == 0
    assert books.ledger.is_empty(GPU)


def test_new_triton_is_empty_without_readings():
    books = gpu(1000, used=None)
    books.add("a", 300)
    assert books.free() == 700
    books.ledger.start_life()
    assert books.free() == 1000


def test_empty_is_the_least_of_a_life():
    books = gpu(1000, used=90)
    books.read(60)
    books.read(75)
    assert books.empty() == 60
    assert books.not_attributed() == 15
    books.add("a", 100)
    books.read(40)
    assert books.empty() == 40  # a is loaded: without it no more is used


# -- loads that pass a limit ---------------------------------------------------------------------


def test_newest_guessed_load_is_ended_at_the_limit():
    books = gpu(1000)
    books.load("u", guess(100, key="u"))
    books.load("k", known(300, key="k"))
    books.read(1000)
    assert books.ledger.find_overrun(GPU) is None  # not more than the limit
    books.read(1100)
    overrun = books.ledger.find_overrun(GPU)
    assert (overrun.name, overrun.is_permanent) == ("u", False)
    figures = overrun.figures
    assert figures.needed_bytes == 800 * MIB  # 1100 less the 300 of k
    assert (figures.free_bytes, figures.limit_bytes) == (700 * MIB, 1000 * MIB)
    books.fail("u")
    books.read(300)
    assert books.ledger.find_overrun(GPU) is None
    assert to_mib(books.need("u").bytes) == {GPU: 1000}  # twice 800, at most all


def test_newest_known_load_is_ended_without_guesses():
    books = gpu(1000)
    books.load("a", known(300, key="a"))
    books.load("b", known(300, key="b"))
    books.read(1001)
    assert books.ledger.find_overrun(GPU).name == "b"
    assert books.settle("a").overrun is None  # b is ended, and a stays


def test_one_load_is_ended_for_a_reading():
    """A guess says little of what the ended load had, so a newer reading is waited for."""
    books = gpu(1000)
    for name in ("a", "b"):
        books.load(name, guess(100, key=name))
    books.read(1300)
    assert books.ledger.find_overrun(GPU).name == "b"
    books.now += 1
    books.fail("b")  # no reading is newer
    assert books.ledger.find_overrun(GPU) is None
    assert books.ledger.is_overrun_open("a")
    books.read(700)
    assert books.ledger.find_overrun(GPU) is None
    assert not books.ledger.is_overrun_open("a")


def test_growth_above_the_limit_ends_nothing():
    books = gpu(1000)
    books.add("a", 900)
    books.read(1100)
    assert books.ledger.find_overrun(GPU) is None
    assert books.free() == -100


def test_known_load_above_limit_says_what_it_has():
    books = gpu(1000, used=50)
    books.load("a", known(100, key="a"))
    books.read(1001)
    figures = books.ledger.find_overrun(GPU).figures
    assert (figures.needed_bytes, figures.free_bytes) == (951 * MIB, 950 * MIB)


def test_load_that_exit_broke_off_is_no_proof():
    books = gpu(1000)
    books.load("a", guess(100, key="a"))
    books.ledger.start_life()
    books.fail("a")
    assert books.ledger.tried == {}


def test_try_proves_nothing_where_nothing_is_read():
    """A neighbour may have had the memory, and nobody would see it leave."""
    books = gpu(1000, used=None)
    for _ in range(3):
        need = books.need("a", declared=400)
        assert books.answer(need) is Answer.ADMIT
        books.load("a", need)
        books.fail("a")
    assert books.ledger.tried == {}


def test_try_beside_load_without_device_proves_nothing():
    """A load from before the first reading may be on each device that a reading shows then."""
    books = Books({})
    books.load("early", books.need("early"))
    books.ledger.open_devices({GPU: DeviceBook(1000 * MIB)})
    books.read(300)
    books.load("a", guess(100, key="a"))
    books.fail("a")
    assert books.ledger.tried == {}
    books.settle("early")
    assert books.booked("early") == 300


def test_load_without_device_may_be_on_each():
    """Neither of two devices that the first reading shows is empty beside it."""
    books = Books({})
    books.load("early", books.need("early"))
    gpus = [GPU, Device("GPU-1")]
    books.ledger.open_devices({gpu: DeviceBook(1000 * MIB) for gpu in gpus})
    assert not any(map(books.ledger.is_empty, gpus))
    books.settle("early")
    assert not any(map(books.ledger.is_empty, gpus))


def test_adopted_model_without_device_may_be_on_each():
    books = Books({})
    books.ledger.adopt("early", {})
    gpus = [GPU, Device("GPU-1")]
    books.ledger.open_devices({gpu: DeviceBook(1000 * MIB) for gpu in gpus})
    assert not any(map(books.ledger.is_empty, gpus))


def test_noise_of_readings_ends_no_refusal():
    books = gpu(1000, used=400)
    books.load("a", guess(100, key="a"))
    books.fail("a")
    books.read(336)  # 64 more than at the try
    assert books.answer(books.need("a")) is Answer.TOO_LARGE
    books.read(335)
    assert books.answer(books.need("a")) is Answer.ADMIT


def test_forgotten_package_needs_no_more_for_its_shortage():
    """An operator has mended it, and has it tried as one that was never seen."""
    books = gpu(1000, used=0)
    books.add("b", 100)
    need = books.need("a")
    books.load("a", guess(150, key="a"))
    books.fail("a")
    assert to_mib(books.need("a").bytes) == {GPU: 300}
    assert to_mib(books.ledger.forget("a").too_little) == {GPU: 150}
    assert books.need("a").bytes == need.bytes


def test_success_ends_shortage_and_proof():
    books = gpu(1000, used=500)
    books.load("a", guess(100, key="a"))
    books.fail("a")
    books.read(100)
    need = books.need("a")
    assert to_mib(need.bytes) == {GPU: 200}
    books.load("a", need)
    books.read(250)
    books.settle("a")
    assert to_mib(books.need("a").bytes) == {GPU: 150}
    assert books.ledger.tried == {}


# -- rule 4 on a host ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "available", "answer"),
    [
        (500, 499, Answer.INSUFFICIENT),  # the kernel would end more than the load
        (500, 500, Answer.TRY),
        (500, None, Answer.TRY),  # nobody says what the machine has
        (400, 100, Answer.ADMIT),  # by the limit it is free
    ],
)
def test_known_need_is_tried_within_the_machine(count, available, answer):
    books = Books({HOST: 1000})
    books.read(host=600, available=available)
    need = known(**{HOST: count})
    assert books.answer(need) is answer


def test_measured_need_above_the_machine_is_not_tried():
    books = Books({HOST: 1000})
    books.ledger.sizes.learn("a", to_bytes({HOST: 1200}), is_measured=True)
    books.read(host=600, available=1100)
    need = books.need("a")
    assert to_mib(need.bytes) == {HOST: 1000 - 600}  # 600 are empty
    books.read(host=700, available=1100)
    decision = books.decide(books.need("a"))
    assert (decision.answer, decision.reason) == (Answer.INSUFFICIENT, Reason.KERNEL)
    assert (decision.figures.needed_bytes, decision.figures.free_bytes) == (1200 * MIB, 300 * MIB)


# -- waits ---------------------------------------------------------------------------------------


def test_explicit_wait_ends_after_the_last_unload():
    books = gpu(1000)
    books.add("a", 300)
    books.add("b", 600)
    books.load("k", known(100, key="k"))
    need = known(500)
    assert books.answer(need, waited=4.9) is Answer.WAIT
    assert books.answer(need, waited=5) is Answer.INSUFFICIENT
    books.ledger.begin_unload("a")
    assert books.answer(need, waited=60) is Answer.WAIT  # as long as it takes
    books.read(700)
    ended_at = books.before_reading
    books.ledger.end_unload("a", ended_at)
    request = MemoryRequest(started_at=books.now - 60)
    for seconds, answer in ((4.9, Answer.WAIT), (5, Answer.INSUFFICIENT)):
        assert decide(books.ledger, need, request, ended_at + seconds).answer is answer


def test_guess_waits_for_memory_after_its_turn():
    """A guess may spend its first five seconds on other guesses, and no other load does so."""
    books = gpu(1000)
    books.load("a", known(800, key="a"))
    assert books.answer(known(300), waited=5) is Answer.INSUFFICIENT
    assert books.answer(guess(300), waited=9.9) is Answer.WAIT
    assert books.answer(guess(300), waited=10) is Answer.INSUFFICIENT


def test_planned_load_waits_for_modelmesh_to_evict():
    books = gpu(1000)
    books.add("a", 600)
    options = {"purpose": Purpose.PLANNED, "deadline": books.now + 10}
    assert books.answer(known(500), **options) is Answer.INSUFFICIENT
    assert books.decide(known(500), **options, is_mesh_evicting=True).reason is Reason.MESH
    options["deadline"] = books.now
    assert books.answer(known(500), **options, is_mesh_evicting=True) is Answer.INSUFFICIENT


def test_guess_has_no_turn_where_nothing_is_read():
    """Readings measure a load. Without them the next one would wait for nothing."""
    books = gpu(1000, used=None)
    books.load("b", guess(200, key="b"))
    assert books.answer(guess(300)) is Answer.ADMIT
    books.read(0)
    assert books.decide(guess(300)).reason is Reason.TURN
    nowhere = Ledger({})
    nowhere.begin_load("b", guess(key="b"))
    assert decide(nowhere, guess(), MemoryRequest(), 0.0).answer is Answer.ADMIT


def test_planned_guess_awaits_turn_until_deadline():
    books = gpu(1000)
    books.load("u", guess(100, key="u"))
    options = {"purpose": Purpose.PLANNED, "waited": 44}
    assert books.decide(guess(100), **options, deadline=books.now + 1).reason is Reason.TURN
    assert books.answer(guess(100), **options, deadline=books.now) is Answer.ADMIT


def test_guess_waits_for_no_load_that_lost_measurement():
    """One that hangs holds up the next guess for 5 s, and nobody after that one has begun."""
    books = gpu(1000)
    books.load("hanging", guess(100, key="hanging"))
    assert books.decide(guess(100, key="a"), waited=4.9).reason is Reason.TURN
    assert books.answer(guess(100, key="a"), waited=5) is Answer.ADMIT
    books.load("a", guess(100, key="a"))
    assert books.answer(guess(100, key="b")) is Answer.ADMIT
    books.read(200)
    books.settle("a")
    assert books.answer(guess(100, key="b")) is Answer.ADMIT


def test_adopted_model_keeps_its_bytes_without_readings():
    """A device that nobody reads is opened once its models have been adopted."""
    books = Books({})
    books.ledger.adopt("a", {UNSEEN: 64 * MIB})
    books.ledger.open_devices({UNSEEN: DeviceBook(1000 * MIB, settled_bytes=64 * MIB)})
    assert books.booked("a", UNSEEN) == 64
    assert books.free(UNSEEN) == 936


# -- evictions -----------------------------------------------------------------------------------


def test_eviction_is_enough_where_books_say_too_much():
    """Two loads that ended together were booked with what was reserved, and one took less."""
    books = gpu(1000, used=0)
    books.add("a", 500)
    books.add("b", 400)
    books.read(800)  # 100 less than both are booked with
    assert books.decide(known(600), evict="b").answer is Answer.EVICT
    assert books.answer(known(601), evict="b", waited=math.inf) is Answer.INSUFFICIENT


def test_futile_eviction_is_not_repeated_at_once():
    books = gpu(1000)
    books.add("a", 600)
    books.ledger.record_futile_eviction("n", books.now)
    assert books.decide(known(500), evict="a").reason is Reason.FUTILE
    assert books.victims(known(500, key="other"), evict="a") == ["a"]
    books.now += 29.9
    assert books.answer(known(500), evict="a") is Answer.INSUFFICIENT
    books.now += 0.1
    assert books.victims(known(500), evict="a") == ["a"]


def test_eviction_counts_what_others_have_reserved():
    books = gpu(1000, headroom=50, used=50)
    books.add("a", 400)
    books.load("k", known(300, key="k"))
    # all that can ever be free beside k: 1000 - 50 - 50 - 300 = 600
    assert books.victims(known(600), evict="a") == ["a"]
    assert books.decide(known(601), evict="a").reason is Reason.IN_PROGRESS


def test_busy_model_elsewhere_is_not_awaited():
    books = Books({"0": 1000, "1": 1000})
    books.read(**{"0": 0, "1": 0})
    books.add("a", 800, "0")
    books.add("b", 800, "1")
    books.read(**{"0": 900, "1": 800})  # a has grown by 100
    assert books.victims(known(**{"0": 950}), evict="ab", busy="b") == ["a"]


def test_idle_model_elsewhere_is_evicted_before_busy_one():
    books = Books({"0": 1000, "1": 1000})
    books.read(**{"0": 0, "1": 0})
    books.add("a", 600, "0")
    books.add("b", 700, "1")
    needs = {name: known(**{name: 500}) for name in "01"}
    decision = books.place(needs, evict="ab", busy="a")
    assert (decision.victims, decision.device) == (("b",), "1")
    books.ledger.begin_unload("a")
    decision = books.place(needs, evict="b")
    assert (decision.reason, decision.device) == (Reason.LEAVING, "0")  # b can stay


# -- refusals and edges ----------------------------------------------------------------------------


def test_anything_is_admitted_where_nothing_has_a_limit():
    books = Books({})
    need = books.need("a", declared=5000)
    assert books.decide(need).answer is Answer.ADMIT
    books.load("a", need)
    books.ledger.end_load("a", books.before_reading)
    assert to_mib(books.ledger.settle("a", to_bytes({GPU: 70})).booked) == {GPU: 70}
    books.ledger.begin_unload("a")
    books.ledger.end_unload("a", books.before_reading)
    assert books.ledger.returning == []


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (
            known(300),
            "model 'm' needs 300.0 MiB (declared); 200.0 MiB of 1000.0 MiB are free on gpu",
        ),
        (known(300), "unload other models; see docs/memory.md#why-a-load-is-refused"),
        (known(300, declared=1001), "no unload can make enough room"),
        (guess(300), "(guessed from its files)"),
    ],
)
def test_refusal_has_figures_and_a_remedy(need, words):
    books = gpu(1000)
    books.add("a", 800)
    error = make_refusal("m", books.decide(need))
    assert words in str(error)
    assert error.model_id == "m"
    assert error.figures.device == GPU
    assert getattr(error, "is_known", need.is_known) is need.is_known


def test_refusal_of_tried_package_says_what_it_had():
    books = gpu(1000, used=100)
    books.load("a", guess(300, key="a"))
    books.fail("a")
    decision = books.decide(books.need("a"))
    assert decision.figures.free_bytes == 900 * MIB
    assert decision.figures.needed_bytes == 900 * MIB  # twice 300 would seem to fit
    assert "needs more than" in str(make_refusal("m", decision))


def test_refusal_of_an_overrun_says_what_was_free():
    books = gpu(1000, used=50)
    books.load("a", guess(100, key="a"))
    books.read(1001)
    error = make_overrun_refusal("m", books.ledger.find_overrun(GPU))
    text = "model 'm' needs more than 951.0 MiB, where 950.0 MiB were free on gpu, and was unloaded"
    assert text in str(error)
    assert (type(error), error.was_tried) == (ModelTooLarge, True)
    books.load("k", known(100, key="k"))
    error = make_overrun_refusal("m", books.ledger.find_overrun(GPU))
    assert type(error) is InsufficientMemory
