"""The part of `make bench` that measures the endpoint, and the LRU by count beside it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.benchmarks import __main__ as program
from tests.benchmarks.counted import CountedLru
from tests.benchmarks.mix import MODELS, TENTH, write_models
from tests.benchmarks.place import MIB, QUICK
from tests.benchmarks.rows import ROWS

SECONDS = 30


@dataclass
class Server:
    """Notes what it is told, and stops in a load of `slow` until `goes_on`."""

    slow: str = ""
    told: list[str] = field(default_factory=list)
    at_work: int = 0
    most_at_work: int = 0
    has_begun: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def load(self, name: str) -> None:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        self.told.append(f"+{name}")
        if name == self.slow:
            self.has_begun.set()
            assert self.goes_on.wait(SECONDS)
        self.at_work -= 1

    def unload(self, name: str) -> None:
        self.told.append(f"-{name}")

    def lru(self, count: int, load: Callable[[str], None] | None = None) -> CountedLru:
        return CountedLru(count, load or self.load, self.unload)


def test_the_lru_by_count_unloads_what_was_used_least_recently_before_it_loads():
    server = Server()
    lru = server.lru(2)
    assert [lru.use(name) for name in "abacb"] == [False, False, True, False, False]
    assert server.told == ["+a", "+b", "-b", "+c", "-a", "+b"]
    assert lru.models == ["c", "b"]


def test_of_many_who_ask_for_one_model_one_loads_it():
    server = Server(slow="a")
    lru = server.lru(1)
    with ThreadPoolExecutor(4) as callers:
        asked = [callers.submit(lru.use, "a") for _ in range(4)]
        assert server.has_begun.wait(SECONDS)
        server.goes_on.set()
        found = [each.result(SECONDS) for each in asked]
    assert server.told == ["+a"]
    assert found.count(False) >= 1
    assert lru.models == ["a"]


def test_a_model_that_is_there_is_used_while_another_loads_and_a_third_waits_for_the_lock():
    server = Server(slow="b")
    lru = server.lru(3)
    lru.use("a")
    with ThreadPoolExecutor(2) as callers:
        loads = callers.submit(lru.use, "b")
        assert server.has_begun.wait(SECONDS)
        waits = callers.submit(lru.use, "c")
        assert lru.use("a")
        assert server.told == ["+a", "+b"]
        server.goes_on.set()
        assert not loads.result(SECONDS)
        assert not waits.result(SECONDS)
    assert server.most_at_work == 1
    assert lru.models == ["a", "b", "c"]


def test_a_load_that_fails_is_told_and_leaves_the_lock_free_and_the_model_out():
    def fails(_name: str) -> None:
        raise RuntimeError("no room")

    server = Server()
    lru = server.lru(2, fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            lru.use("a")
    assert lru.models == []


def test_there_is_room_for_any_model_of_the_mix_and_the_count_does_not_tell_the_bytes(tmp_path):
    models = write_models(tmp_path)
    sizes = sorted(models.bytes_of.values())
    count = MODELS // TENTH
    assert len(sizes) == MODELS
    assert models.room == sum(sizes) // TENTH
    assert sizes[-1] <= models.room
    assert sum(sizes[:count]) < models.room < sum(sizes[-count:])
    config = (tmp_path / "m00" / "config.pbtxt").read_text()
    assert f'"{models.bytes_of["m00"]}"' in config
    assert models.bytes_of["m00"] % MIB == 0


@pytest.mark.triton
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_quick_run_of_the_part_gives_every_row():
    figures = program.BY["endpoint"](QUICK)
    wanted = [row.figure for row in ROWS if row.measure == "endpoint"]
    assert [name for name in wanted if figures.get(name) is None] == []
    assert figures.keys() == set(wanted)
    assert figures["lru_most"]["min"] > 0
