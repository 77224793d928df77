"""Operations are bounded, and take a model of several steps apart in order."""

import asyncio

import pytest

from adapter.control.operations import Kind, Operations
from adapter.core.model import ModelId, Placement, TritonName, private_name
from adapter.errors import Overloaded
from tests.fakes.control import ControlOnFakes


async def test_load_is_refused_beside_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations outlive their callers, so a limit on callers does not bound them."""
    monkeypatch.setattr("adapter.control.operations._MAX_OPERATIONS", 2)
    operations = Operations()
    ended = asyncio.Event()
    started = [operations.start(ModelId(name), Kind.LOAD, ended.wait) for name in "ab"]
    with pytest.raises(Overloaded, match="2 loads and unloads are in progress"):
        operations.refuse_when_full(ModelId("c"))
    ended.set()
    for operation in started:
        await operation.outcome()
    operations.refuse_when_full(ModelId("c"))


async def test_ensemble_is_unloaded_before_its_steps() -> None:
    """Triton would keep a step that a loaded ensemble needs."""
    adapter = await ControlOnFakes(limit=10**9).open()
    adapter.packages.placements["/e"] = Placement((TritonName("step"), TritonName("e")))
    await adapter.load("e")
    await adapter.unload("e")
    unloads = [call for call in adapter.calls.seen if call.startswith("unload ")]
    assert unloads == ["unload e", "unload step"]
    await adapter.close()


@pytest.mark.parametrize("call", ["prepare /p", "place p"])
async def test_helper_yields_its_name_to_load(call: str) -> None:
    """The other model has no folder yet, so only the registry knows of it."""
    adapter = await ControlOnFakes(limit=10**9).open()
    adapter.packages.placements["/p"] = Placement((TritonName("painter"), TritonName("p")))
    package_gate = adapter.calls.hold(call)
    loading = adapter.begin(adapter.load("p"))
    await package_gate.reached.wait()
    model_gate = adapter.calls.hold("prepare /painter")
    painting = adapter.begin(adapter.load("painter"))
    await model_gate.reached.wait()
    package_gate.open()
    record = await loading
    helper = private_name(TritonName("p"), "painter")
    assert record.placement.load == (helper, "p")
    model_gate.open()
    assert (await painting).name == "painter"
    await adapter.close()
