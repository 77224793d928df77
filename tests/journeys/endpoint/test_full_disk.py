"""A cache on a disk without room for any model: the machine says so, and leaves calls to others."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.journeys.endpoint.folder_store import Caller
from tests.journeys.endpoint.test_not_started import check_not_started, invoke
from tests.little_disk import adapter_with_little, resize
from tests.running import COMPLETE

pytestmark = pytest.mark.triton

LACK = "the disk of cache_dir has 700.0 MiB free, and 1.0 GiB are kept for others"


@pytest.fixture
def cache(tmp_path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def caller(store, cache) -> Iterator[Caller]:
    store.put("a.tar.gz", 1, weights=bytes(2**20))
    flags = (f"--model-store={store.path}", f"--cache-dir={cache}", "--on-demand", COMPLETE)
    with (
        adapter_with_little(str(cache), "700m", *flags) as adapter,
        closing(Caller(adapter)) as made,
    ):
        yield made


def test_full_disk_leaves_calls_to_other_machines(caller, cache):
    """The machine is not ready."""
    adapter = caller.adapter
    assert caller.http.get("/ping").status == 503
    unready = caller.admin.get("/readyz")
    assert (unready.status, LACK in unready.json()["reason"]) == (503, True)
    health = caller.admin.get("/debug/state").json()["health"]
    assert (LACK in health["reasons"][0], health["notes"]) == (True, [])
    assert LACK in adapter.wait_for("artifact.disk_full", level="warning")["reason"]

    check_not_started(caller, "a.tar.gz", "NoRoom", "RESOURCE_EXHAUSTED")
    message = invoke(caller, "a.tar.gz").json()["Message"]
    assert "a.tar.gz" in message
    assert f"or more in all, and {LACK}" in message
    assert "free some, or set cache_dir to another disk; see docs/stores.md#the-disk" in message

    worst = caller.admin.get("/debug/state").json()["worst"]
    assert (worst["code"], worst["model_id"]) == ("NoRoom", "a.tar.gz")

    resize(adapter, str(cache), "2g")
    caller.wait_ready()
    assert caller.admin.get("/debug/state").json()["worst"] is None
    assert caller.invoke("a.tar.gz") == (1, "miss")
