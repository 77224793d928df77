"""A head has one reading: what our scanner reads, h11 reads the same. A million: make nightly.

h11 is an implementation that shares no code with ours, nor with the parser of aiohttp.
"""

import asyncio
import os
import random
import re
import sys
from collections import Counter
from itertools import pairwise

import h11
import pytest

from adapter.frontends.http.head_scanner import END, Scanned, names_of, scan
from tests.cases import rows
from tests.frontends.http.listener import FAST, Listener, opened
from tests.frontends.http.readings import CODINGS, LENGTHS, LINES, OTHERS

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
COUNT = int(os.environ.get("NIGHTLY_HEADS", "3000"))
pytestmark = pytest.mark.timeout(60 + COUNT // 1000)
_SPOILERS = bytes(range(0x21)) + b":,;Z0\x7f\x80\xa0\xff"
_LONG = "".join(str(digit % 10) for digit in range(1, 31))
LONG_LENGTHS = (
    *(f"Content-Length: {_LONG}", f"Content-Length: {'0' * 29}2", f"Content-Length: {'9' * 30}"),
    *("Content-Length: 18446744073709551618", "Content-Length: 4294967298"),
)
# what h11 refuses for itself, of a head that has one reading
_OTHER_REFUSALS = ("Missing mandatory Host", "Found multiple Host")


class Heads:
    """Makes heads: most are good, and some of those are spoilt."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def one(self) -> bytes:
        chance = self._chance
        first = "POST {path} HTTP/1.1" if chance.random() < 0.8 else chance.choice(LINES)
        fields = ["Host: x"] if chance.random() < 0.9 else []
        if chance.random() < 0.8:
            fields.append("Content-Length: {n}")
        for _ in range(chance.randrange(4)):
            kind = chance.choice((OTHERS, OTHERS, LENGTHS, CODINGS, LONG_LENGTHS))
            fields.append(chance.choice(kind))
        if chance.random() < 0.3:
            chance.shuffle(fields)
        text = "\r\n".join([first, *fields, "\r\n"])
        raw = text.replace("{path}", FAST).replace("{n}", str(chance.randrange(100)))
        return self._ended(self._spoilt(raw.encode()))

    def _spoilt(self, raw: bytes) -> bytes:
        changed = bytearray(raw)
        for _ in range(self._chance.choice((0, 0, 0, 1, 2))):
            at, width = self._chance.randrange(len(changed)), self._chance.randrange(2)
            changed[at : at + width] = bytes([self._chance.choice(_SPOILERS)])
        return bytes(changed)

    @staticmethod
    def _ended(raw: bytes) -> bytes:
        """As a connection hands it over: to the first empty line, and with none before it."""
        head, end, _ = raw.lstrip(b"\r\n").partition(END)
        return head + (end or END)


def is_read_alike(raw: bytes, ours: Scanned) -> bool:
    """Whether h11 reads the head as we do; True also where it refuses what says nothing of ends."""
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(raw)
        theirs = connection.next_event()
    except h11.RemoteProtocolError as error:
        return str(error).startswith(_OTHER_REFUSALS)
    if not isinstance(theirs, h11.Request):
        return False
    fields = [(name, value) for name, value in theirs.headers]
    lengths = [int(value) for name, value in fields if name == b"content-length"]
    return (
        (theirs.method, theirs.target, theirs.http_version) == (ours.method, ours.target, b"1.1")
        and fields == [*ours.fields.items()]
        and [name.lower() for name in names_of(ours)] == [*ours.fields]
        and lengths == ([ours.length] if b"content-length" in ours.fields else [])
        and not any(name in {b"transfer-encoding", b"upgrade"} for name, _ in fields)
    )


def compare(chance: random.Random, count: int) -> Counter[str]:
    made, seen = Heads(chance), Counter[str]()
    for _ in range(count):
        raw = made.one()
        ours = scan(raw)
        seen["left" if ours is None else "read"] += 1
        assert ours is None or is_read_alike(raw, ours), raw
    return seen


async def compare_split(chance: random.Random, count: int) -> Counter[str]:
    """Send heads whole and in pieces, and count the statuses, which must be the same."""
    made, seen = Heads(chance), Counter[str]()
    async with opened() as listener:
        for _ in range(count):
            raw = made.one()
            cuts = sorted(chance.randrange(len(raw) + 1) for _ in range(chance.randrange(1, 4)))
            found = [await _statuses(listener, raw, at) for at in ([], cuts)]
            assert found[0] == found[1], (raw, cuts)
            seen[found[0][:3].decode()] += 1
    return seen


async def _statuses(listener: Listener, raw: bytes, cuts: list[int]) -> bytes:
    caller = await listener.connect()
    for begin, end in pairwise([0, *cuts, len(raw)]):
        await caller.send(raw[begin:end])
        for _ in range(2):
            await asyncio.sleep(0)
    caller.writer.write_eof()
    said = await caller.rest()
    await caller.close()
    return b" ".join(re.findall(rb"HTTP/1.1 (\d+) ", said))


def test_what_we_read_of_a_head_h11_reads_the_same() -> None:
    sys.stdout.write(f"seed {SEED}\n")
    seen = compare(random.Random(SEED), COUNT)
    assert min(seen["left"], seen["read"]) > COUNT / 10


async def test_heads_in_pieces_are_answered_as_whole_ones() -> None:
    seen = await compare_split(random.Random(SEED), COUNT // 10)
    assert min(seen["200"], seen["400"]) > 0


@rows("field", LONG_LENGTHS[:3])
def test_a_length_of_30_digits_is_not_read(field: str) -> None:
    assert len(field.partition(": ")[2]) == 30
    assert scan(f"POST {FAST} HTTP/1.1\r\nHost: x\r\n{field}\r\n\r\n".encode()) is None


@pytest.mark.parametrize("field", ["Content-Length: 2", *LONG_LENGTHS[:3]])
async def test_a_head_that_is_split_anywhere_is_read_as_the_whole_one(field: str) -> None:
    raw = f"POST {FAST} HTTP/1.1\r\nHost: x\r\n{field}\r\n\r\n{{}}".encode()
    async with opened() as listener:
        whole = await (await listener.connect()).ask(raw)
        for at in range(1, len(raw)):
            caller = await listener.connect()
            await caller.send(raw[:at])
            for _ in range(2):
                await asyncio.sleep(0)
            assert (await caller.ask(raw[at:])).status == whole.status
            await caller.close()
