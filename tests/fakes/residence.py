"""Residency with fakes all around it."""

import asyncio
from typing import Any

from adapter.control.residency import Options, Residency
from adapter.control.state import State
from adapter.core.artifacts import ArtifactKey, CacheUse
from adapter.core.model import ModelId, ModelSource
from adapter.core.registry import ModelRecord
from adapter.core.state import ModelState
from tests.fakes.artifacts import FakeArtifacts
from tests.fakes.house import House

MIB = 2**20


class Residence:
    """`house` with a store of models that declare what they take. Room for `room` models of 100
    MiB each.
    """

    def __init__(self, room: int = 2, options: Options | None = None, **house: Any) -> None:
        limit = (100 * room + 50) * MIB
        self.house = House(limit, memory_limit=limit, **house)
        self.control = self.house.control
        self.steps = self.house.steps
        self.artifacts = FakeArtifacts(self.steps)
        options = options or Options()
        self.residency = Residency(self.control, self.artifacts, self.house.metrics, options)
        self.house.control_state = State(self.control, self.residency)
        self.waits_for_room = asyncio.Event()  # a load does
        self._became_idle = self.residency.eviction.became_idle
        self.residency.eviction.became_idle = self._waits  # type: ignore[method-assign]

    async def _waits(self) -> bool:
        self.waits_for_room.set()
        return await self._became_idle()

    async def open(self, *names: str) -> "Residence":
        for name in names:
            self.have(name)
        await self.house.open()
        return self

    def have(self, name: str, size_bytes: int = 100 * MIB) -> None:
        self.artifacts.have(name)
        self.house.sizes[name] = size_bytes
        self.house.packages.declared[f"/{name}"] = size_bytes

    async def close(self) -> None:
        await self.residency.close()
        await self.house.close()

    async def call(self, name: str, caller: str = "") -> CacheUse:
        """One inference, which takes some turns of the loop."""
        model_id = ModelId(name)
        lease, use = await self.residency.wait_for_lease(model_id, ArtifactKey("", name), caller)
        with lease as record:
            assert record.id == model_id
            await asyncio.sleep(0)
            assert name in self.house.triton.models
        return use

    async def hold(self, name: str) -> Any:
        """An inference that goes on until `end` of the lease."""
        lease, _ = await self.residency.wait_for_lease(ModelId(name), ArtifactKey("", name))
        lease.begin()
        return lease

    async def load(self, name: str) -> ModelRecord:
        """A platform's load, of files of its own."""
        self.house.packages.declared[f"/own/{name}"] = 100 * MIB
        self.house.sizes[name] = 100 * MIB
        return await self.control.load(ModelId(name), ModelSource(f"/own/{name}"))

    def state(self, name: str) -> ModelState | None:
        record = self.control.registry.find(ModelId(name))
        return record.state if record else None

    def count(self, metric: str, **labels: str) -> float:
        return self.house.metrics.registry.get_sample_value(f"triton_adapter_{metric}", labels) or 0

    def check(self, *names: str) -> None:
        """These models are loaded, by every book, and the files of no other are kept."""
        assert self.house.listed() == sorted(names)
        self.house.check(*names)
        resident = {record.id for record in self.residency.models()}
        kept = {folder.strip("/").split("@")[0] for folder in +self.artifacts.pins}
        assert kept == resident
        assert not [*self.residency.waits]


async def at_once(residence: Residence, *names: str) -> list[object]:
    """Have a caller each ask for these models; return their outcomes."""
    async with asyncio.timeout(30):
        return await asyncio.gather(
            *(residence.call(name) for name in names), return_exceptions=True
        )
