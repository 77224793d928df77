"""Bodies of the endpoint that wait for models."""

import pytest

from adapter.errors import TooManyWaiting
from adapter.frontends.http.bodies import HeldBodies


def test_bodies_are_held_up_to_the_limit_and_no_further() -> None:
    bodies = HeldBodies(limit=10)
    with bodies.hold(6) as take:
        take(6)
        with bodies.hold(4) as take_more:
            take_more(4)
            with pytest.raises(TooManyWaiting, match="10 bytes of bodies are held"):
                bodies.hold(1).__enter__()
            with pytest.raises(TooManyWaiting, match="10 bytes of bodies are held"):
                take_more(1)
        assert bodies.held == 6
    assert bodies.held == 0


def test_what_is_announced_and_does_not_come_keeps_nobody_out() -> None:
    bodies = HeldBodies(limit=10)
    with bodies.hold(10) as take, bodies.hold(10) as take_more:
        take(1)
        take_more(9)
        assert bodies.held == 10


def test_256_MiB_are_held_in_all() -> None:  # noqa: N802 - the unit
    assert HeldBodies().limit == 256 * 2**20
