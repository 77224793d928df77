"""What callers say at length is not remembered."""

import tracemalloc
from collections.abc import Callable

import pytest

from adapter.frontends.http.instrumentation import path_segments
from adapter.frontends.routes import find
from adapter.triton.json_limits import Shapes

KIB = 2**10


def ask_for_a_long_path(i: int) -> None:
    find(path_segments(f"/models/m/invoke?{i}{'x' * 4 * KIB}"))


def send_a_long_shape(i: int) -> None:
    Shapes(2**40).feed(b'{"shape":[%d%b]}' % (i, b",1" * 4 * KIB))


@pytest.mark.parametrize("say", [ask_for_a_long_path, send_a_long_shape])
def test_long_differing_texts_are_not_kept(say: Callable[[int], None]) -> None:
    say(0)
    tracemalloc.start()
    try:
        for i in range(10):
            say(i)
        assert tracemalloc.get_traced_memory()[0] < 24 * KIB
    finally:
        tracemalloc.stop()
