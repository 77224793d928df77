"""The bound on bodies that are on their way to Triton."""

from hypothesis import given
from hypothesis import strategies as st

from adapter.core.inflight import Claim, InflightBytes


class Bodies:
    """Claims by a number, and which of them have begun, in their order."""

    def __init__(self, limit: int) -> None:
        self.inflight = InflightBytes(limit)
        self.begun: list[int] = []
        self.claims: list[Claim] = []

    def claim(self, size: int) -> None:
        number = len(self.claims)
        self.claims.append(self.inflight.claim(size, lambda: self.begun.append(number)))

    def end(self, number: int) -> None:
        self.claims[number].end()


def test_bodies_begin_at_once_while_there_is_room():
    bodies = Bodies(10)
    bodies.claim(6)
    bodies.claim(4)
    assert bodies.begun == [0, 1]
    assert (bodies.inflight.taken, bodies.inflight.waiting) == (10, 0)


def test_others_wait_and_begin_in_order_as_room_comes():
    bodies = Bodies(10)
    for size in (6, 5, 1, 4):
        bodies.claim(size)
    assert bodies.begun == [0]  # the third would fit, but is behind the second
    bodies.end(0)
    assert bodies.begun == [0, 1, 2, 3]


def test_one_larger_than_the_limit_goes_alone():
    bodies = Bodies(10)
    for size in (1, 100, 1):
        bodies.claim(size)
    assert bodies.begun == [0]
    bodies.end(0)
    assert bodies.begun == [0, 1]
    bodies.end(1)
    assert bodies.begun == [0, 1, 2]


def test_one_that_gives_up_while_it_waits_lets_the_next_begin():
    bodies = Bodies(10)
    for size in (6, 100, 4):
        bodies.claim(size)
    bodies.end(1)
    assert bodies.begun == [0, 2]
    assert bodies.inflight.taken == 10


def test_an_end_that_is_told_twice_counts_once():
    bodies = Bodies(10)
    bodies.claim(6)
    bodies.claim(4)
    bodies.end(0)
    bodies.end(0)
    assert bodies.inflight.taken == 4


@given(
    st.integers(1, 50),
    st.lists(st.one_of(st.integers(1, 80), st.tuples(st.integers(0, 30))), max_size=60),
)
def test_the_sum_is_kept_and_all_begin_in_order_in_the_end(limit, steps):
    bodies = Bodies(limit)
    for step in steps:
        if isinstance(step, int):
            bodies.claim(step)
        elif step[0] < len(bodies.claims):
            bodies.end(step[0])
        assert bodies.begun == sorted(bodies.begun)
        taken = bodies.inflight.taken
        assert taken <= limit or taken in {claim.size for claim in bodies.claims}
    for number in range(len(bodies.claims)):
        bodies.end(number)
    assert (bodies.inflight.taken, bodies.inflight.waiting) == (0, 0)
