"""A model that can never be kept on disk costs no other one its place, whatever it is packed as."""

import io
import tarfile

import pytest

from tests.running import wait_until

pytestmark = pytest.mark.triton


def test_too_large_model_unloads_nobody_until_changed(start, store):
    """Its archive is small, so it looks as if it would fit until it has been unpacked twice."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        info = tarfile.TarInfo("1/model.bin")
        info.size = 100 * 2**20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    (store.path / "large.tar.gz").write_bytes(packed.getvalue())
    assert len(packed.getvalue()) < 2**18
    caller = start("--cache-limit=20MiB")
    for number in range(3):
        store.put(f"{number}.tar.gz", number, weights=bytes(4 * 2**20))
        assert caller.invoke(f"{number}.tar.gz") == (number, "miss")
    for _ in range(2):
        status, said = caller.refused("large.tar.gz")
        assert status == 503
        assert said["Message"].count("large.tar.gz") == 1
        assert "or more in all, and cache_limit is 20.0 MiB" in said["Message"]
        for number in range(3):
            caller.invoke(f"{number}.tar.gz")
    for number in range(3):
        assert caller.invoke(f"{number}.tar.gz") == (number, "hit")
    store.put("large.tar.gz", 7)
    wait_until(lambda: caller.call("large.tar.gz").status == 200, 30, "the new version is loaded")
    assert caller.invoke("large.tar.gz") == (7, "hit")
