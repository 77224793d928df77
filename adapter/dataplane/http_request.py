"""A request on its way to Triton. Its frame is ours: no caller says where the next one begins."""

from collections.abc import AsyncIterator

from adapter.core.infer import V2Call
from adapter.dataplane.http1 import Connection
from adapter.errors import InvalidRequest

_LENGTH = "Content-Length"
_OURS = frozenset({"host", "content-length", "transfer-encoding", "content-type"})

# Triton 2.51 reads no media type but one: a form of more than 4 MB, curl's default, ends it.
_JSON, _BINARY = "Content-Type: application/json", "Content-Type: application/octet-stream"
_HEADER_LENGTH = "inference-header-content-length"

# On uvloop writes are gathered, elsewhere one write is one packet: small bodies go with the head.
_JOINED_BYTES = 2**14


def head_of(call: V2Call, host: str) -> bytes:
    """The request line and headers, with the empty line. No caller says what kind of body it is."""
    lines = [f"{call.method} /v2{call.path} HTTP/1.1", f"Host: {host}"]
    lines += [
        f"{name}: {value}" for name, value in call.headers.items() if name.lower() not in _OURS
    ]
    if call.method == "POST":
        is_binary = any(name.lower() == _HEADER_LENGTH for name in call.headers)
        lines.append(_BINARY if is_binary else _JSON)
    if isinstance(call.body, bytes):
        lines.append(f"{_LENGTH}: {len(call.body)}")
    elif call.body is None:
        if call.method == "POST":
            lines.append(f"{_LENGTH}: 0")
    elif _LENGTH in call.headers:
        lines.append(f"{_LENGTH}: {call.headers[_LENGTH]}")
    else:
        lines.append("Transfer-Encoding: chunked")
    head = "\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count("\n") != breaks or head.count("\r") != breaks or "\0" in head:
        raise InvalidRequest("a header has a line break or a null byte in it")
    return f"{head}\r\n\r\n".encode("utf-8", "surrogateescape")


def write_whole(connection: Connection, head: bytes, body: bytes) -> None:
    if len(body) <= _JOINED_BYTES:
        connection.transport.write(head + body)
    else:
        connection.transport.writelines((head, body))
    connection.is_sent = True


async def write_stream(
    connection: Connection, head: bytes, body: AsyncIterator[bytes], length: int | None
) -> None:
    """`length` None: in chunks. Stops early when the answer is there, or the connection lost."""
    connection.transport.write(head)
    left = length
    async for piece in body:
        if left is not None:
            left -= len(piece)
            _check(is_right=left >= 0, length=length)
            connection.transport.write(piece)
        elif piece:  # one without bytes would say that this is the end
            connection.transport.writelines((b"%x\r\n" % len(piece), piece, b"\r\n"))
        await connection.drained()
        if connection.is_over or connection.is_lost:
            return
    _check(is_right=not left, length=length)
    if length is None:
        connection.transport.write(b"0\r\n\r\n")
    connection.is_sent = True


def _check(*, is_right: bool, length: int | None) -> None:
    if not is_right:
        raise InvalidRequest(f"the body does not have the {length} bytes that were declared")
