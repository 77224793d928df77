"""predictModelSize and modelSize."""

import asyncio
import json
import threading
import time

import pytest

from adapter.errors import (
    ModelNotFound,
)
from adapter.frontends.grpc import modelmesh_sizes
from adapter.packages.config.footprint import quick_size
from adapter.runtime.threads import LOOKUPS
from tests.frontends.grpc.modelmesh.front import (
    Front,
)
from tests.trees import CONFIG


class TestSizes:
    async def test_learned_beats_the_key(self, house, front):
        house.sizes["m"] = 77
        await front.load("m")
        assert await front.predict("/m", '{"disk_size_bytes": 10000000}') == 77

    async def test_what_was_learned_is_known_by_the_id_where_the_path_is_another(
        self, house, front
    ):
        """A puller asks with the path in the bucket, and loads from a local one."""
        house.sizes["m"] = 77
        await front.load("m", "/models/m/files")
        await front.unload("m")
        assert await front.predict("bucket/files", model_id="m") == 77
        assert await front.predict("bucket/files", model_id="other") == 1_000_000

    async def test_what_was_declared_is_known_by_the_id_too(self, house, front):
        house.memory.limit_bytes = None
        house.packages.declared["/models/m/files"] = 7_000_000
        await front.load("m", "/models/m/files")
        assert await front.predict("bucket/files", model_id="m") == 7_000_000

    @pytest.mark.parametrize(
        ("said", "declared"), [("64MiB", 64 * 2**20), ("64KiB", 2**16), ("much", None)]
    )
    def test_what_configs_declare_is_seen_before_the_load(self, tmp_path, said, declared):
        parameter = f'parameters {{ key: "memory_bytes" value {{ string_value: "{said}" }} }}'
        (tmp_path / "m" / "inner").mkdir(parents=True)
        (tmp_path / "m" / "inner" / "config.pbtxt").write_text(CONFIG + parameter)
        (tmp_path / "m" / "other").mkdir()
        (tmp_path / "m" / "other" / "config.pbtxt").write_text(CONFIG)
        roots = [str(tmp_path)]
        assert quick_size(str(tmp_path / "m"), roots, time.monotonic() + 60)[0] == declared

    async def test_what_is_declared_is_never_told_below_the_default(self, house, front):
        house.memory.limit_bytes = None
        house.packages.declared["/m"] = 2**16
        assert await front.load("m") == 1_000_000
        assert await front.predict("bucket/m", model_id="m") == 1_000_000

    @pytest.mark.parametrize(
        ("key", "size"),
        [
            ({"disk_size_bytes": 5_432_100}, 6_790_125),
            ({"disk_size_bytes": 5432}, 1_000_000),
            ({"disk_size_bytes": 1e30}, 1_000_000),
            ({"disk_size_bytes": -5}, 1_000_000),
            ({"disk_size_bytes": "5"}, 1_000_000),
            ({}, 1_000_000),
        ],
    )
    async def test_the_key_tells_the_size_on_disk_before_any_file_is_here(self, front, key, size):
        assert await front.predict("my/model", json.dumps(key)) == size

    async def test_the_factor_is_a_setting(self, house, tmp_path):
        front = Front(house, tmp_path, size_factor=1.35)
        assert await front.predict("x", '{"disk_size_bytes": 5432100}') == 7_333_335

    async def test_files_that_are_here_are_added_up(self, front, tmp_path, monkeypatch):
        monkeypatch.setattr(modelmesh_sizes, "_SCAN_SECONDS", 30.0)  # this disk answers
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "config.pbtxt").write_bytes(b"#" * 100_000)
        (tmp_path / "m" / "1" / "model.bin").write_bytes(b"x" * 900_000)
        assert await front.predict(str(tmp_path / "m")) == 1_250_000
        assert await front.predict(str(tmp_path / "m" / "1" / "model.bin")) == 1_125_000

    async def test_nothing_is_told_of_files_outside_the_model_roots(self, house, tmp_path):
        (tmp_path / "secret").write_bytes(b"x" * 2_000_000)
        (tmp_path / "root").mkdir()
        front = Front(house, tmp_path / "root")
        assert await front.predict(str(tmp_path / "secret")) == 1_000_000

    async def test_a_disk_that_does_not_answer_is_no_reason_to_wait(self, front, tmp_path):
        (tmp_path / "m").write_bytes(b"x" * 2_000_000)
        stuck = threading.Event()
        waiting = [asyncio.create_task(LOOKUPS.run(stuck.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(30):
                assert await front.predict(str(tmp_path / "m")) == 1_000_000
        finally:
            stuck.set()
            await asyncio.gather(*waiting)

    def test_files_are_not_counted_past_the_time_for_it(self, tmp_path):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "model.bin").write_bytes(b"x" * 1000)
        roots = [str(tmp_path)]
        assert quick_size(str(tmp_path / "m"), roots, time.monotonic() + 60) == (None, 1000)
        assert quick_size(str(tmp_path / "m"), roots, time.monotonic() - 1) == (None, 0)

    async def test_the_size_of_a_model_is_what_is_held(self, house, front):
        house.sizes["m"] = 700
        await front.load("m")
        assert await front.size("m") == 700

    async def test_a_model_that_is_not_loaded_has_no_size(self, front):
        with pytest.raises(ModelNotFound):
            await front.size("m")
