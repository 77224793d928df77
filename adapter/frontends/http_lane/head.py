"""The head of a request, on llhttp's parser and stricter than that.

llhttp refuses line breaks that are not CR LF, folded lines, spaces before a colon, a second or odd
Content-Length, and one beside a Transfer-Encoding. It lets pass, and this refuses: versions other
than 1.0 and 1.1, other protocols, more than one space in the request line, any Transfer-Encoding
but `chunked`, and a Host that is not there once. A new parser for each head costs a microsecond;
bodies never reach it, so that it cannot disagree with `framing` on where they end.
"""

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

from adapter.errors import InvalidRequest
from adapter.frontends.edge import echoed_headers
from adapter.frontends.http_lane.framing import Chunked, Framing, Sized

# As Node.js has it, whose parser this is; of the bytes that a caller sends, none are held longer.
HEAD_BYTES = 16 * 2**10

_END = b"\r\n\r\n"

# Of how many heads what they say is kept, and of how long ones.
_KNOWN, _KNOWN_BYTES = 256, 2 * 2**10


class Head:
    """`feed` it until `is_over`; then it never changes any more. `raw_target` is as it came; names
    of headers have any case. `echoed` go back with the answer.

    The methods named on_* are called by the parser.
    """

    __slots__ = (
        *("_is_parsed", "_parser", "headers", "is_kept", "is_old"),
        *("echoed", "is_over", "method", "raw", "raw_target"),
    )

    def __init__(self) -> None:
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.echoed: dict[str, str] = {}
        self.is_over = False
        self.is_kept = False
        self.is_old = False  # HTTP/1.0
        self.method = ""
        self.raw_target = b""
        self._is_parsed = False
        self._parser = HttpRequestParser(self)
        self.raw = b""

    def feed(self, data: bytes) -> bytes:
        """What lies behind the head. InvalidRequest as soon as it cannot become one of HTTP."""
        if not self.raw:
            data = data.lstrip(b"\r\n")  # empty lines before a request mean nothing
        begun = len(self.raw)
        self.raw += data[: HEAD_BYTES + 1 - begun]
        end = self.raw.find(_END, max(0, begun - len(_END))) + len(_END)
        self.is_over = end >= len(_END)
        end = end if self.is_over else len(self.raw)
        self._parse(self.raw[begun:end])
        if end > HEAD_BYTES:
            raise InvalidRequest(f"the head of the request is longer than {HEAD_BYTES} bytes")
        if self.is_over:
            self.raw = self.raw[:end]
            self._check()
            del self._parser  # it has our methods, and only a garbage collection would end both
        return data[end - begun :]

    def _parse(self, piece: bytes) -> None:
        try:
            self._parser.feed_data(piece)
        except HttpParserUpgrade as upgrade:
            # nothing is ever upgraded here; what was asked for is served as it is
            if self.method == "CONNECT" or upgrade.args[0] != len(piece):
                raise InvalidRequest("this is no HTTP request that is served here") from upgrade
        except HttpParserError as error:
            raise InvalidRequest(f"this is no HTTP request: {error}") from error

    def _check(self) -> None:
        line = b"%s %s HTTP/1." % (self.method.encode(), self.raw_target)
        if not self.raw.startswith(line) or not self._is_parsed:
            raise InvalidRequest("this is no HTTP request: only HTTP/1.0 and HTTP/1.1 are served")
        self.is_old = self.raw.startswith(b"0", len(line))
        hosts = len(self.headers.getall("Host", ()))
        if hosts > 1 or not (hosts or self.is_old):
            raise InvalidRequest("this is no HTTP request: it needs one Host")
        self.echoed = echoed_headers(self.headers)

    def framing(self) -> Framing:
        coding = self.headers.getall("Transfer-Encoding", None)
        if coding is None:
            return Sized(int(self.headers.get("Content-Length", 0)))
        if self.is_old or [one.lower() for one in coding] != ["chunked"]:
            raise InvalidRequest("of all transfer codings only chunked is understood")
        return Chunked()

    # -- httptools --------------------------------------------------------------------------

    def on_url(self, piece: bytes) -> None:
        self.raw_target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.add(name.decode(), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        if self._is_parsed:
            raise ValueError("a head that ends early")
        self._is_parsed = True
        self.method = self._parser.get_method().decode()
        self.is_kept = self._parser.should_keep_alive()

    def on_body(self, _: bytes) -> None:
        raise ValueError("a head that ends early")


class Heads:
    """Heads that came before, by their bytes: callers say the same again and again, and to find
    what it means costs a sixth of reading it.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}

    def read(self, head: Head | None, data: bytes) -> tuple[Head, bytes]:
        """Read on in `head`, or begin one; and what lies behind it."""
        if head is None:
            raw = data[: data.find(_END) + len(_END)]
            if (known := self._known.get(raw)) is not None:
                return known, data[len(raw) :]
            head = Head()
        rest = head.feed(data)
        if head.is_over:
            self._keep(head)
        return head, rest

    def _keep(self, head: Head) -> None:
        if len(head.raw) <= _KNOWN_BYTES:
            if len(self._known) == _KNOWN:
                self._known.clear()
            self._known[head.raw] = head
