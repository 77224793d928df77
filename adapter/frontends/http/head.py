"""Reads heads of requests with httptools, and refuses what it lets pass and others may not.

httptools (llhttp) refuses bare LF and CR, NUL, folded lines, two lengths, a sign in a length, a
length beside chunks. It takes, and `read_head` refuses: a line break in the target, other versions
and protocols, two blanks in the first line, a fragment in the target, a second Host or none, too
many fields, a second coding, one besides chunked, CONNECT.
"""

import re
from functools import cached_property

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from multidict import CIMultiDict

END = b"\r\n\r\n"
# As Node.js has it; no more of a head is kept before it is whole.
MAX_HEAD_BYTES = 16 * 2**10
CHUNKED = -1

_MAX_FIELDS = 128
# Of a head, with the first line and the empty one.
MAX_LINES = _MAX_FIELDS + 2
_MAX_LENGTH_DIGITS = 19
_VERSIONS = {b"HTTP/1.1": 1, b"HTTP/1.0": 0}
_HTTP2 = b"PRI * HTTP/2.0"
# The characters of a line; all others are refused, CR and LF within it too.
_TEXT = b"\t " + bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
_ABSOLUTE = re.compile(
    r"https?://(?:[A-Za-z0-9.\-_~%]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(?=[/?]|$)"
)
_MAX_PORT = 65535

Fields = list[tuple[bytes, bytes]]


class MisreadHead(ValueError):
    """A head that is not a request of HTTP/1, or that others might read differently."""


class RequestLine:
    """Collects what httptools reports of one head."""

    __slots__ = ("fields", "target")

    def __init__(self) -> None:
        self.target = b""
        self.fields: Fields = []

    def on_url(self, target: bytes) -> None:
        """Add a piece of the target."""
        self.target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a field."""
        self.fields.append((name, value.strip(b" \t")))


class RawHead:
    """A head that was read: its first line, its fields, and where the body behind it ends."""

    def __init__(self, method: str, target: str, minor_version: int, fields: Fields) -> None:
        self.method = method
        self.target = target
        self.minor_version = minor_version
        self.fields = fields
        self.by_name: dict[bytes, bytes] = {}  # values by names in lower case, the last of each
        self.has_duplicates = False
        for name, value in fields:
            key = name.lower()
            self.has_duplicates = self.has_duplicates or key in self.by_name
            self.by_name[key] = value
        self.length = _read_length(self)  # of the body; CHUNKED if its chunks say where it ends

    @property
    def is_http_1_0(self) -> bool:
        """Whether the client speaks HTTP/1.0, which has no chunks and no 100 Continue."""
        return self.minor_version == 0

    @cached_property
    def wants_close(self) -> bool:
        """Whether the client wants the connection closed behind the answer."""
        tokens = self._list_tokens(b"connection")
        if b"close" in tokens:
            return True
        return self.is_http_1_0 and b"keep-alive" not in tokens

    @cached_property
    def expects_continue(self) -> bool:
        """Whether the client waits for 100 Continue before it sends the body. Other expectations
        are ignored, as nginx does.
        """
        is_asked = b"100-continue" in self._list_tokens(b"expect")
        return is_asked and not self.is_http_1_0 and self.length != 0

    def _list_tokens(self, wanted: bytes) -> set[bytes]:
        """Return the tokens in lower case of all fields of a name, whose values are lists."""
        return {
            token.strip().lower()
            for name, value in self.fields
            if name.lower() == wanted
            for token in value.split(b",")
        }

    @cached_property
    def headers(self) -> CIMultiDict[str]:
        """The fields as text."""
        return CIMultiDict(
            (name.decode(), value.decode("utf-8", "surrogateescape")) for name, value in self.fields
        )


def read_head(raw: bytes) -> RawHead:
    """Read a head, which ends with the only empty line in it. Raises MisreadHead."""
    first = raw[: raw.find(b"\r\n")]
    if first == _HTTP2:
        raise MisreadHead("this is HTTP/2; this listener serves HTTP/1.1, and gRPC has its own")
    collected = RequestLine()
    parser = HttpRequestParser(collected)
    try:
        parser.feed_data(raw)
    except HttpParserUpgrade:
        pass  # the client asks for another protocol, and is answered in this one
    except HttpParserError as error:
        raise _misread(str(error)) from None
    return _check_head(raw, first, parser.get_method(), collected)


def _check_head(raw: bytes, first: bytes, method: bytes, collected: RequestLine) -> RawHead:
    """Return the head. Raise MisreadHead for what httptools lets pass: control characters, too many
    headers, other versions, an odd first line, and other than one Host.
    """
    if method == b"CONNECT":
        raise MisreadHead("CONNECT is not served: this is not a proxy")
    line_count = len(collected.fields) + 2
    if raw.translate(None, _TEXT) != b"\r\n" * line_count:
        raise _misread("a control character or another line break is in its head")
    if line_count > MAX_LINES:
        raise _misread(f"it has more than {_MAX_FIELDS} headers")
    words = first.split(b" ")
    minor_version = _VERSIONS.get(words[-1])
    if minor_version is None:
        raise _misread("only HTTP/1.0 and HTTP/1.1 are served")
    if len(words) != len((method, collected.target, words[-1])):
        raise _misread("its first line is not METHOD TARGET VERSION, one blank between them")
    target = collected.target.decode("ascii")
    _check_target(target)
    head = RawHead(method.decode(), target, minor_version, collected.fields)
    hosts = sum(name.lower() == b"host" for name, _ in collected.fields)
    if hosts > 1 or (not hosts and minor_version):
        raise _misread("it needs one Host")
    return head


def _check_target(target: str) -> None:
    """Raise MisreadHead for a target that is neither a path nor an absolute URL."""
    if target.startswith("/"):
        if "#" in target:
            raise _misread("its target has a fragment")
        return
    match = _ABSOLUTE.match(target)
    is_good = match is not None and "#" not in target and int(match[1] or "0") <= _MAX_PORT
    if not is_good:
        raise _misread(f"its target is {target[:200]}")


def _read_length(head: RawHead) -> int:
    """Return the length of the body, or CHUNKED. Raises MisreadHead for several codings, and for
    one other than chunked.
    """
    codings = [name for name, _ in head.fields if name.lower() == b"transfer-encoding"]
    if len(codings) > 1:  # httptools takes chunked behind a coding that it does not know
        raise _misread("its body has more than one coding")
    coding = head.by_name.get(b"transfer-encoding")
    if coding is not None:
        if coding.lower() != b"chunked" or head.is_http_1_0:
            raise MisreadHead("of all transfer codings only chunked is understood")
        return CHUNKED
    text = head.by_name.get(b"content-length", b"0")
    if len(text) > _MAX_LENGTH_DIGITS:
        raise MisreadHead(f"Content-Length has more than {_MAX_LENGTH_DIGITS} digits")
    return int(text)


def _misread(reason: str) -> MisreadHead:
    """Return the error of a head that is none of HTTP."""
    return MisreadHead(f"this is not an HTTP request: {reason}")
