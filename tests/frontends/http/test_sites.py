"""What pages of other sites make a browser send is refused, on both paths and at any method."""

import pytest

from adapter.frontends.access import SitePolicy
from adapter.settings import parse_address
from tests.cases import case
from tests.frontends.http.listener import (
    ANYWHERE,
    HANDLED,
    PLANNED,
    both,
    head,
    opened,
    request,
)
from tests.frontends.http.test_heads import heads, plan_of

LOOPBACK = SitePolicy(parse_address("127.0.0.1:8080"), ["models.example", "Other.Example"])
LENGTH = "Content-Length: 2"


def sent(path: str, *fields: str, host: str = "localhost", method: str = "POST") -> bytes:
    raw = request(path, b"{}", *fields).replace(b"localhost", host.encode(), 1)
    return raw.replace(b"POST", method.encode(), 1)


async def statuses(sites: SitePolicy, *requests: bytes) -> list[int]:
    async with opened(sites=sites) as listener:
        caller = await listener.connect()
        return [(await caller.ask(raw)).status for raw in requests]


ELSEWHERE = (
    "Origin: https://evil.example",
    "Origin: null",
    "Origin: ",
    "Origin: localhost",
    "Origin: http://localhost.evil.example",
    "Origin: http://10.0.0.1:8080",
    "origin: https://evil.example",
)


@both
@pytest.mark.parametrize("sites", [ANYWHERE, LOOPBACK], ids=["anywhere", "loopback"])
async def test_cross_site_requests_are_forbidden(path, sites):
    async with opened(sites=sites) as listener:
        for field in ELSEWHERE:
            with case(field):
                caller = await listener.connect()
                assert (await caller.ask(sent(path, field))).refusal == (403, "Forbidden")
                assert not listener.bodies
                assert not listener.upstream.requests


OURS = (
    ("Origin: http://localhost",),
    ("Origin: HTTPS://LOCALHOST:443",),
    ("Origin: http://127.0.0.1:3000", "Sec-Fetch-Site: cross-site"),
    ("Origin: http://[::1]:8080",),
    ("Origin: https://models.example:8443",),
    ("Sec-Fetch-Site: none",),
)


@both
async def test_own_or_no_page_is_served(path):
    found = await statuses(LOOPBACK, *(sent(path, *fields) for fields in OURS))
    assert dict(zip(OURS, found, strict=True)) == dict.fromkeys(OURS, 200)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_foreign_origin_is_refused_at_any_method(method):
    raw = sent(HANDLED, "Origin: https://evil.example", method=method)
    async with opened(sites=ANYWHERE) as listener:
        caller = await listener.connect()
        await caller.send(raw)
        assert (await caller.head()).status == 403


OWN = (
    "localhost",
    "LOCALHOST:8080",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1",
    "127.9.9.9:80",
    "[::1]:8080",
    "[::1]",
    "models.example",
    "models.example:8080",
    "other.example",
)


@both
async def test_on_loopback_its_own_names_are_known(path):
    found = await statuses(LOOPBACK, *(sent(path, host=host) for host in OWN))
    assert dict(zip(OWN, found, strict=True)) == dict.fromkeys(OWN, 200)


OTHERS = (
    "evil.example",
    "evil.example:8080",
    "xlocalhost",
    "localhost.evil.example",
    "10.0.0.1",
    "",
    ":8080",
)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_foreign_host_on_loopback_is_forbidden(method):
    for host in OTHERS:
        with case(host):
            raw = sent(HANDLED, host=host, method=method)
            assert await statuses(LOOPBACK, raw, sent(PLANNED, host=host)) == [403, 403]
    assert await statuses(ANYWHERE, sent(HANDLED, host=OTHERS[0], method=method)) == [200]


@both
async def test_http_1_0_needs_no_host_on_loopback(path):
    """Serve what simple health checks send, and no browser."""
    raw = request(path, b"{}", version="1.0").replace(b"Host: localhost\r\n", b"")
    assert await statuses(LOOPBACK, raw) == [200]


@pytest.mark.parametrize("address", ["127.0.0.1:80", "127.0.0.5:80", "[::1]:80", "localhost:80"])
def test_loopback_has_these_addresses(address):
    policy = SitePolicy(parse_address(address), ())
    assert not policy.knows_host("evil.example")
    assert policy.knows_host("localhost:80")


def test_only_a_known_host_is_planned():
    known = heads(sites=LOOPBACK)
    raw = head(PLANNED, LENGTH)
    assert plan_of(raw, known) is not None
    assert plan_of(raw.replace(b"localhost", b"evil.example"), known) is None
