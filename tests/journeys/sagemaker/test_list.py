"""GET /models and its pages."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.asking import quoted, refusal
from tests.cases import rows
from tests.running import EXAMPLES, Client, Reply, unload_all

pytestmark = pytest.mark.triton

_NAMES = ["zeta", "Alpha", "mid/dle", "été", "10"]
_SORTED = ["10", "Alpha", "mid/dle", "zeta", "été"]


@pytest.fixture(scope="module")
def listing(shared_adapter) -> Iterator[Client]:
    """Five models, loaded in no order."""

    def load(name: str) -> int:
        with shared_adapter.client() as loader:
            return loader.load(name, EXAMPLES / "identity").status

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(load, _NAMES)) == [200] * 5
    with shared_adapter.client() as client:
        yield client
        unload_all(shared_adapter)


def names(reply: Reply) -> list[str]:
    assert reply.status == 200
    return [model["modelName"] for model in reply.json()["models"]]


def pages(client: Client, limit: int) -> list[list[str]]:
    """Followed as SageMaker does: until no token comes back."""
    found, query = [], ""
    while True:
        reply = client.get(f"/models?limit={limit}{query}")
        found.append(names(reply))
        if (token := reply.json().get("nextPageToken")) is None:
            return found
        query = f"&next_page_token={quoted(token)}"
        assert len(found) <= len(_NAMES)


@rows("query", ["", "?next_page_token="])
def test_list_is_sorted_and_whole_by_default(listing, query):
    reply = listing.get(f"/models{query}")

    assert names(reply) == _SORTED
    assert reply.json().keys() == {"models"}
    assert reply.json()["models"][0] == {"modelName": "10", "modelUrl": str(EXAMPLES / "identity")}


@rows("limit", [1, 2, 3, 4, 5, 6, 1000])
def test_pages_hold_each_model_once(listing, limit):
    found = pages(listing, limit)

    assert [name for page in found for name in page] == _SORTED
    assert len(found) == -(-len(_SORTED) // limit)
    assert all(found)


_TOKENS = ["!", "abc", "a", "1", "%FF", base64.b64encode(b"\xff\xfe").decode(), "a%20b=="]
_LIMITS = [
    *("0", "-1", "1001", "1.5", "abc", "", "1e2", "%C2%B2", "%D9%A3", "9" * 30, "9" * 5000),
]


@rows(
    "query",
    [
        *(f"limit={limit}" for limit in _LIMITS),
        *(f"next_page_token={token}" for token in _TOKENS),
        "a=b&" * 101,
    ],
)
def test_a_query_that_cannot_be_meant_is_refused(listing, query):
    assert refusal(listing.get(f"/models?{query}")) == (400, "InvalidRequest", None)


# keep it last: it unloads
def test_z_token_stays_good_when_its_model_goes(listing):
    token = listing.get("/models?limit=2").json()["nextPageToken"]
    listing.unload_model(_SORTED[1])

    assert names(listing.get(f"/models?next_page_token={token}")) == _SORTED[2:]
