"""Reads the head of a request, strictly: what two parsers might read differently is not read here.

Nothing is remembered from head to head. RFC 9112 allows more: another method, a line that goes on,
a bare line feed, a field that comes twice. aiohttp judges such a head.
"""

import re

END = b"\r\n\r\n"

# As many fields as aiohttp takes, and as many digits of a length.
_MOST_FIELDS, _MOST_DIGITS = 128, 15
_METHODS = frozenset({b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"})
# What lines are of.
_TEXT = b"\t " + bytes(range(0x21, 0x7F)) + bytes(range(0x80, 0x100))
_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"  # in lower case

# Names as most clients spell them, which need no look at their characters.
_USUAL = {
    spelled.encode(): name.encode()
    for name in (
        *("host", "user-agent", "accept", "accept-encoding", "connection", "content-length"),
        *("content-type", "traceparent", "tracestate", "authorization", "x-request-id"),
        *("inference-header-content-length", "x-amz-date", "x-amzn-trace-id", "x-forwarded-for"),
    )
    for spelled in (name, name.title())
}

# How a client asks for HTTP/2 or WebSocket. Each is one line of printable characters, so that the
# head is read the same without it.
_ASKED = rb"(?:upgrade|http2-settings)"
_UPGRADE = re.compile(
    rb"\r\n(?:%b:[\t\x20-\x7e]*|connection:[\t ]*%b(?:[\t ]*,[\t ]*%b)*[\t ]*)(?=\r\n[^\t ])"
    % (_ASKED, _ASKED, _ASKED),
    re.IGNORECASE,
)


class Scanned:
    """A head: `fields` are its values by their names in lower case; `lines` are as they came, the
    first and two empty ones included. `length` is that of the body.
    """

    method: bytes
    target: bytes
    fields: dict[bytes, bytes]
    lines: list[bytes]
    length: int


def without_upgrade(raw: bytes) -> bytes:
    """Return a head that asks for no other protocol: a server may ignore it (RFC 9110 section 7.8).

    Java's HttpClient asks with each request.
    """
    return _UPGRADE.sub(b"", raw)


def scan(raw: bytes) -> Scanned | None:
    """Read a head, which ends with the only empty line in it; None unless it has one reading."""
    lines = raw.split(b"\r\n")
    count = len(lines) - 1
    # no control character, and no CR or LF alone
    if count > _MOST_FIELDS + 2 or raw.translate(None, _TEXT) != b"\r\n" * count:
        return None
    method, _, rest = lines[0].partition(b" ")
    target, _, version = rest.partition(b" ")
    if version != b"HTTP/1.1" or method not in _METHODS:
        return None
    if target[:1] != b"/" or b"\t" in target or not target.isascii():
        return None
    fields: dict[bytes, bytes] = {}
    for line in lines[1:-2]:
        name, colon, value = line.partition(b":")
        key = _USUAL.get(name) or _in_lower_case(name)
        if not colon or not key or key in fields:
            return None
        fields[key] = value.strip(b" \t")
    length = fields.get(b"content-length", b"0")
    if b"transfer-encoding" in fields or b"upgrade" in fields:
        return None
    if len(length) > _MOST_DIGITS or not length.isdigit():
        return None
    head = Scanned()
    head.method, head.target, head.fields, head.lines = method, target, fields, lines
    head.length = int(length)
    return head


def names_of(head: Scanned) -> list[bytes]:
    """Return the names of its fields as they were sent."""
    return [line[: len(key)] for key, line in zip(head.fields, head.lines[1:-2], strict=True)]


def _in_lower_case(name: bytes) -> bytes:
    """Return a name of a field; b"" for what is none."""
    key = name.lower()
    if key.replace(b"-", b"").isalnum():  # a tenth of what translate takes
        return key
    return b"" if key.translate(None, _TOKEN) else key
