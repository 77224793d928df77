"""Streams of requests, some of them malformed, and how h11 reads them."""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import h11

from tests.frontends.http.listener import HANDLED, PLANNED

V2 = "/v2/models/m/infer"
UNKNOWN_MODEL = "/models/nobody/invoke"
ENDS_CONNECTION = ("Connection: close", "Connection: Close", "Connection: keep-alive, close")

# Each may be read in two ways by two parsers, or is plainly wrong. `{n}` is the body's length.
LENGTHS = (
    "Content-Length: {n}",
    "Content-Length: 0{n}",
    "Content-Length: +{n}",
    "Content-Length: -{n}",
    "Content-Length: {n}, {n}",
    "Content-Length: {n},{n}",
    "Content-Length: {n}, 0",
    "Content-Length: 0",
    "Content-Length:",
    "Content-Length: x",
    "Content-Length: 0x{n}",
    "Content-Length: {n} ",
    "Content-Length:\t{n}",
    "Content-Length:{n}",
    "content-length: {n}",
    "Content-Length: {n}\x0b",
    "Content-Length: \x0c{n}",
    "Content-Length: {n}.0",
    "Content-Length : {n}",
    "Content-Length\t: {n}",
    " Content-Length: {n}",
    "Content-Length: 1{n}",
    "Content-Length: {n}_0",
    "Content-Length: 00000000{n}",
    "Content-Length: 18446744073709551616",
    "Content-Length: 99999999999999999999999{n}",
    "Content_Length: {n}",
    "X: a\r\n Content-Length: {n}",
    "Content-Length:\r\n {n}",
    "X: a\nContent-Length: {n}",
    "X: a\rContent-Length: {n}",
    "X: \0\r\nContent-Length: {n}",
    "Content-Length: {n};",
    'Content-Length: "{n}"',
    "Content-Length: \u0661",
)
CODINGS = (
    "Transfer-Encoding: chunked",
    "transfer-encoding: CHUNKED",
    "Transfer-Encoding:chunked",
    "Transfer-Encoding: identity",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding:",
    "Transfer-Encoding: chunked, gzip",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding: x",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding: chunked ",
    " Transfer-Encoding: chunked",
    "Transfer-Encoding: \x0bchunked",
    "Transfer-Encoding:\r\n chunked",
    "TE: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "X: a\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer_Encoding: chunked",
    'Transfer-Encoding: "chunked"',
    "Transfer-Encoding: chunked;q=1",
    "Transfer-Encoding\0: chunked",
)
OTHERS = (
    "Connection: keep-alive",
    "Connection: Keep-Alive, x",
    "Connection: Content-Length",
    "Connection: upgrade",
    "Connection: upgrade\r\nUpgrade: websocket",
    "Upgrade: websocket",
    "Connection: upgrade\r\nUpgrade: h2c",
    "Connection: Upgrade\r\nUpgrade: tcp",
    "Upgrade: h2c",
    "Connection: upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: ",
    "Connection:",
    "Expect: 100-continue",
    "Expect: 100-Continue",
    "Expect: x",
    "Expect:",
    *ENDS_CONNECTION,
    "Host: y",
    "Host:",
    "X: a\r\n b",
    "X: a\r\n\tb",
    "X : a",
    "X",
    ": a",
    "X Y: a",
    "X: a\0b",
    "X: a\nY: b",
    "X: a\rb",
    "X: \x7f",
    "X: \u00fc",
    "\u00fc: x",
    "X:",
    "(: x",
    "Trailer: x",
    "Keep-Alive: timeout=1",
    "Proxy-Connection: close",
    "Content-Encoding: identity",
    "X: \x01",
    "Content-Type: a/b\r\nContent-Type: c/d",
    "Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
)
LINES = (
    " POST {path} HTTP/1.1",
    "post {path} HTTP/1.1",
    "POST {path}\tHTTP/1.1",
    "POST\t{path} HTTP/1.1",
    "POST {path} HTTP/1.1 ",
    "POST {path}",
    "POST {path} HTTP/1.2",
    "POST {path} HTTP/2.0",
    "POST {path} HTTP/0.9",
    "POST {path} http/1.1",
    "POST {path} HTTP/01.1",
    "POST http://x{path} HTTP/1.1",
    "POST x:1{path} HTTP/1.1",
    "OPTIONS * HTTP/1.1",
    "CONNECT x:80 HTTP/1.1",
    "POST {path}?a=b HTTP/1.1",
    "POST {path}#a HTTP/1.1",
    "M-SEARCH * HTTP/1.1",
    "PRI * HTTP/2.0",
    "POST {path}\u00fc HTTP/1.1",
    "POST {path}\x7f HTTP/1.1",
    "POST {path} HTTP/1.1\r",
    "GET {path} HTTP/1.1",
    "HEAD {path} HTTP/1.1",
    "DELETE {path} HTTP/1.1",
    "QUERY {path} HTTP/1.1",
    "POST {path} HTTP/1.1\r\n X: y",
    "POST /\\ HTTP/1.1",
    'POST /"<> HTTP/1.1',
)
# What h11 refuses and a server may take, if it is as though the line were the usual one.
LENIENT = (
    "POST {path}  HTTP/1.1",
    "POST  {path} HTTP/1.1",
    "\r\n\r\nPOST {path} HTTP/1.1",
    "\r\nPOST {path} HTTP/1.1",
    "\nPOST {path} HTTP/1.1",
)
CHUNKED = (
    b"{x}\r\n{b}\r\n0\r\n\r\n",
    b"0{x}\r\n{b}\r\n00\r\n\r\n",
    b"{x};a=b\r\n{b}\r\n0\r\n\r\n",
    b"{x}\r\n{b}\r\n0\r\nX: y\r\n\r\n",
    b"{x}\r\n{b}\r\n0\r\nContent-Length: 9\r\n\r\n",
    b"{x} \r\n{b}\r\n0\r\n\r\n",
    b"+{x}\r\n{b}\r\n0\r\n\r\n",
    b"0x{x}\r\n{b}\r\n0\r\n\r\n",
    b"{x}\n{b}\n0\n\n",
    b"{x}\r\n{b}0\r\n\r\n",
    b"{x}\r\n{b}X\r\n0\r\n\r\n",
    b"{x}\r\n{b}\r\n0\r\n\n",
    b"{x};a=\n\r\n{b}\r\n0\r\n\r\n",
    b"{x}\r{b}\r\n0\r\n\r\n",
    b"{x};\0\r\n{b}\r\n0\r\n\r\n",
    b"fffffffffffffffff{x}\r\n{b}\r\n0\r\n\r\n",
    b"\r\n{b}\r\n0\r\n\r\n",
    b";a\r\n{b}\r\n0\r\n\r\n",
    b"{x}\r\n{b}\r\n0\r\n X\r\n\r\n",
    b"{x}\r\n{b}\r\n0\r\nX Y: z\r\n\r\n",
    b"{x}\r\n{b}\r\n0\r\n",
    b'{x};a="\r\n"\r\n{b}\r\n0\r\n\r\n',
    b"{x}\r\n{b}\r\n-0\r\n\r\n",
    b"{x}\r\n{b}\r\n0;\r\n\r\n",
)
_SPOILERS = (b"\r", b"\n", b"\0", b" ", b"\t", b":", b",", b";", b"Z", b"0", b"\xff", b"\r\n", b"")


@dataclass(frozen=True)
class Read:
    method: str
    target: str
    body: bytes


@dataclass
class Reading:
    """`verdict`: what comes behind the last whole request: `open` when nothing does, `cut` for one
    that has not wholly come, `closed` where nothing may come, `refused` for what is malformed.
    """

    requests: list[Read] = field(default_factory=list)
    verdict: str = "open"


def read_by_h11(data: bytes) -> Reading:
    found = Reading()
    try:
        while data := _usual(data):
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**26)
            connection.receive_data(data)
            if (head := connection.next_event()) in (h11.NEED_DATA, h11.PAUSED):
                found.verdict = "cut"
                return found
            assert isinstance(head, h11.Request)
            body = b""
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                found.verdict = "cut"
                return found
            found.requests.append(Read(head.method.decode(), head.target.decode(), body))
            connection.send(h11.Response(status_code=404, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                found.verdict = "closed"
                return found
            data = connection.trailing_data[0]
    except h11.RemoteProtocolError:
        found.verdict = "refused"
    return found


def _usual(data: bytes) -> bytes:
    """Without what h11 refuses and servers take: empty lines before a request, and spaces more than
    one in its first line.
    """
    line, end, rest = data.lstrip(b"\r\n").partition(b"\r\n")
    return re.sub(b" +", b" ", line) + end + rest


@dataclass(frozen=True)
class Stream:
    """`is_ordinary`: each of its requests is one that any server takes. `strictly`: the same as h11
    is to read it.
    """

    data: bytes
    strictly: bytes
    is_ordinary: bool


class Streams:
    """Each request has a body of its own, which may look like another request."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._number = 0

    def ordinary(self) -> Stream:
        parts = [self._good() for _ in range(self._chance.randint(1, 6))]
        if self._rarely():
            last = self._chance.choice(ENDS_CONNECTION)
            parts.append(self.message(f"POST {HANDLED} HTTP/1.1", [last], self._body()))
        data = b"".join(parts)
        return Stream(data, data, is_ordinary=True)

    def odd(self) -> Stream:
        parts = [self._good() for _ in range(self._chance.randint(0, 2))]
        before = b"".join(parts)
        bad = strictly = self._bad()
        if (kind := self._chance.random()) < 0.25:
            bad = self._spoilt(bad)
            strictly = bad
        elif kind < 0.3:
            strictly = self._good()
            bad = self._leniently(strictly)
        behind = b"".join([self._good() for _ in range(self._chance.randint(1, 2))])
        return Stream(before + bad + behind, before + strictly + behind, is_ordinary=False)

    def cuts(self, data: bytes) -> Iterator[list[bytes]]:
        """The same bytes, whole, then cut in three ways; byte by byte where they are few."""
        yield [data]
        size = len(data)
        counts = (1, self._chance.randint(2, 8))
        ways = [self._chance.sample(range(size), min(count, size)) for count in counts]
        ends = [at + self._chance.randint(0, 4) for at in _ends_of_heads(data)]
        ways.append([at for at in ends if at < size])
        if size < 400:
            ways.append(list(range(1, size)))
        for way in ways:
            ats = [0, *sorted(set(way) - {0}), size]
            yield [data[a:b] for a, b in itertools.pairwise(ats)]

    def message(self, line: str, fields: list[str], body: bytes, *, length: bool = True) -> bytes:
        fields = ["Host: x", *fields, *([f"Content-Length: {len(body)}"] if length else [])]
        return "\r\n".join([line, *fields, "\r\n"]).encode("latin-1", "replace") + body

    def _rarely(self) -> bool:
        return self._chance.random() < 0.25

    def _body(self) -> bytes:
        self._number += 1
        kinds = ("small", "small", "request", "chunks", "large")
        kind = self._chance.choices(kinds, (8, 8, 8, 4, 1))[0]
        mark = b'{"number":%d' % self._number
        match kind:
            case "request":
                line = f"POST {self._chance.choice((PLANNED, HANDLED))} HTTP/1.1"
                return mark + b"}\r\n\r\n" + self.message(line, [], b'{"smuggled":1}')
            case "chunks":
                return mark + b"}\r\n0\r\n\r\n" + self.message(f"GET {HANDLED} HTTP/1.1", [], b"")
            case "large":
                return mark + b',"x":"' + b"y" * self._chance.choice((2**16, 300_000)) + b'"}'
        return mark + b"}"

    def _good(self) -> bytes:
        path = self._chance.choice(
            (PLANNED, PLANNED, PLANNED, V2, V2, HANDLED, HANDLED, UNKNOWN_MODEL)
        )
        kind = self._chance.choice(("plain",) * 5 + ("chunked", "get", "head", "expect", "kept"))
        line, body = f"POST {path} HTTP/1.1", self._body()
        match kind:
            case "chunked":
                fields = ["Transfer-Encoding: chunked"]
                return self.message(line, fields, self.chunks(body), length=False)
            case "get" | "head":
                return self.message(
                    f"{kind.upper()} {HANDLED}/{self._number} HTTP/1.1", [], b"", length=False
                )
            case "expect":
                return self.message(line, ["Expect: 100-continue"], body)
            case "kept":
                return self.message(line, ["connection: Keep-Alive", "X-A:  b\t"], body)
        return self.message(line, [], body)

    def chunks(self, body: bytes) -> bytes:
        pieces, at = [], 0
        while at < len(body):
            size = self._chance.randint(1, max(1, len(body)))
            piece = body[at : at + size]
            pieces.append(b"%x\r\n%b\r\n" % (len(piece), piece))
            at += size
        return b"".join([*pieces, b"0\r\n\r\n"])

    def _bad(self) -> bytes:
        choice, body = self._chance.choice, self._body()[:2000]
        path = choice((PLANNED, PLANNED, V2, HANDLED))
        line = f"POST {path} HTTP/1.1"
        good, chunked = f"Content-Length: {len(body)}", "Transfer-Encoding: chunked"
        kinds = {
            "length": [choice(LENGTHS)],
            "lengths": [choice(LENGTHS), choice(LENGTHS)],
            "coding": [choice(CODINGS)],
            "both": [choice(CODINGS), choice(LENGTHS)],
            "other": [choice((good, chunked)), choice(OTHERS)],
            "others": [choice((good, chunked)), *(choice(OTHERS) for _ in range(3))],
            "line": [good],
            "chunks": [chunked],
        }
        kind, fields = choice(list(kinds.items()))
        self._chance.shuffle(fields)
        if kind == "line":
            line = choice(LINES).replace("{path}", path)
        fields = [one.replace("{n}", str(len(body))) for one in fields]
        if kind == "chunks":
            form = choice(CHUNKED)
            body = form.replace(b"{x}", b"%x" % len(body)).replace(b"{b}", body)
        elif any("hunked" in one for one in fields) and self._chance.random() < 0.7:
            body = self.chunks(body)
        return self.message(line, fields, body, length=False)

    def _leniently(self, data: bytes) -> bytes:
        line, _, rest = data.partition(b"\r\n")
        method, path, version = line.split(b" ")
        form = self._chance.choice(LENIENT).encode().replace(b"{path}", path)
        return form.replace(b"POST", method).replace(b"HTTP/1.1", version) + b"\r\n" + rest

    def _spoilt(self, data: bytes) -> bytes:
        at = self._chance.randrange(data.find(b"\r\n\r\n") + 4)
        width = self._chance.randint(0, 1)
        return data[:at] + self._chance.choice(_SPOILERS) + data[at + width :]


def _ends_of_heads(data: bytes) -> Iterator[int]:
    at = -1
    while (at := data.find(b"\r\n\r\n", at + 1)) >= 0:
        yield at
