"""On which of several GPUs a model is put, and where it goes when that one has no room."""

import asyncio

import pytest

from adapter.control.ports import TimeLimits
from adapter.control.residency import Options
from adapter.core.memory import Device
from adapter.core.model import ModelId, Placement, TritonName
from adapter.core.state import ModelState
from adapter.errors import InsufficientMemory, ModelTooLarge, OutOfMemory
from tests.control.memory.steps import MIB, declare
from tests.fakes.house import House
from tests.fakes.residence import Residence

LIMITS = TimeLimits(load=30, unload=10, stall=5, recovery=0.1, alone=5)


async def machine(*sizes: int) -> House:
    """GPUs of so many MiB each."""
    gpus = {number: size * MIB for number, size in enumerate(sizes)}
    return await House(gpus=gpus, limits=LIMITS).open()


async def residence_on(*sizes: int) -> Residence:
    gpus = {number: size * MIB for number, size in enumerate(sizes)}
    residence = Residence(0, Options(min_residency_seconds=0), gpus=gpus, limits=LIMITS)
    residence.house.control.memory.ledger._memory_limit = None
    return await residence.open()


def gpu_of(house: House, name: str) -> int | None:
    return house.control.registry.get(ModelId(name)).gpu


def held_on(house: House, name: str) -> dict[str, int]:
    held = house.control.memory.ledger.of(TritonName(name))
    return {device: count // MIB for device, count in held.items()}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((500, 800), [1, 0, 1]), ((100, 400, 900, 400), [2, 2, 1])],
)
async def test_each_model_goes_to_the_gpu_with_most_free(sizes, expected):
    house = await machine(*sizes)
    declare(house, a=400, b=200, c=300)
    for name in "abc":
        await house.load(name)
    assert [gpu_of(house, name) for name in "abc"] == expected
    assert held_on(house, "a") == {f"GPU-{expected[0]}": 400}
    assert house.packages.gpu_of["a"] == expected[0]
    await house.close()


async def test_a_model_that_fits_on_one_gpu_alone_goes_there():
    house = await machine(100, 1000, 100)
    declare(house, big=900)
    await house.load("big")
    assert gpu_of(house, "big") == 1
    await house.close()


async def test_a_package_that_names_its_gpus_stays_there():
    house = await machine(100, 1000)
    declare(house, a=50)
    house.packages.gpus["/a"] = frozenset({0})
    await house.load("a")
    assert gpu_of(house, "a") is None
    assert house.packages.gpu_of["a"] is None
    await house.close()


async def test_another_version_is_not_tried_beside_the_old_one_where_one_of_its_gpus_is_full():
    residence = await residence_on(300, 1000)
    house = residence.house
    residence.have("a", 200 * MIB)
    house.packages.declared["/a@2"] = 200 * MIB
    house.packages.gpus |= dict.fromkeys(["/a", "/a@2"], frozenset({0, 1}))
    await residence.call("a")
    residence.artifacts.versions["a"] = "2"
    residence.residency.models()[0].files.is_outdated = True
    await residence.residency.sweep()
    assert house.control.registry.get(ModelId("a")).source.url == "/a@2"
    steps = [step for step in house.steps.seen if step in {"unload a", "prepare /a@2"}]
    assert steps == ["unload a", "prepare /a@2"]
    await residence.close()


async def test_all_models_of_a_package_are_on_one_gpu():
    house = await machine(500, 1000)
    declare(house, a=50)
    helper, step = TritonName("helper"), TritonName("step")
    house.packages.placements["/a"] = Placement((helper, TritonName("a")), (step,))
    await house.load("a")
    assert [house.packages.gpu_of[name] for name in ("helper", "a", "step")] == [1, 1, 1]
    await house.close()


async def test_on_a_single_gpu_nothing_is_chosen():
    house = await machine(500)
    declare(house, a=50)
    await house.load("a")
    assert gpu_of(house, "a") is None
    await house.close()


async def test_two_loads_at_once_do_not_count_on_the_same_bytes():
    house = await machine(500, 510)
    declare(house, a=400, b=400)
    await asyncio.gather(house.load("a"), house.load("b"))
    assert {gpu_of(house, "a"), gpu_of(house, "b")} == {0, 1}
    await house.close()


async def test_what_fits_in_total_and_on_no_gpu_is_refused():
    house = await machine(500, 600)
    declare(house, a=300, b=300, c=350)
    await house.load("a")
    await house.load("b")
    with pytest.raises(InsufficientMemory) as caught:
        await house.load("c")
    assert caught.value.figures.device == "GPU-1"  # the one that lacks least
    assert [each.device for each in caught.value.elsewhere] == ["GPU-0"]
    house.check("a", "b")
    await house.close()


async def test_what_no_gpu_can_hold_is_too_large_for_the_largest():
    house = await machine(500, 600)
    declare(house, a=700)
    with pytest.raises(ModelTooLarge) as caught:
        await house.load("a")
    assert caught.value.figures.limit_bytes == 600 * MIB
    await house.close()


async def test_a_size_learned_on_one_gpu_counts_on_another():
    house = await machine(500, 1000)
    declare(house, a=600, b=100)
    del house.packages.declared["/b"]
    await house.load("b")
    assert held_on(house, "b") == {"GPU-1": 100}
    await house.unload("b")
    await house.load("a")
    await house.load("b")
    assert gpu_of(house, "b") == 0
    assert held_on(house, "b") == {"GPU-0": 100}
    assert house.control.memory.sizes.of_model(ModelId("b")) == 100 * MIB
    await house.close()


async def test_a_load_that_runs_out_of_memory_is_tried_on_another_gpu():
    house = await machine(500, 1000)
    declare(house, a=100)
    house.steps.fail("load a", OutOfMemory("CUDA out of memory", model_id="a"))
    await house.load("a")
    assert gpu_of(house, "a") == 0
    house.check("a")
    await house.close()


async def test_a_load_that_runs_out_of_memory_is_tried_once_on_each_gpu(monkeypatch):
    house = await machine(500, 1000)
    declare(house, a=100)
    tried = []

    async def load(name, model_id):
        tried.append(house.packages.gpu_of[name])
        raise OutOfMemory("CUDA out of memory", model_id=model_id)

    monkeypatch.setattr(house.triton, "load", load)
    with pytest.raises(OutOfMemory):
        await house.load("a")
    assert tried == [1, 0]
    house.check()
    await house.close()


async def test_a_model_comes_back_to_its_gpu_after_the_end_of_triton():
    house = House(gpus={0: 500 * MIB, 1: 1000 * MIB}, limits=LIMITS, loads_again=True)
    await house.open()
    declare(house, a=600, b=100)
    await house.load("a")
    await house.load("b")
    assert gpu_of(house, "b") == 0
    await house.unload("a")
    house.triton.models.clear()
    house.triton.lives += 1
    await house.control.triton_restarted()
    await house.until_state("b", ModelState.READY)
    assert gpu_of(house, "b") == 0
    await house.close()


# -- eviction -----------------------------------------------------------------------------------


async def test_another_gpu_is_tried_before_anything_is_evicted():
    residence = await residence_on(210, 310)
    for name in "abcd":
        residence.have(name)
        await residence.call(name)
    residence.check("a", "b", "c", "d")
    residence.have("e")
    await residence.call("e")
    assert residence.house.listed() == ["a", "b", "c", "d", "e"]
    await residence.close()


async def test_room_is_made_on_the_gpu_where_enough_can_go():
    residence = await residence_on(210, 200)
    residence.have("a", 80 * MIB)
    await residence.load("own")
    await residence.call("a")
    residence.have("b", 90 * MIB)
    await residence.call("b")
    residence.have("small", 20 * MIB)
    await residence.call("small")
    on = [gpu_of(residence.house, name) for name in ("own", "a", "b", "small")]
    assert on == [0, 1, 1, 0]
    residence.have("c", 150 * MIB)  # GPU 0 lacks less, 60 MiB, and only 20 may go there
    await residence.call("c")
    assert residence.house.listed() == ["c", "own", "small"]
    assert gpu_of(residence.house, "c") == 1
    await residence.close()


async def test_a_load_that_ran_out_of_memory_evicts_only_where_no_other_gpu_has_room():
    residence = await residence_on(250, 350)
    for name, size in {"a": 100, "b": 100}.items():
        residence.have(name, size * MIB)
        await residence.call(name)
    assert [gpu_of(residence.house, name) for name in "ab"] == [1, 0]
    residence.have("c", 140 * MIB)
    residence.house.steps.fail("load c", OutOfMemory("CUDA out of memory", model_id="c"))
    await residence.call("c")
    assert residence.house.listed() == ["a", "b", "c"]
    assert gpu_of(residence.house, "c") == 0
    assert Device("GPU-0") in residence.control.memory.ledger.of(ModelId("c"))
    await residence.close()
