"""What a load and an unload do, step by step, and what else these tests share."""

import pytest

from adapter.core.model import ModelId
from adapter.core.state import ModelState
from adapter.errors import BackendUnavailable, StubDied
from tests.fakes.house import House

MIB = 2**20

LOAD = ["prepare /m", "read", "place m", "read", "load m", "read", "confirm m"]
UNDO = ["unload m", "wait_gone m", "remove m"]
UNLOAD = ["read", *UNDO]
LOST = BackendUnavailable("the connection to Triton broke", delivered=True)


def operations(house: House, operation: str, outcome: str) -> float:
    labels = {"operation": operation, "outcome": outcome}
    return house.metrics.registry.get_sample_value("triton_adapter_operations_total", labels) or 0


async def kill(house: House, name: str) -> None:
    house.triton.stuck.add(name)
    house.server.live[name] = False
    with pytest.raises(StubDied), house.control.lease(ModelId(name)):
        raise StubDied(f"Stub process '{name}_0_0' is not healthy.")
    await house.until_state(name, ModelState.DEAD)
