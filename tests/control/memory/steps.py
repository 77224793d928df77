"""Steps of loads and unloads against memory."""

import asyncio

from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId
from tests.fakes.house import House

MIB = 2**20
M, N = ModelId("m"), ModelId("n")


def room(limits: TimeLimits | None = None) -> House:
    """1000 MiB, and a reader that sees who takes them."""
    house = House(1000 * MIB, limits) if limits else House(1000 * MIB)
    house.sizes |= {"m": 300 * MIB, "n": 200 * MIB}
    return house


def declare(house: House, **mib: int) -> None:
    """What the packages say and what the models then take."""
    house.packages.declared |= {f"/{name}": count * MIB for name, count in mib.items()}
    house.sizes |= {name: count * MIB for name, count in mib.items()}


async def begin_load(house: House, name: str):
    """A load that has got as far as Triton."""
    gate = house.steps.hold(f"load {name}")
    task = house.begin(house.load(name))
    await asyncio.wait_for(gate.reached.wait(), 5)
    return gate, task


async def begin_unload(house: House, name: str):
    gate = house.steps.hold(f"unload {name}")
    task = house.begin(house.unload(name))
    await asyncio.wait_for(gate.reached.wait(), 5)
    return gate, task


async def measured(house: House, *names: str) -> None:
    """All loads have been measured that were answered before."""
    await asyncio.wait_for(asyncio.gather(*house.control.memory._measurements), 5)
    assert all(house.control.memory.accounts.is_measured(ModelId(name)) for name in names)


def sample(house: House, name: str, **labels: str) -> float | None:
    return house.metrics.registry.get_sample_value(name, labels)


def learned(house: House, name: str) -> int | None:
    return house.control.memory.sizes.of_url(f"/{name}")
