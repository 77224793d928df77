"""A head has one reading: what is read, h11 reads the same. A million: make nightly."""

import os
import random
import sys
from collections import Counter

import h11
import pytest

from adapter.frontends.http.engine.head import CHUNKED, MisreadHead, RawHead, read_head
from tests.cases import rows
from tests.frontends.http.listener import FAST, head
from tests.frontends.http.test_head_readings import Heads

SEED = int(os.environ.get("NIGHTLY_SEED", "1"))
COUNT = int(os.environ.get("NIGHTLY_HEADS", "3000"))
LENGTH = "Content-Length: 2"


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


@rows(
    "raw",
    [
        head(FAST, LENGTH, "Host: y"),
        b"POST /a HTTP/1.1\r\nContent-Length: 2\r\n\r\n",
        head(FAST, LENGTH).replace(b"POST ", b"POST  "),
        head(FAST, LENGTH).replace(b" HTTP", b"  HTTP"),
        head(FAST + "#a", LENGTH),
        head("http://x/a#b", LENGTH),
        head("http://x:99999/models", LENGTH),
        head("http://[/models", LENGTH),
        head("ftp://x/models", LENGTH),
        head("*", LENGTH, method="OPTIONS"),
        head(FAST, LENGTH, version="1.2"),
        head(FAST, LENGTH, version="2.0"),
        head(FAST, LENGTH).replace(b"HTTP/1.1", b"ICE/1.0"),
        head("x:80", method="CONNECT"),
        head(FAST, LENGTH, *(f"X-{number}: y" for number in range(127))),
        head(FAST, "Transfer-Encoding: gzip, chunked"),
        head(FAST, "Transfer-Encoding: chunked;q=1", "Transfer-Encoding: chunked"),
        head(FAST, "Transfer-Encoding: gzip", "transfer-encoding: chunked"),
        head(FAST, "Transfer-Encoding: chunked", LENGTH),
        head(FAST, LENGTH, LENGTH),
        head(FAST, "Transfer-Encoding: chunked", version="1.0"),
        head(FAST, f"Content-Length: {'0' * 29}2"),
        head(FAST, LENGTH, "X: a\r\n b"),
        head(FAST, LENGTH, "X: a\x01"),
        head(FAST, LENGTH, "X: a\nY: b"),
        head(FAST, LENGTH, "X: a\rb"),
    ],
)
def test_head_that_others_may_read_differently_is_refused(raw: bytes):
    with pytest.raises(MisreadHead):
        read_head(raw)


def test_length_tells_where_the_body_ends():
    assert read_head(head(FAST)).length == 0
    assert read_head(head(FAST, "content-length:\t002 ")).length == 2
    assert read_head(head(FAST, "Transfer-Encoding: Chunked")).length == CHUNKED


@rows(
    ("fields", "version", "wants_close"),
    [
        ((), "1.1", False),
        (("Connection: keep-alive, close",), "1.1", True),
        (("Connection: x", "connection: CLOSE"), "1.1", True),
        ((), "1.0", True),
        (("Connection: Keep-Alive",), "1.0", False),
        (("Connection: keep-alive, close",), "1.0", True),
    ],
)
def test_connection_is_closed_as_the_client_wants(fields, version, wants_close):
    assert read_head(head(FAST, *fields, version=version)).wants_close == wants_close


@pytest.mark.parametrize("field", ["Upgrade: h2c\r\nConnection: Upgrade", "Expect: 100-Continue"])
def test_request_for_another_protocol_is_read_in_this_one(field: str):
    assert read_head(head(FAST, field, LENGTH)).length == 2
