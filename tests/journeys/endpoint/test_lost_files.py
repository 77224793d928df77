"""The real command and a real Triton, while somebody deletes files from the disk cache."""

import shutil
from pathlib import Path

import pytest

from adapter.core.calls import NOT_STARTED
from adapter.store.cache_folder import CacheFolder

pytestmark = pytest.mark.triton


def empty(cache_dir: Path) -> None:
    for each in cache_dir.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def test_evicted_model_with_deleted_files_is_fetched(start, store, tmp_path):
    store.put_all("a.tar.gz", "b.tar.gz")
    caller = start("--memory-source=off", "--memory-limit=150MiB")
    assert caller.invoke("a.tar.gz") == (0, "miss")
    (file,) = (tmp_path / "cache" / "artifacts").glob("*/files/*/1/model.py")
    assert caller.invoke("b.tar.gz") == (1, "miss")
    file.unlink()
    assert caller.invoke("a.tar.gz") == (0, "miss")
    caller.adapter.wait_for("artifact.lost")
    assert [line["key"] for line in caller.adapter.events("artifact.lost")] == ["a.tar.gz"]


def test_preloaded_models_return_without_their_files(start, store, tmp_path):
    """After the end of Triton."""
    store.put_all("a.tar.gz", "b.tar.gz")
    caller = start("--preload=a.tar.gz")
    caller.wait_ready()
    assert caller.invoke("b.tar.gz") == (1, "miss")
    empty(tmp_path / "cache")
    caller.end_triton()
    caller.adapter.wait_for("artifact.lost", key="a.tar.gz")
    caller.wait_ready()
    assert caller.invoke("a.tar.gz")[0] == 0
    assert caller.invoke("b.tar.gz") == (1, "miss")


def test_taken_cache_sends_calls_to_other_machines(start, store, tmp_path):
    store.put_all("a.tar.gz", "b.tar.gz")
    caller = start()
    caller.invoke("a.tar.gz")
    empty(tmp_path / "cache")
    other = CacheFolder(tmp_path / "cache")
    other.open()
    caller.adapter.wait_for("artifact.cache_lost")
    ready = caller.admin.get("/readyz")
    assert (ready.status, len(ready.json()["notes"])) == (200, 1)
    assert "is in use by another triton-adapter" in ready.json()["notes"][0]
    assert caller.invoke("a.tar.gz") == (0, "hit")
    refused = caller.call("b.tar.gz")
    assert (refused.status, refused.headers[NOT_STARTED]) == (503, "1")
    assert str(tmp_path) not in refused.body.decode()
    other.close()
    assert caller.invoke("b.tar.gz") == (1, "miss")
