"""The seeded fuzz tests of tests/frontends/http, with other seeds each time."""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import uvloop

from tests.frontends.http import test_read_head as heads
from tests.frontends.http import test_readings as readings
from tests.frontends.http.readings import Streams

_AT_ONCE = 60


def play_seeds(
    seconds: float, seed: int, play: Callable[[random.Random], Awaitable[Counter[str]]]
) -> Counter[str]:
    """Seed after seed; the one that fails is named."""
    seen, end = Counter[str](), time.monotonic() + seconds
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while time.monotonic() < end:
            try:
                seen += runner.run(play(random.Random(seed)))
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
            seed += 1
    sys.stdout.write(f"seeds before {seed}: {dict(seen)}\n")
    return seen


def test_h11_reads_a_million_heads_alike(seed):
    sys.stdout.write(f"{dict(heads.compare(random.Random(seed), 1_000_000))}\n")


def test_where_a_request_ends_has_one_reading(seconds, seed):
    seen = play_seeds(seconds, seed, lambda chance: readings.play(Streams(chance), _AT_ONCE))
    assert min(seen[each] for each in ("open", "closed", "refused", "answered")) > 0
