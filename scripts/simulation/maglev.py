"""Envoy's Maglev with bounded load: which machine a model's name leads to.

tests/fleet/test_maglev.py holds it to a real Envoy. All machines weigh the same.
"""

import random
from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from math import ceil

import xxhash

_NOBODY = -1
_STATE_WORDS, _WORD = 624, 2**32  # of the Mersenne twister
_SEED_FACTOR = 1812433253


def hash_of(name: str, seed: int = 0) -> int:
    """Return what Envoy makes of the one value of a header that it hashes by."""
    return xxhash.xxh64_intdigest(name.encode(), seed)


class Table:
    """`machines` are what Envoy hashes, in its order: the name that deploy/fleet/generate gives to
    each, or else its address, IP:PORT. `size` is a prime.
    """

    def __init__(self, machines: Sequence[str], size: int) -> None:
        self.machines = tuple(machines)
        self._entries = _filled(self.machines, size)

    def index_of(self, key: int, attempt: int = 0) -> int:
        """Return the place in `machines` of the one that the key leads to, or of one that is drawn
        for a further attempt: it may be the same.
        """
        if attempt:
            key ^= 2**64 - attempt
        return self._entries[key % len(self._entries)]

    def entries(self) -> list[int]:
        """Return how many each machine has."""
        return [self._entries.count(index) for index in range(len(self.machines))]


@lru_cache(maxsize=64)
def _filled(machines: tuple[str, ...], size: int) -> "array[int]":
    """Each machine goes through all entries in steps of its own. By turns, in the order of their
    names, each takes the next one on its way that is free.
    """
    order = sorted(range(len(machines)), key=lambda index: machines[index].encode())
    at = [hash_of(machines[index]) % size for index in order]
    steps = [hash_of(machines[index], seed=1) % (size - 1) + 1 for index in order]
    entries, free = array("i", [_NOBODY]) * size, size
    while True:
        for turn, index in enumerate(order):
            entry, step = at[turn], steps[turn]
            while entries[entry] != _NOBODY:
                entry = (entry + step) % size
            entries[entry], at[turn] = index, entry
            free -= 1
            if not free:
                return entries


class BoundedTable:
    """A table whose machines are passed over while they have more than their share in flight:
    `balance_factor` percent of the mean. 0: none is passed over.
    """

    def __init__(self, table: Table, balance_factor: int) -> None:
        self.table = table
        self._factor = balance_factor
        self._share = 1 / len(table.machines)

    def index_of(
        self, key: int, in_flight: Sequence[int], all_in_flight: int, attempt: int = 0
    ) -> int:
        """`in_flight`: of each machine. `all_in_flight`: also of those that left the table."""
        first = self.table.index_of(key, attempt)
        if not self._factor:
            return first
        slots = self._slots(all_in_flight)
        if in_flight[first] <= slots:
            return first
        least = first
        for index in shuffled(key, len(in_flight)):
            if in_flight[index] <= slots:
                return index
            if in_flight[index] < in_flight[least]:
                least = index
        return least

    def _slots(self, all_in_flight: int) -> int:
        whole = ((all_in_flight + 1) * self._factor + 99) // 100
        return max(1, ceil(whole * self._share))


@cache
def shuffled(key: int, count: int) -> tuple[int, ...]:
    """Return the order in which machines are tried instead of an overloaded one."""
    twister = _twister(key)
    order = list(range(count))
    for place in range(count):
        other = place + _below(twister, count - place)
        order[place], order[other] = order[other], order[place]
    return tuple(order)


def _twister(seed: int) -> random.Random:
    """C++'s std::mt19937 of that seed; Python's own seeding is another one."""
    words = [seed % _WORD]
    for number in range(1, _STATE_WORDS):
        before = words[-1] ^ (words[-1] >> 30)
        words.append((_SEED_FACTOR * before + number) % _WORD)
    twister = random.Random()  # noqa: S311 - Envoy's is none for secrets either
    twister.setstate((3, (*words, _STATE_WORDS), None))
    return twister


def _below(twister: random.Random, count: int) -> int:
    while (drawn := twister.getrandbits(32) // (_WORD // count)) >= count:
        pass
    return drawn
