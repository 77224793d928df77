"""What is no HTTP at all."""

import json
import socket
from http.client import HTTPResponse

import pytest

from tests.running import Client, RunningAdapter

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    "junk",
    [
        b"junk\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nlong: " + b"x" * 20_000 + b"\r\n\r\n",
        b"POST /models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /models HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /models HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
    ],
    ids=[
        "words",
        "long header",
        "chunk size",
        "negative length",
        "two lengths",
        "length and chunks",
        "unknown coding",
        "TLS",
    ],
)
def test_malformed_http_gets_the_same_json_as_any_other_bad_request(
    adapter: RunningAdapter, client: Client, junk: bytes
) -> None:
    host, port = adapter.http.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(junk)
        reply = HTTPResponse(connection)
        reply.begin()
        body = json.loads(reply.read())
        assert connection.recv(1) == b"", "what follows must not be taken for another request"

    assert (reply.status, reply.headers["Content-Type"]) == (400, "application/json")
    assert body["code"] == "InvalidRequest"
    assert client.get("/ping").status == 200
