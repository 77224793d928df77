"""Heads of requests: which are plain, and which have more than one reading."""

import pytest

from adapter.frontends.access import SitePolicy
from adapter.frontends.http.contracts import ContainerContracts
from adapter.frontends.http.head import Heads
from adapter.frontends.http.head_scanner import without_upgrade
from adapter.telemetry.traffic import Traffic
from tests.cases import rows
from tests.fakes.house import House
from tests.frontends.http.listener import ANYWHERE, FAST, head, opened, request

LENGTH = "Content-Length: 2"
V2 = "/v2/models/m/infer"


def heads(host: str = "triton:8000", sites: SitePolicy = ANYWHERE) -> Heads:
    house = House()
    contracts = ContainerContracts(house.control, house.control_state.triton)
    made = Heads(Traffic().served, contracts, default_model=None, max_body_bytes=1000, sites=sites)
    made.host = host
    return made


def test_of_so_many_heads_it_is_kept_what_they_say_and_of_no_long_ones():
    known = heads()
    for number in range(1000):
        raw = head(FAST, f"X: {number}")
        assert known.read(raw) is known.read(raw) is known.known[raw]
        assert len(known.known) <= 256
    known = heads()
    known.read(head(FAST, f"X: {'y' * 3000}"))
    assert not known.known


def test_nothing_is_plain_before_there_is_a_triton_and_that_is_not_kept():
    known, raw = heads(host=""), head(FAST, LENGTH)
    assert known.read(raw).contract is None
    known.host = "triton:8000"
    assert known.read(raw).contract is not None


@rows("name", ["X-A", "traceparent"])
def test_what_has_a_line_that_triton_does_not_read_is_not_plain(name):
    known = heads()
    assert known.read(head(V2, LENGTH, f"{name}: {'a' * 8000}")).contract is not None
    assert known.read(head(V2, LENGTH, f"{name}: {'a' * 8200}")).contract is None


@rows("path", [FAST, V2, "/v2/models/m/versions/12/infer"])
@rows("field", ["Connection: keep-alive", "Connection: Keep-Alive", "X: y"])
def test_an_inference_about_which_nothing_is_special_is_plain(path, field):
    found = heads().read(head(path, LENGTH, field))
    assert found.length == 2
    assert found.contract is not None
    assert found.model_id == "m"


@rows(
    "raw",
    [
        head(FAST),
        head(FAST, "Content-Length: 0"),
        head(FAST, "Content-Length: 1001"),
        head(FAST, LENGTH, "Connection: close"),
        head(FAST, LENGTH, "Connection: keep-alive, x"),
        head(FAST, LENGTH, "Expect: 100-continue"),
        head(FAST, LENGTH, "Content-Encoding: gzip"),
        head(FAST, LENGTH, "Content-Encoding: identity"),
        head(FAST, LENGTH, "TE: trailers"),
        head(FAST, LENGTH, method="PUT"),
        head("/models/%6d/invoke", LENGTH),
        head(FAST + "/", LENGTH),
        head(FAST + "?a=b", LENGTH),
        head("/models//invoke", LENGTH),
        head(f"/models/{'m' * 1025}/invoke", LENGTH),
        head("/v2/models/m/versions/x/infer", LENGTH),
        head("/v2/models/infer", LENGTH),
        head("/v2/models/m/generate", LENGTH),
        head("/v2/models/m/generate_stream", LENGTH),
        head("/v2/models/m/ready", LENGTH),
        head("/invocations", LENGTH),
        head(V2, LENGTH, "Inference-Header-Content-Length: x"),
        head(FAST, LENGTH, "Content-Type: application/vnd.sagemaker-triton.binary+json"),
        b"POST /models/m/invoke HTTP/1.1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_what_is_special_is_not_plain_but_its_end_is_known(raw):
    found = heads().read(raw)
    assert found.contract is None
    assert found.length >= 0


@rows(
    "raw",
    [
        head(FAST, "Transfer-Encoding: chunked"),
        head(FAST, LENGTH, LENGTH),
        head(FAST, "Content-Length: 2, 2"),
        head(FAST, "Content-Length: +2"),
        head(FAST, "Content-Length: 1234567890123456"),
        head(FAST, LENGTH, "Host: y"),
        head(FAST, LENGTH, "Content-Type: a", "Content-Type: b"),
        head(FAST, LENGTH, "Upgrade: h2c", "Connection: upgrade"),
        head(FAST, LENGTH, version="1.0"),
        head(f"http://localhost{FAST}", LENGTH),
        head(FAST, LENGTH, method="CONNECT"),
        head(FAST, LENGTH, "X : y"),
        head(FAST, LENGTH, ": y"),
        head(FAST, LENGTH, "X y: z"),
        head(FAST, LENGTH, "X"),
        head(FAST, LENGTH, "X: a\r\n b"),
        head(FAST, LENGTH, "X: a\nContent-Length: 3"),
        head(FAST, LENGTH, "X: a\rb"),
        head(FAST, LENGTH, "X: a\0b"),
        head(FAST, LENGTH, "X: \x7f"),
        head(FAST, LENGTH, "Content-Length : 2"),
        head(FAST, f"Content-Length: {'0' * 29}2"),
        head(FAST, LENGTH, *(f"X-{number}: y" for number in range(127))),
        head(FAST, LENGTH, version="2.0"),
        head(FAST, LENGTH).replace(b"POST ", b"POST  "),
        b"\r\n\r\n",
        b"nothing\r\n\r\n",
    ],
)
def test_where_two_may_read_differently_aiohttp_is_to_tell_the_end(raw):
    assert heads().read(raw).length < 0


@rows(
    "fields",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk"),
        ("connection: upgrade", "upgrade: websocket"),
        ("Connection: HTTP2-Settings ,\tUpgrade ", "HTTP2-Settings:"),
    ],
)
def test_a_head_that_asks_for_another_protocol_is_read_without_that(fields):
    assert without_upgrade(head(V2, *fields, LENGTH)) == head(V2, LENGTH)


@rows(
    "field",
    [
        "Connection: close, X-Upgrade",
        "Connection: Upgrades",
        "Connection: upgrade\r\n , close",
        "Upgrade: h2c\r\n\tContent-Length: 3",
        "X: a\nUpgrade: h2c",
        "Upgrade : h2c",
        "Upgrade: \0",
        "X-Upgrade: h2c",
    ],
)
def test_what_may_be_read_in_two_ways_or_is_another_field_stays_in_the_head(field):
    assert without_upgrade(head(V2, LENGTH, field)) == head(V2, LENGTH, field)


ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"


@pytest.mark.parametrize(
    ("path", "fields", "onward"),
    [
        (FAST, ("Accept-Encoding: gzip", "Cookie: a", "traceparent: 0"), b"Accept-Encoding: gzip"),
        (FAST, (f"{ATTRIBUTES}: a=b", "Cookie: a"), f"{ATTRIBUTES}: a=b".encode()),
        (V2, ("X-A: 1", "Content-Type: text/html", "Connection: keep-alive"), b"X-A: 1"),
    ],
)
def test_triton_is_told_what_aiohttp_would_have_it_told(path, fields, onward):
    lines = heads().read(head(path, LENGTH, *fields)).upstream_head.split(b"\r\n")
    assert lines[:3] == [b"POST /v2/models/m/infer HTTP/1.1", b"Host: triton:8000", onward]
    assert lines[3:5] == [b"Content-Type: application/json", b"Content-Length: 2"]
    assert lines[5:] in ([b"", b""], [b"traceparent: 0", b"", b""])


TRACE, KEY = b"traceparent: 00-%d-01", b"Authorization: %d"


@pytest.mark.parametrize(
    ("path", "line", "told"),
    [
        (FAST, TRACE, [TRACE]),
        (FAST, KEY, []),
        (V2, TRACE, [TRACE]),
        (V2, KEY, []),
    ],
)
def test_lines_that_differ_in_each_request_are_each_told_with_their_own(path, line, told):
    known = heads()
    first, second = (known.read(head(path, LENGTH, (line % i).decode())) for i in (1, 2))
    same = known.read(head(path, LENGTH))
    assert first.contract is second.contract is same.contract is not None
    for number, found in ((1, first), (2, second)):
        lines = b"".join(b"%b\r\n" % (one % number) for one in told)
        assert found.upstream_head == same.upstream_head.removesuffix(b"\r\n") + lines + b"\r\n"


def test_a_trace_that_is_told_twice_is_not_plain():
    assert heads().read(head(FAST, LENGTH, "traceparent: 0", "Traceparent: 1")).length < 0


async def test_one_head_with_many_bodies_asks_for_each_of_them():
    async with opened() as listener:
        caller = await listener.connect()
        bodies = [b"[%d]" % number for number in range(10, 30)]
        for body in bodies:
            assert (await caller.ask(request(FAST, body))).status == 200
        assert [asked.body for asked in listener.upstream.requests] == bodies
