"""What an earlier run left, and how the adapter starts beside it."""

from adapter.control.ports import TimeLimits
from adapter.core.memory import HOST
from adapter.core.model import ModelId, ModelSource, Placement, StagedModel, TritonName
from adapter.errors import (
    BackendUnavailable,
)
from tests.fakes.house import House

MIB = 2**20
QUICK = TimeLimits(load=10, unload=10, stall=5, recovery=0.4, alone=5, stub_gone=0)
LOST = BackendUnavailable("the connection to Triton broke", delivered=True)


def left_over(model_id: str, *, mib: int = 0, is_loaded: bool = True) -> StagedModel:
    name = TritonName(model_id)
    return StagedModel(
        name,
        ModelId(model_id),
        Placement((name,)),
        is_loaded=is_loaded,
        source=ModelSource(f"/{model_id}"),
        can_load_again=True,
        content_key=f"/{model_id}",
        held={HOST: mib * MIB},
    )


async def started(*models: StagedModel, ready: set[str], others: int = 0) -> House:
    """An adapter that starts beside a Triton that is up."""
    house = House(1000 * MIB, QUICK)
    house.packages.folders = {model.name: model for model in models}
    house.triton.models = set(ready)
    house.others = others
    return await house.open()
