"""The adapter starts beside a Triton that is up: what is taken over, what taken down."""

import pytest

from adapter.control.ports import TimeLimits
from adapter.core.model import ModelId, Placement, StagedModel, TritonName
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    ModelNotFound,
)
from tests.control.reconciler.steps import MIB, QUICK, left_over, started
from tests.fakes.house import House


async def test_what_was_loaded_and_is_still_served_is_taken_over(caplog):
    caplog.set_level("INFO")
    kept = left_over("m", mib=300)
    house = await started(kept, ready={"m", "foreign"}, others=350 * MIB)
    house.check_registry("m")
    assert house.held("m") == 300 * MIB
    assert house.control.memory.ledger.snapshot().baseline_bytes == 50 * MIB
    record = house.control.registry.serving(ModelId("m"))
    assert (record.source.url, record.package_key) == ("/m", "/m")
    assert [r.model_id for r in caplog.records if r.message == "model.adopted"] == ["m"]
    with house.control.lease(ModelId("m")):
        pass
    await house.unload("m")
    assert house.triton.models == {"foreign"}
    assert house.packages.folders == {}
    await house.close()


@pytest.mark.parametrize(("is_loaded", "ready"), [(True, set()), (False, {"m"}), (False, set())])
async def test_what_was_half_done_or_is_no_longer_served_is_taken_down(is_loaded, ready):
    house = await started(left_over("m", is_loaded=is_loaded), ready=ready)
    house.check()
    await house.load("m")
    house.check("m")
    await house.close()


async def test_before_stock_is_taken_no_model_is_called_not_found():
    """To a platform that would say that it has to load it."""
    house = House(1000 * MIB, QUICK)
    with pytest.raises(BackendUnavailable, match="starting or stopping"):
        house.control.lease(ModelId("m"))
    await house.open()
    with pytest.raises(ModelNotFound):
        house.control.lease(ModelId("m"))
    await house.close()


async def test_what_triton_is_stuck_with_does_not_keep_the_adapter_from_starting():
    house = House(limits=TimeLimits(load=10, unload=0, stall=0, recovery=1, alone=5))
    house.packages.folders[TritonName("m")] = left_over("m", is_loaded=False)
    house.steps.fail("unload m", BackendTimeout("Triton did not answer in time"))
    await house.control.open()
    await house.load("n")
    record = await house.load("m")
    assert record.name.startswith("ta.r.1.")
    assert set(house.packages.folders) == {"m", "n", record.name}
    await house.close()


async def test_of_a_package_all_models_must_be_served_to_take_it_over():
    names = tuple(map(TritonName, ("h", "m")))
    whole = StagedModel(names[1], ModelId("m"), Placement(names), is_loaded=True)
    house = await started(whole, ready={"m"})
    house.check()
    await house.close()


async def test_what_was_taken_over_is_held_to_what_was_noted_as_nobody_measured_it_here():
    house = await started(left_over("m", mib=300), ready={"m"})
    house.sizes["m"] = 300 * MIB
    await house.control.memory.tick({ModelId("m")})
    house.sizes["m"] = 340 * MIB
    await house.control.memory.tick({ModelId("m")})
    assert house.held("m") == 300 * MIB
    await house.close()
