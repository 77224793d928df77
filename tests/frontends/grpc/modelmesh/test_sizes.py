"""predictModelSize and modelSize."""

import asyncio
import json
import threading
import time

import pytest

from adapter.core.memory import Device
from adapter.errors import ModelNotFound, OutOfMemory
from adapter.frontends.grpc import modelmesh_sizes
from adapter.packages.config_parameters import quick_size
from adapter.runtime.threads import LOOKUPS
from tests.fakes.house import House
from tests.frontends.grpc.modelmesh.front import Front
from tests.trees import CONFIG

MIB = 2**20
LEAST = 64 * MIB  # what ModelMesh makes room for when nothing is known


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
        assert await front.predict("bucket/files", model_id="other") == LEAST

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
            ({"disk_size_bytes": 80_000_000}, 100_000_000),
            ({"disk_size_bytes": 5432}, LEAST),
            ({"disk_size_bytes": 1e30}, LEAST),
            ({"disk_size_bytes": -5}, LEAST),
            ({"disk_size_bytes": "5"}, LEAST),
            ({}, LEAST),
        ],
    )
    async def test_the_key_tells_the_size_on_disk_before_any_file_is_here(self, front, key, size):
        assert await front.predict("my/model", json.dumps(key)) == size

    async def test_the_factor_is_a_setting(self, house, tmp_path):
        front = Front(house, tmp_path, size_factor=1.35)
        assert await front.predict("x", '{"disk_size_bytes": 100000000}') == 135_000_000

    async def test_files_that_are_here_are_added_up(self, front, tmp_path, monkeypatch):
        monkeypatch.setattr(modelmesh_sizes, "_SCAN_SECONDS", 30.0)  # this disk answers
        (tmp_path / "m" / "1").mkdir(parents=True)
        with (tmp_path / "m" / "1" / "model.bin").open("wb") as file:
            file.truncate(80_000_000)
        (tmp_path / "m" / "config.pbtxt").write_bytes(b"#" * 800_000)
        assert await front.predict(str(tmp_path / "m")) == 101_000_000
        assert await front.predict(str(tmp_path / "m" / "1" / "model.bin")) == 100_000_000

    async def test_nothing_is_told_of_files_outside_the_model_roots(self, house, tmp_path):
        with (tmp_path / "secret").open("wb") as file:
            file.truncate(90_000_000)
        (tmp_path / "root").mkdir()
        front = Front(house, tmp_path / "root")
        assert await front.predict(str(tmp_path / "secret")) == LEAST

    async def test_a_disk_that_does_not_answer_is_no_reason_to_wait(self, front, tmp_path):
        (tmp_path / "m").write_bytes(b"x" * 2_000_000)
        stuck = threading.Event()
        waiting = [asyncio.create_task(LOOKUPS.run(stuck.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(30):
                assert await front.predict(str(tmp_path / "m")) == LEAST
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


class TestPredictions:
    """ModelMesh evicts by them, and before the load."""

    async def test_a_model_of_unknown_size_is_predicted_as_large_as_models_usually_are(
        self, house, front
    ):
        house.sizes |= {"a": 90 * MIB, "b": 110 * MIB}
        await front.load("a")
        await front.load("b")
        assert await front.predict("/new", model_id="new") == 100 * MIB

    async def test_a_guess_empties_no_more_than_a_quarter_of_the_capacity(self, house, front):
        house.sizes["a"] = 600 * MIB
        await front.load("a")
        told = (await front.status()).capacityInBytes
        assert await front.predict("/new", model_id="new") == told // 4

    async def test_files_count_up_to_the_whole_capacity(self, front):
        told = (await front.status()).capacityInBytes
        half = json.dumps({"disk_size_bytes": told // 2})
        assert await front.predict("/new", half) == told // 2 * 1.25
        assert await front.predict("/new", '{"disk_size_bytes": 1e15}') == told

    async def test_a_load_that_ran_out_of_memory_is_predicted_twice_as_large(self, house, front):
        await front.status()
        house.steps.fail("load m", OutOfMemory("CUDA out of memory"))
        with pytest.raises(OutOfMemory):
            await front.load("m")
        assert await front.predict("/m", model_id="m") == 2 * LEAST


class TestCapacity:
    """ModelMesh reads it once, and fills it to the last byte."""

    async def told(self, house: House, tmp_path, **settings: object) -> int:
        return (await Front(house, tmp_path, **settings).status()).capacityInBytes

    async def test_growth_of_the_baseline_and_one_landing_load_are_kept_back(self, tmp_path):
        house = await House(limit=1000 * MIB, headroom=50 * MIB).open()
        assert await self.told(house, tmp_path) == (1000 - 50 - 100 - 100) * MIB

    async def test_the_largest_model_that_was_measured_must_be_able_to_land(self, tmp_path):
        house = await House(limit=1000 * MIB).open()
        house.sizes |= {"m": 150 * MIB, "n": 30 * MIB}
        for name in ("m", "n"):
            await house.load(name)
        assert await self.told(house, tmp_path) == (1000 - 100 - 150) * MIB
        house.sizes["l"] = 400 * MIB
        await house.load("l")
        assert await self.told(house, tmp_path) == (1000 - 100 - 250) * MIB

    async def test_a_baseline_of_an_earlier_run_is_what_it_grows_to(self, tmp_path):
        house = House(limit=1000 * MIB)
        house.others = 20 * MIB
        house.control.memory.sizes.restore({"baseline": {"host": 50 * MIB}})
        await house.open()
        assert await self.told(house, tmp_path) == (1000 - 20 - 30 - 100) * MIB
        house.control.memory.sizes.restore({"baseline": {"host": 20 * MIB}})
        assert await self.told(house, tmp_path) == (1000 - 20 - 20 - 100) * MIB

    async def test_of_a_gpu_half_a_gibibyte_is_kept_for_its_context(self, tmp_path):
        house = House(limit=4096 * MIB)
        house.memory.device = Device("GPU-0")
        await house.open()
        assert await self.told(house, tmp_path) == 4096 * MIB - 512 * MIB - 4096 * MIB // 10

    async def test_where_nothing_is_measured_the_ledger_can_grant_all(self, tmp_path):
        house = await House(memory_limit=1000 * MIB).open()
        assert await self.told(house, tmp_path) == 1000 * MIB
