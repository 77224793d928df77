"""Serves empty buckets, as S3 does: `python -m tests.nightly.empty_bucket` prints its port.

moto's server would take most of an hour for what this one answers in minutes.
"""

import asyncio
import re
import sys

_REQUEST = re.compile(rb"(GET|HEAD) ([^ ]*) HTTP/1\.1\r\n(?:[^\r\n]+\r\n)*\r\n")
_LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<Name>models</Name><KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys>"
    b"<IsTruncated>false</IsTruncated></ListBucketResult>"
)


class _EmptyBucket(asyncio.Protocol):
    """Answers the requests of one connection."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while match := _REQUEST.match(self._received):
            self._received = self._received[match.end() :]
            self._transport.write(_answer(is_listing=b"list-type=2" in match[2]))


def _answer(*, is_listing: bool) -> bytes:
    if not is_listing:
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n"
    return head % len(_LISTING) + _LISTING


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_EmptyBucket, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
