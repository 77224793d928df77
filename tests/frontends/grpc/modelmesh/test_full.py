"""A full ModelMesh before a device on which Triton itself fails what does not fit."""

import asyncio
import random

import pytest

from adapter.errors import AdapterError, LoadFailed
from tests.fakes.house import House
from tests.fakes.mesh_cache import MeshCache
from tests.frontends.grpc.modelmesh.front import Front

MIB = 2**20
DEVICE = 900 * MIB


class Scripted:
    """The contract as functions. A load that does not fit the device fails as CUDA's do."""

    def __init__(self, house: House, front: Front) -> None:
        self.house = house
        self._front = front
        self.most_used = 0
        house.triton.has_room = self._has_room

    def _has_room(self, model_id: str) -> bool:
        names = self.house.triton.models | {model_id}
        used = sum(self.house.sizes[name] for name in names)
        if used <= DEVICE:
            self.most_used = max(self.most_used, used)
        return used <= DEVICE

    async def predict(self, model_id: str) -> int:
        return await self._front.predict(f"/{model_id}", model_id=model_id)

    async def load(self, model_id: str) -> int:
        return await self._front.load(model_id)

    async def size(self, model_id: str) -> int:
        return await self._front.size(model_id)

    async def unload(self, model_id: str) -> None:
        await self._front.unload(model_id)

    async def infer(self, model_id: str) -> None:
        lease = self.house.control.lease(model_id)
        with lease:
            await asyncio.sleep(0)


@pytest.fixture
async def house():
    made = await House(limit=DEVICE).open()
    yield made
    await made.close()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["mixed", "small first"])
@pytest.mark.parametrize("known", ["unknown", "declared"])
async def test_every_first_use_is_answered(house, tmp_path, order, known):
    front = Front(house, tmp_path)
    small = {f"small{number}": 20 * MIB for number in range(18)}
    large = {f"large{number}": 165 * MIB for number in range(30)}
    house.sizes |= small | large
    if known == "declared":
        house.packages.declared |= {f"/{name}": size for name, size in house.sizes.items()}
    names = [*small, *large]
    if order == "mixed":
        random.Random(3).shuffle(names)
    status = await front.status()
    runtime = Scripted(house, front)
    cache = MeshCache(
        runtime,
        capacity_bytes=status.capacityInBytes,
        default_bytes=status.defaultModelSizeInBytes,
        load_seconds=status.modelLoadingTimeoutMs / 1000,
        churn_seconds=0,
        pace=0.1,
    )
    try:
        for name in names:
            await cache.use(name)
        await cache.quiet()
    finally:
        await cache.close()
    assert cache.counts.failures == []
    assert runtime.most_used <= DEVICE


async def test_a_load_that_waits_for_an_eviction_begins_when_the_model_is_gone(house, tmp_path):
    front = Front(house, tmp_path)
    await front.status()
    house.sizes |= {"large": 870 * MIB, "small": 20 * MIB, "next": 20 * MIB}
    await front.load("small")
    await front.load("large")  # above the capacity that was told: an eviction is on its way
    load = house.begin(front.load("next"))
    await house.turns()
    assert house.state("next") is None
    assert not load.done()
    await front.unload("large")
    await load
    house.check("small", "next")


async def test_an_unload_ends_a_load_that_waits_for_an_eviction(house, tmp_path):
    front = Front(house, tmp_path)
    await front.status()
    house.sizes |= {"large": 870 * MIB, "small": 20 * MIB}
    await front.load("small")
    await front.load("large")
    load = house.begin(front.load("next"))
    await house.turns()
    await front.unload("next")
    with pytest.raises(AdapterError, match="unloaded while its load waited"):
        await load
    house.check("small", "large")


async def test_nothing_is_waited_for_when_modelmesh_has_evicted_nothing(house, tmp_path):
    """Another process takes the memory: no eviction is on its way, so the answer comes at once."""
    front = Front(house, tmp_path, load_timeout_seconds="300")
    await front.status()
    await front.load("n")
    house.others = DEVICE
    async with asyncio.timeout(30):
        with pytest.raises(AdapterError, match=r"0 bytes of 900\.0 MiB are free"):
            await front.load("m")


async def test_a_model_above_a_set_limit_is_unloaded(tmp_path):
    house = await House(limit=2 * DEVICE, memory_limit=DEVICE).open()
    try:
        front = Front(house, tmp_path)
        await front.status()
        house.sizes["m"] = 1000 * MIB
        with pytest.raises(AdapterError, match=r"1000\.0 MiB"):
            await front.load("m")
        house.check()
    finally:
        await house.close()


async def test_a_load_that_fails_no_longer_counts(house, tmp_path):
    front = Front(house, tmp_path)
    await front.status()
    house.steps.fail("load m", LoadFailed("no good"))
    with pytest.raises(LoadFailed):
        await front.load("m", disk_size_bytes=800 * MIB)
    house.sizes["n"] = 20 * MIB
    async with asyncio.timeout(10):
        await front.load("n")
    assert not house.parts.mesh.is_evicting
