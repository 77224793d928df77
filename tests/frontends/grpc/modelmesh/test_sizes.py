"""predictModelSize and modelSize."""

import pytest

from adapter.core.memory import Device
from adapter.errors import AdapterError, ModelNotFound
from tests.fakes.control import ControlOnFakes
from tests.frontends.grpc.modelmesh.front import Front

MIB = 2**20
DEFAULT = 1_000_000


class TestSizes:
    @pytest.mark.parametrize(
        ("measured", "declared", "on_disk", "size"),
        [
            (700, None, 1000, 700),
            (0, None, 1000, DEFAULT),
            (None, None, 1000, DEFAULT),
            (None, None, 4_000_000, 5_000_000),
            (None, 7_000_000, 1000, 7_000_000),
            (None, 2**16, 1000, DEFAULT),
        ],
        ids=["measured", "took nothing", "unknown", "by files", "declared", "declared little"],
    )
    async def test_size_is_measured_or_else_a_guess(
        self, fakes, front, *, measured, declared, on_disk, size
    ):
        if measured is None:
            fakes.memory.limit_bytes = None
        fakes.sizes["m"] = measured or 0
        fakes.packages.declared["/m"] = declared
        fakes.packages.size_bytes = on_disk
        assert await front.load("m", disk_size_bytes=1000) == size
        assert await front.size("m") == size

    async def test_declared_size_is_reported_without_any_device(self, open_fakes, tmp_path):
        """The files are a worse guess than what the package says."""
        fakes = await open_fakes(limit=None)
        fakes.packages.declared["/m"] = 7_000_000
        front = Front(fakes, tmp_path)
        assert await front.load("m") == 7_000_000
        assert await front.size("m") == 7_000_000

    async def test_size_is_no_less_than_booked(self, fakes, front):
        """A load that ModelMesh has not planned is booked with more than the default."""
        fakes.memory.limit_bytes = None
        await fakes.load("m")
        assert await front.size("m") == 64 * MIB

    async def test_size_is_reported_after_a_lagging_sensor(self, fakes, front):
        fakes.memory.lag = 1.0
        fakes.sizes["m"] = 700
        assert await front.load("m") == 0
        assert await front.size("m") == 700

    async def test_absent_model_has_no_size(self, front):
        with pytest.raises(ModelNotFound):
            await front.size("m")


class TestPredictions:
    """ModelMesh evicts by them when it queues a load, also models that it is loading."""

    async def test_prediction_of_learned_size_is_at_most_default(self, fakes, front):
        fakes.sizes |= {"small": 77, "large": 90 * MIB}
        await front.load("small")
        await front.load("large")
        assert await front.predict("/small", model_id="small") == 77
        assert await front.predict("/large", model_id="large") == DEFAULT
        assert await front.size("large") == 90 * MIB

    async def test_learned_size_is_found_by_id_of_model(self, fakes, front):
        """A puller asks with the path in the bucket, and loads from a local one."""
        fakes.sizes["m"] = 77
        await front.load("m", "/models/m/files")
        await front.unload("m")
        assert await front.predict("bucket/files", model_id="m") == 77
        assert await front.predict("bucket/files", model_id="other") == DEFAULT

    async def test_prediction_is_the_same_for_last_slash(self, fakes, front):
        fakes.sizes["m"] = 77
        await front.load("m", "/models/m/")
        assert await front.predict("/models/m") == 77
        assert await front.predict("/models/m/") == 77

    @pytest.mark.parametrize(
        "key", ["", "no json", '{"disk_size_bytes": 80000000}', '{"disk_size_bytes": 5}']
    )
    async def test_prediction_is_default_when_nothing_was_learned(self, fakes, front, key):
        fakes.packages.declared["/m"] = 80 * MIB
        assert await front.predict("/m", key) == DEFAULT

    async def test_prediction_is_default_after_out_of_memory(self, fakes, front):
        fakes.sizes["m"] = 1000 * MIB
        with pytest.raises(AdapterError):
            await front.load("m")
        assert await front.predict("/m", model_id="m") == DEFAULT

    async def test_default_of_predictions_is_a_setting(self, fakes, tmp_path):
        front = Front(fakes, tmp_path, modelmesh_default_size="200MiB")
        fakes.sizes["m"] = 90 * MIB
        assert await front.predict("/m", model_id="m") == 200 * MIB
        await front.load("m")
        assert await front.predict("/m", model_id="m") == 90 * MIB


class TestCapacity:
    """ModelMesh reads it once, and fills it to the last byte."""

    async def told(self, fakes: ControlOnFakes, tmp_path, **settings: object) -> int:
        return (await Front(fakes, tmp_path, **settings).status()).capacityInBytes

    async def test_baseline_growth_and_one_load_are_kept_back(self, open_fakes, tmp_path):
        fakes = await open_fakes(limit=1000 * MIB, headroom_bytes=50 * MIB)
        assert await self.told(fakes, tmp_path) == (1000 - 50 - 100 - 100) * MIB

    async def test_largest_measured_model_must_fit(self, open_fakes, tmp_path):
        fakes = await open_fakes(limit=1000 * MIB)
        fakes.sizes |= {"m": 150 * MIB, "n": 30 * MIB}
        for name in ("m", "n"):
            await fakes.load(name)
        assert await self.told(fakes, tmp_path) == (1000 - 100 - 150) * MIB
        fakes.sizes["l"] = 400 * MIB
        await fakes.load("l")
        assert await self.told(fakes, tmp_path) == (1000 - 100 - 250) * MIB

    async def test_gpu_keeps_half_a_gib_for_its_context(self, open_fakes, tmp_path):
        fakes = await open_fakes(limit=4096 * MIB, device=Device("GPU-0"))
        assert await self.told(fakes, tmp_path) == 4096 * MIB - 512 * MIB - 4096 * MIB // 10

    @pytest.mark.parametrize("limit", [10**9, None], ids=["above it", "unknown"])
    async def test_the_container_bounds_the_capacity(self, open_fakes, tmp_path, limit):
        fakes = await open_fakes(limit=limit)
        assert await self.told(fakes, tmp_path, modelmesh_capacity="500MiB") == 500 * MIB

    async def test_unmeasured_memory_can_all_be_granted(self, open_fakes, tmp_path):
        fakes = await open_fakes(memory_limit=1000 * MIB)
        assert await self.told(fakes, tmp_path) == 1000 * MIB
