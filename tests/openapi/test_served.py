"""The listeners serve the document of docs/openapi.yaml, and answer methods as it has them."""

from contextlib import closing

import pytest

from tests.openapi.document import DOCUMENT, operations
from tests.running import Client, RunningAdapter

pytestmark = pytest.mark.triton

METHODS = ("GET", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE")
# Where a name is needed: one that no model has will do, as methods are looked at first.
NAMES = {"NAME": "nobody", "VERSION": "1", "REGION": "r", "ENDPOINT": "e"}


def methods_by_path(*, is_admin: bool) -> dict[str, set[str]]:
    """Those of the document, but for the endpoint: it has AWS's 404 for what it does not know."""
    found: dict[str, set[str]] = {}
    for each in operations(DOCUMENT):
        if each.tag != "endpoint" and (each.tag == "admin") is is_admin:
            found.setdefault(each.path.format(**NAMES), set()).add(each.method)
    return found


@pytest.mark.parametrize("listener", ["http", "admin"])
def test_the_document_is_served(opened: RunningAdapter, listener):
    with closing(Client(opened.listeners[listener])) as client:
        reply = client.get("/openapi.json")
        head = client.request("HEAD", "/openapi.json")

    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json")
    assert reply.json() == DOCUMENT
    assert (head.status, head.body) == (200, b"")


@pytest.mark.parametrize(("listener", "is_admin"), [("http", False), ("admin", True)])
def test_other_methods_are_405_with_allow(opened: RunningAdapter, listener, is_admin):
    with closing(Client(opened.listeners[listener])) as client:
        for path, methods in methods_by_path(is_admin=is_admin).items():
            served = {"HEAD"} if "GET" in methods else set()
            for method in sorted(set(METHODS) - methods):
                reply = client.request(method, path)
                assert reply.status == 405, (method, path)
                assert set(reply.headers["Allow"].split(", ")) == methods | served, path
