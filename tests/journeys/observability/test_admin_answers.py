"""The admin listener: errors are JSON, and pages of other sites are refused as at `http`."""

import gzip
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.cases import rows
from tests.constants import ADMIN_BODY
from tests.running import COMPLETE, Client, embedded_adapter

pytestmark = pytest.mark.triton

ELSEWHERE = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}


@pytest.fixture
def admin(shared_adapter) -> Iterator[Client]:
    with Client(shared_adapter.admin) as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/nothing", 404, "unknown path '/nothing'"),
        ("POST", "/no/thing", 404, "unknown path '/no/thing'"),
        ("POST", "/livez", 405, "POST is not allowed here; allowed: GET, HEAD"),
        ("GET", "/drain", 405, "GET is not allowed here; allowed: POST"),
    ],
)
def test_what_is_not_there_is_answered_in_json(admin, method, path, status, words):
    reply = admin.request(method, path)
    assert (reply.status, reply.json()) == (status, {"error": words})
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.headers["Allow"] == (words.partition("allowed: ")[2] or None)


def test_drain_refuses_a_timeout_that_is_none(admin):
    assert admin.post("/drain?timeout=soon").status == 400
    assert admin.get("/readyz").status == 200


@pytest.mark.parametrize("headers", [ELSEWHERE, {"Host": "evil.example"}])
def test_cross_site_page_cannot_end_the_work(shared_adapter, admin, headers):
    reply = admin.request("POST", "/drain?timeout=0.1", headers=headers)
    assert (reply.status, list(reply.json())) == (403, ["error"])
    assert admin.get("/readyz").status == 200


def test_a_page_whose_name_points_here_reads_nothing(admin):
    assert admin.get("/debug/state", Host="evil.example").status == 403


@rows("path", ["/livez", "/readyz", "/debug/state", "/debug/config", "/nothing"])
def test_json_ends_its_line(admin, path):
    """No answer says what it was made with."""
    reply = admin.get(path)
    assert reply.body.endswith(b"}\n")
    assert reply.headers["Server"] is None


def test_caller_leaving_before_the_state_is_no_error(shared_adapter, admin):
    seen = len(shared_adapter.lines)
    host, _, port = shared_adapter.admin.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.sendall(b"GET /debug/state HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert admin.get("/debug/state").status == 200
    assert [line for line in shared_adapter.lines[seen:] if line["level"] == "error"] == []


SECOND = b"POST /drain HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = "Connection: upgrade\r\nUpgrade: h2c\r\n"
AMBIGUOUS = {
    "CONNECT": f"CONNECT /livez HTTP/1.1\r\nContent-Length: {len(SECOND)}\r\n",
    "CONNECT of another host": f"CONNECT x:80 HTTP/1.1\r\nContent-Length: {len(SECOND)}\r\n",
    "CONNECT in chunks": "CONNECT /livez HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
    "CONNECT without a length": "CONNECT /livez HTTP/1.1\r\n",
    "an upgrade of GET": f"GET /livez HTTP/1.1\r\n{UPGRADE}Content-Length: {len(SECOND)}\r\n",
    "an upgrade of POST": f"POST /drain HTTP/1.1\r\n{UPGRADE}Content-Length: {len(SECOND)}\r\n",
    "an upgrade in chunks": f"POST /drain HTTP/1.1\r\n{UPGRADE}Transfer-Encoding: chunked\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_admin_refuses_body_that_hides_a_request(shared_adapter, name):
    """The server, aiohttp, ends CONNECT at its head, and before 3.14.3 also an upgrade. A proxy
    that reads a body there would let another request through.
    """
    body = SECOND
    if "chunks" in name:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(SECOND), SECOND)
    head = f"{AMBIGUOUS[name]}Host: localhost\r\n\r\n".encode()
    received = sent_to(shared_adapter.admin, head + body)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"\r\nConnection: close\r\n" in received


@pytest.mark.parametrize("digits", [6, 5000])
@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("/store/models?limit=", "a number from 1 to 1000 is accepted"),
        ("/debug/state?models=", "a number up to 100000 is accepted"),
    ],
)
def test_limit_of_a_list_may_have_many_digits(admin, page, words, digits):
    """Python refuses to read a number of more than 4,300 digits."""
    reply = admin.get(page + "9" * digits)
    assert reply.status == 400
    assert words in reply.error


@rows("body", [gzip.compress(b"{}"), gzip.compress(b"{}")[:-9], b"junk"])
@rows("coding", ["gzip", "deflate", "br", "zstd"])
def test_trial_refuses_a_compressed_body(shared_adapter, coding, body):
    """The server, aiohttp, takes a body that is cut for a whole one, and fails on other faults."""
    head = "POST /infer?model_id=any HTTP/1.1\r\nHost: localhost\r\n"
    fields = f"Content-Encoding: {coding}\r\nContent-Length: {len(body)}\r\n\r\n"
    received = sent_to(shared_adapter.admin, f"{head}{fields}".encode() + body)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert b"Content-Encoding is not accepted" in received


TRIAL = b"POST /infer?model_id=any HTTP/1.1\r\nHost: localhost\r\n"


def test_caller_leaving_during_body_is_no_error(shared_adapter, admin):
    seen = len(shared_adapter.lines)
    host, _, port = shared_adapter.admin.rpartition(":")
    for _ in range(20):
        with socket.create_connection((host, int(port))) as caller:
            caller.sendall(TRIAL + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
            assert caller.recv(100).startswith(b"HTTP/1.1 100 ")
            caller.sendall(b"{")
    assert admin.get("/debug/state").status == 200
    assert [line for line in shared_adapter.lines[seen:] if line["level"] == "error"] == []


def test_trial_does_not_wait_long_for_a_body():
    """Nor for the rest of one whose chunks cannot be read, which aiohttp does not report."""
    with embedded_adapter(COMPLETE, constants={ADMIN_BODY: 0.5}) as adapter:
        for rest in (b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1"):
            host, _, port = adapter.admin.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as caller:
                caller.sendall(TRIAL + rest)
                received = caller.recv(2**16)
            assert received.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("expectation", [b"200-ok", b"\x80"])
def test_unknown_expectations_are_ignored(shared_adapter, expectation):
    """The other listeners ignore them too. aiohttp fails on bytes that are no UTF-8."""
    fields = b"Host: localhost\r\nConnection: close\r\nExpect: %b\r\n\r\n" % expectation
    received = sent_to(shared_adapter.admin, b"GET /livez HTTP/1.1\r\n" + fields)
    assert received.startswith(b"HTTP/1.1 200 ")


def test_body_is_asked_for_where_a_caller_waits(shared_adapter):
    fields = b"Host: localhost\r\nConnection: close\r\nExpect: 100-Continue\r\n\r\n"
    received = sent_to(shared_adapter.admin, b"GET /livez HTTP/1.1\r\n" + fields)
    assert received.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 ")


def test_upgrade_without_body_is_answered_plainly(admin):
    """Java's HttpClient offers h2c with its first request."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": ""}
    for headers in (offer, {**offer, "Content-Length": "0"}):
        assert admin.get("/livez", **headers).status == 200


def sent_to(address: str, raw: bytes) -> bytes:
    """Send these bytes and return all that comes until the server closes the connection."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(raw)
        received = b""
        while data := connection.recv(2**16):
            received += data
        return received
