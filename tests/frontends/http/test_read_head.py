"""A head has one reading: what is read, h11 reads the same. A million: make nightly."""

import os
import random
import sys
from collections import Counter

import h11
import pytest

from adapter.frontends.http.head import END, MisreadHead, RawHead, read_head
from tests.frontends.http.listener import PLANNED
from tests.frontends.http.readings import CODINGS, LENGTHS, LINES, OTHERS

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
COUNT = int(os.environ.get("NIGHTLY_HEADS", "3000"))
pytestmark = pytest.mark.timeout(60 + COUNT // 1000)
_SPOILERS = bytes(range(0x21)) + b":,;Z0\x7f\x80\xa0\xff"
_LONG = "".join(str(digit % 10) for digit in range(1, 31))
LONG_LENGTHS = (
    f"Content-Length: {_LONG}",
    f"Content-Length: {'0' * 29}2",
    f"Content-Length: {'9' * 30}",
    "Content-Length: 18446744073709551618",
    "Content-Length: 4294967298",
)


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
        raw = text.replace("{path}", PLANNED).replace("{n}", str(chance.randrange(100)))
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


def is_read_alike(raw: bytes, ours: RawHead) -> bool:
    """Return whether h11 reads the head as we do."""
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(raw)
        theirs = connection.next_event()
    except h11.RemoteProtocolError:
        return False
    if not isinstance(theirs, h11.Request):
        return False
    fields = [(bytes(name), bytes(value)) for name, value in theirs.headers]
    line = theirs.method, theirs.target, theirs.http_version
    return line == (
        ours.method.encode(),
        ours.target.encode(),
        b"1.0" if ours.is_http_1_0 else b"1.1",
    ) and fields == [(name.lower(), _usual(name, value)) for name, value in ours.fields]


def _usual(name: bytes, value: bytes) -> bytes:
    """Return a value as h11 gives it: a coding is in lower case, a length is one number."""
    return value.lower() if name.lower() == b"transfer-encoding" else value


def compare(chance: random.Random, count: int) -> Counter[str]:
    made = Heads(chance)
    seen = Counter[str]()
    for _ in range(count):
        raw = made.one()
        try:
            ours = read_head(raw)
        except MisreadHead:
            seen["refused"] += 1
            continue
        seen["read"] += 1
        assert is_read_alike(raw, ours), raw
    return seen


def test_heads_are_read_as_h11_reads_them():
    sys.stdout.write(f"seed {SEED}\n")
    seen = compare(random.Random(SEED), COUNT)
    assert min(seen["refused"], seen["read"]) > COUNT / 10
