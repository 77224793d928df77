"""The table of memory: sequences of loads, unloads and readings, with figures to check by head.

Each test is one sequence of events on one or more devices, and what the books say and decide
between them. All figures are MiB.
"""

from adapter.core.admission import Answer, Purpose, Reason, sort_devices
from adapter.core.ledger import Leaving, is_unload_done, limit_of
from tests.unit.core.books import GPU, MIB, Books, gpu, guess, known, to_bytes, to_mib


def test_evictions_go_on_beside_a_slow_load():
    books = gpu(1200, used=11)
    for name in "123":
        books.add(name, 300)
    books.load("z", known(100, key="z"))
    assert books.free() == 189
    assert books.victims(known(300), evict="123") == ["1"]
    for name, used, free in (("1", 611, 489), ("2", 311, 789), ("3", 11, 1089)):
        books.unload(name, used)
        assert books.free() == free


def test_unknown_loads_take_turns():
    books = gpu(1000)
    books.load("u", guess(100, key="u"))
    assert books.decide(guess(100), waited=4).reason is Reason.TURN
    assert books.answer(guess(100), waited=5) is Answer.ADMIT
    assert books.answer(known(100)) is Answer.ADMIT  # a known need waits for nobody
    books.read(250)
    assert books.reserved("u") == 250
    assert books.free() == 750
    books.load("k", known(200, key="k"))
    books.read(400)  # u has taken 300, k 100
    books.settle("u")
    assert books.booked("u") == 250
    assert books.free() == 550  # 500 is right
    books.read(500)
    books.settle("k")
    books.read(500)
    assert books.free() == 500
    assert books.size("u") == ({GPU: 250}, False)


def test_growth_before_a_load_belongs_to_nobody():
    books = gpu(1000)
    books.add("a", 100)
    books.read(150)  # a has grown by 50
    assert books.free() == 850
    assert books.not_attributed() == 50
    books.load("b", known(300, key="b"))
    books.read(450)
    books.settle("b")
    assert books.size("b") == ({GPU: 300}, True)


def test_growth_during_a_load_bans_nobody():
    books = gpu(400, used=11)
    books.add("b", 60)
    books.load("c", guess(100, key="c"))
    books.read(511)  # 240 are c's, and b has grown by 200: a limit of our own
    overrun = books.settle("c").overrun
    assert (overrun.figures.needed_bytes, overrun.is_permanent) == (440 * MIB, False)
    books.unload("c", 271)
    books.unload("b", 11)
    need = books.need("c")
    assert books.size("c") == ({GPU: 440}, True)
    assert to_mib(need.bytes) == {GPU: 389}  # limit - empty
    assert books.answer(need) is Answer.ADMIT
    books.load("c", need)
    books.read(251)
    assert books.settle("c").overrun is None
    assert books.size("c") == ({GPU: 240}, True)


def test_package_that_never_fits_is_tried_once():
    books = gpu(400, used=11)
    assert books.answer(known(450, declared=450)) is Answer.TOO_LARGE
    assert books.answer(known(389, declared=390)) is Answer.TOO_LARGE  # 11 are Triton's
    assert books.answer(known(389, declared=389)) is Answer.ADMIT
    books.load("y", guess(100, key="y"))
    books.fail("y")
    decision = books.decide(books.need("y"))
    assert (decision.answer, decision.reason) == (Answer.TOO_LARGE, Reason.TRIED)


def test_refusal_for_good_keeps_what_was_seen():
    """A load may have shown more than there was for it: no later answer says less than that."""
    books = gpu(400, used=11)
    books.load("y", guess(100, key="y"))
    books.read(500)
    books.fail("y")
    books.read(11)
    ended = books.decide(books.need("y")).figures
    assert (ended.needed_bytes, ended.needs_more_than_bytes) == (489 * MIB, 489 * MIB)
    books.load("z", guess(100, key="z"))
    books.read(511)
    books.settle("z")
    books.unload("z", 11)
    measured = books.decide(books.need("z")).figures
    assert (measured.needed_bytes, measured.needs_more_than_bytes) == (500 * MIB, None)


def test_stuck_load_that_lacked_memory_needs_more():
    books = gpu(1000)
    books.load("y", guess(100, key="y"))
    books.read(300)
    books.ledger.strand("y", is_out_of_memory=True)
    assert books.need("y").bytes == to_bytes({GPU: 600})


def test_declared_size_that_is_too_small_is_raised():
    books = gpu(1000)
    books.load("d", books.need("d", declared=100))
    books.read(600)
    books.settle("d")
    assert books.booked("d") == 600
    assert to_mib(books.need("d", declared=100).bytes) == {GPU: 600}
    for _ in range(2):
        books.load("e", books.need("e", declared=150))
        books.fail("e")
    assert to_mib(books.need("e", declared=150).bytes) == {GPU: 300}


def test_memory_that_an_allocator_keeps_is_reused():
    books = gpu(1100, used=33)
    books.load("a", known(389, key="a"))
    books.read(422)
    books.settle("a")
    books.unload("a", 422)
    assert books.free() == 678
    assert books.not_attributed() == 389
    books.load("b", known(389, key="b"))
    books.read(430)  # b has reused it: 8 would be wrong
    books.settle("b")
    assert books.size("b") == ({GPU: 389}, True)
    books.unload("b", 833)
    assert books.answer(known(389)) is Answer.TRY  # 507 would be a dead end


def test_unload_is_answered_when_most_is_back():
    leaving = Leaving(to_bytes({GPU: 400}), to_bytes({GPU: 422}))
    assert not is_unload_done(leaving, to_bytes({GPU: 123}), 0)
    assert is_unload_done(leaving, to_bytes({GPU: 122}), 0)  # three quarters
    assert not is_unload_done(leaving, to_bytes({GPU: 422}), 4)
    assert is_unload_done(leaving, to_bytes({GPU: 422}), 5)
    assert not is_unload_done(leaving, {}, 4)  # a reading that fails shows nothing
    assert is_unload_done(Leaving(leaving.booked, {}), {}, 0)  # nothing is read
    small = Leaving(to_bytes({GPU: 15}), to_bytes({GPU: 422}))
    assert is_unload_done(small, to_bytes({GPU: 422}), 0)  # less than others' noise


def test_books_alone_count_when_readings_stop():
    books = gpu(1000, used=50)
    books.add("a", 300)
    books.load("b", guess(200, key="b"))
    books.ledger.end_load("b", books.now + 1)
    books.wait(5)
    assert not books.ledger.can_settle("b")  # 4 s after its end
    books.wait(1)
    assert books.ledger.can_settle("b")
    books.ledger.settle("b")
    assert books.booked("b") == 200
    assert books.size("b") == ({GPU: 200}, False)
    books.ledger.begin_unload("a")
    assert books.free() == 450  # not before Triton has unloaded it
    books.ledger.end_unload("a", books.before_reading)
    assert books.free() == 750
    books.read(350)  # readings come again: b has taken 300
    assert books.free() == 650


def test_reading_that_lies_is_believed_until_the_next():
    books = gpu(1000, used=50)
    books.add("a", 300)
    books.read(0)
    assert books.free() == 1000  # a wrong admission costs one failed load
    books.read(350)
    assert books.free() == 650
    books.read(5000)
    assert books.answer(known(100)) is Answer.INSUFFICIENT
    books.read(350)
    assert books.free() == 650


def test_models_of_an_earlier_run_are_adopted():
    books = Books({GPU: 24576})
    for name in "abc":
        books.ledger.adopt(name, to_bytes({GPU: 6000}))
    books.read(18944)  # 18000 are theirs
    assert books.empty() is None
    assert books.free() == 5632
    assert books.victims(known(6500), evict="bc") == ["b"]
    assert (
        books.answer(known(20000, declared=20000)) is Answer.INSUFFICIENT
    )  # an eviction may make room for it
    assert books.answer(known(25000, declared=25000)) is Answer.TOO_LARGE


def test_busy_models_are_waited_for():
    books = gpu(400)
    books.add("a", 200)
    books.add("b", 200)
    assert books.victims(known(200), evict="ab", busy="b") == ["a"]
    assert books.victims(known(200), evict="ab", busy="a") == ["b"]  # the first one has requests
    assert books.decide(known(300), evict="ab", busy="b").reason is Reason.BUSY  # a stays
    assert books.victims(known(300), evict="ab") == ["a", "b"]


def test_unload_beside_a_load_measures_nothing():
    books = gpu(1000)
    books.add("a", 300)
    books.load("u", guess(200, key="u"))
    books.ledger.begin_unload("a")
    books.read(400)  # 300 are a's still, and 100 u's
    assert books.settled() == 0
    assert books.reserved("u") == 200
    books.read(200)
    books.ledger.end_unload("a", books.before_reading)
    books.settle("u")  # the reading before it was 300: the difference says nothing
    assert books.size("u") == ({GPU: 200}, False)


def test_limit_above_the_device_is_lowered():
    assert limit_of(30000, 24000) == 24000
    assert limit_of(10000, 24000) == 10000
    assert limit_of(None, 24000) == 24000


def test_package_is_placed_where_it_can_fit():
    books = Books({"small": 1000, "large": 4000})
    books.read(small=100, large=0)
    books.add("a", 3500, "large")

    def order(count):
        needs = {name: known(**{name: count}) for name in ("large", "small")}
        return sort_devices(books.ledger, needs)

    assert order(600) == ["small", "large"]
    assert order(2000) == ["large", "small"]  # the small one can never have it
    books.add("b", 400, "small")
    needs = {name: known(**{name: 600}) for name in ("small", "large")}
    assert books.place(needs, waited=5).answer is Answer.INSUFFICIENT
    decision = books.place(needs, evict="a")
    assert (decision.answer, decision.victims, decision.device) == (Answer.EVICT, ("a",), "large")


def test_model_is_not_where_it_took_nothing():
    """It does not stand in the way of a load there, and needs nothing of it the next time."""
    books = Books({"0": 1000, "1": 1000})
    books.read(**{"0": 0, "1": 0})
    books.load("n", guess(key="n", **{"0": 64, "1": 64}))
    books.read(**{"0": 0, "1": 400})
    books.settle("n")
    assert to_mib(books.ledger.models["n"]) == {"1": 400}
    assert to_mib(books.need("n").bytes) == {"1": 400}
    assert books.ledger.is_empty("0")


def test_mps_limits_each_process():
    books = gpu(24000, used=None, process_limit=8000)
    decision = books.decide(books.need("a", declared=9000))
    assert (decision.answer, decision.reason) == (Answer.TOO_LARGE, Reason.PROCESS_LIMIT)
    assert books.answer(books.need("a", declared=9000, processes=2)) is Answer.ADMIT
    assert books.answer(books.need("a", declared=9000, processes=None)) is Answer.ADMIT


def test_modelmesh_loads_use_the_headroom():
    books = gpu(1000, headroom=50)
    books.add("a", 700)  # ModelMesh books 1 for the next load, and learns its size afterwards
    planned = {"purpose": Purpose.PLANNED}
    assert books.answer(known(280), **planned) is Answer.ADMIT
    assert books.answer(known(280), waited=5) is Answer.INSUFFICIENT
    need = books.need("c", files=900, limit=250)  # the landing strip
    assert to_mib(need.bytes) == {GPU: 250}
    assert books.answer(need, **planned) is Answer.ADMIT
    books.load("c", need)
    assert books.decide(need, **planned, waited=20).reason is Reason.TURN
    assert books.decide(known(280), **planned).reason is Reason.IN_PROGRESS
    books.unload("a", 250)  # ModelMesh was told that c takes 250
    assert books.answer(known(280), **planned) is Answer.ADMIT
