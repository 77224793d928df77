"""loadModel: order, idempotence, who waits for whom, and what a Triton that is away changes."""

import asyncio
import json

import pytest

from adapter._proto import model_runtime_pb2 as pb
from adapter.core.model import ModelId, ModelSource
from adapter.core.record import OnExit
from adapter.core.states import ModelState
from adapter.errors import (
    BackendUnavailable,
    InvalidModel,
    InvalidRequest,
    LoadFailed,
    UnloadedMeanwhile,
)
from tests.fakes.house import House
from tests.frontends.grpc.modelmesh.front import (
    CLOSED,
    Front,
    left_over,
    turns_of_the_loop,
)


class TestLoad:
    async def test_the_answer_has_the_size_that_is_held(self, house, front):
        house.sizes["m"] = 700
        assert await front.load("m") == 700
        house.check("m")

    async def test_a_size_that_nobody_measured_is_that_of_the_files(self, house, front):
        house.memory.limit_bytes = None
        house.packages.size_bytes = 4_000_000
        assert await front.load("m", disk_size_bytes=1000) == 5_000_000
        assert await front.size("m") == 5_000_000

    async def test_a_size_that_nobody_knows_is_the_default(self, house, front):
        house.memory.limit_bytes = None
        assert await front.load("m", disk_size_bytes=1000) == 1_000_000
        assert await front.size("m") == 1_000_000

    async def test_a_size_that_is_declared_is_told_where_nothing_is_measured(self, house, front):
        house.memory.limit_bytes = None
        house.packages.declared["/m"] = 7_000_000
        assert await front.load("m", disk_size_bytes=1000) == 7_000_000
        assert await front.size("m") == 7_000_000

    async def test_last_slash_of_path_names_the_same_model(self, house, front):
        house.sizes["m"] = 700
        await front.load("m", "/models/m/")
        assert await front.load("m", "/models/m") == 700
        assert house.steps.seen.count("load m") == 1

    async def test_loads_run_together_when_sizes_are_declared(self, house, tmp_path):
        """`maxLoadingConcurrency` is kept for models that were never loaded before."""
        front = Front(house, tmp_path, load_concurrency=2)
        house.packages.declared |= {"/a": 7_000_000, "/b": 7_000_000}
        gates = [house.steps.hold(f"load {name}") for name in ("a", "b")]
        loads = [house.begin(front.load(name)) for name in ("a", "b")]
        await gates[0].reached.wait()
        await house.turns(500)
        are_begun_together = gates[1].reached.is_set()
        for gate in gates:
            gate.open()
        await asyncio.gather(*loads)
        assert are_begun_together
        house.check("a", "b")

    async def test_load_waits_beside_another_of_unknown_size(self, house, tmp_path):
        front = Front(house, tmp_path, load_concurrency=2)
        gate = house.steps.hold("load a")
        first = house.begin(front.load("a"))
        await gate.reached.wait()
        second = house.begin(front.load("b"))
        await turns_of_the_loop()
        assert "load b" not in house.steps.seen
        gate.open()
        await asyncio.gather(first, second)

    async def test_a_measured_size_may_be_below_the_default(self, house, front):
        house.sizes["m"] = 700
        assert await front.load("m") == 700

    async def test_a_model_that_was_seen_to_take_nothing_has_the_default(self, house, front):
        assert await front.load("m") == 1_000_000
        assert await front.size("m") == 1_000_000

    async def test_size_is_told_when_a_lagging_sensor_shows_it(self, house, front):
        house.memory.lag = 1.0
        house.sizes["m"] = 700
        assert await front.load("m") == 0
        assert await front.size("m") == 700

    async def test_load_of_lost_model_waits_for_triton(self, open_house, tmp_path):
        house = await open_house(limit=10**9, on_exit=OnExit.RELOAD)
        front = Front(house, tmp_path)
        for name in ("m", "a", "b"):  # the one that was loaded first comes back last
            house.sizes[name] = 700
            await front.load(name)
        gates = [house.steps.hold("load a"), house.steps.hold("load b")]  # it has two threads
        house.triton.models.clear()
        house.begin(house.come_back())
        for gate in gates:
            await gate.reached.wait()
        again = house.begin(front.load("m"))
        await turns_of_the_loop()
        assert not again.done()
        for gate in gates:
            gate.open()
        assert await again == 700
        assert house.steps.seen.count("load m") == 2
        for name in ("a", "b"):
            await house.until_state(name, ModelState.READY)
        house.check("a", "b", "m")

    async def test_a_model_that_is_loaded_is_not_loaded_again(self, house, front):
        house.sizes["m"] = 700
        await front.load("m")
        house.steps.seen.clear()
        assert await front.load("m") == 700
        assert house.steps.seen == []

    async def test_a_load_under_way_is_waited_for(self, house, front):
        gate = house.steps.hold("load m")
        first = house.begin(front.load("m"))
        await gate.reached.wait()
        second = house.begin(front.load("m"))
        await turns_of_the_loop()
        assert not second.done()
        gate.open()
        assert await first == await second
        assert house.steps.seen.count("load m") == 1

    async def test_whoever_waits_for_a_load_hears_its_failure(self, house, front):
        gate = house.steps.hold("load m")
        house.steps.fail("load m", LoadFailed("no good"))
        first = house.begin(front.load("m"))
        await gate.reached.wait()
        second = house.begin(front.load("m"))
        await turns_of_the_loop()
        gate.open()
        heard = await asyncio.gather(first, second, return_exceptions=True)
        assert [str(error) for error in heard] == ["no good", "no good"]
        house.check()

    async def test_a_load_that_came_by_another_listener_is_waited_for(self, house, front):
        gate = house.steps.hold("load m")
        other = house.begin(house.load("m"))
        await gate.reached.wait()
        waiting = house.begin(front.load("m"))
        await turns_of_the_loop()
        gate.open()
        await asyncio.gather(other, waiting)
        assert house.steps.seen.count("load m") == 1

    async def test_other_files_take_the_place_of_those_that_are_loaded(self, house, front):
        await front.load("m", "/old")
        await front.load("m", "/new")
        house.check("m")
        assert house.control.registry.serving(ModelId("m")).source.url == "/new"

    async def test_other_files_end_the_load_that_they_replace(self, house, front):
        gate = house.steps.hold("load m")
        first = house.begin(front.load("m", "/old"))
        await gate.reached.wait()
        second = house.begin(front.load("m", "/new"))
        await turns_of_the_loop()
        gate.open()  # a load goes on in Triton
        with pytest.raises(UnloadedMeanwhile):
            await first
        await second
        assert house.control.registry.serving(ModelId("m")).source.url == "/new"

    @pytest.mark.parametrize(
        "key", ["", "junk", "[]", "{", "null", "[" * 100_000, '{"disk_size_bytes": NaN}']
    )
    async def test_a_key_that_makes_no_sense_is_ignored(self, house, front, key):
        await front.answer("m", None, key)
        house.check("m")

    @pytest.mark.parametrize(
        ("key", "model_type"),
        [
            ({"model_type": {"name": "onnx", "version": "1"}}, "onnx"),
            ({"model_type": "pytorch:1.5"}, "pytorch:1.5"),
            ({"model_type": {"version": "1"}}, "keras"),
            ({"model_type": 7, "storage_key": "s", "bucket": None}, "keras"),
        ],
    )
    async def test_the_type_is_the_keys_and_else_the_requests(self, house, front, key, model_type):
        request = pb.LoadModelRequest(
            modelId="m", modelPath="/m", modelType="keras", modelKey=json.dumps(key)
        )
        await front.runtime.load(request)
        source = house.control.registry.serving(ModelId("m")).source
        assert source == ModelSource("/m", model_type)

    async def test_the_schema_is_the_keys(self, house, front):
        await front.load("m", schema_path="/m/_schema.json")
        assert house.control.registry.serving(ModelId("m")).source.schema == "/m/_schema.json"

    @pytest.mark.parametrize(
        ("model_id", "path", "key"),
        [("", "/m", {}), ("m", "", {}), ("m", "/m", {"schema_path": 2})],
    )
    async def test_what_cannot_be_meant_is_refused_before_anything_is_tried(
        self, house, front, model_id, path, key
    ):
        with pytest.raises(InvalidRequest):
            await front.load(model_id, path, **key)
        assert house.list_acts() == []

    async def test_a_package_that_is_refused_leaves_nothing(self, house, front):
        house.steps.fail("prepare /m", InvalidModel("config.pbtxt: what?"))
        with pytest.raises(InvalidModel):
            await front.load("m")
        house.check()


class TestConcurrency:
    @pytest.mark.slow
    async def test_no_more_loads_run_at_once_than_were_advertised(self, house, tmp_path):
        front = Front(house, tmp_path, load_concurrency=2)
        gates = {name: house.steps.hold(f"load {name}") for name in "abc"}
        loads = [house.begin(front.load(name)) for name in "abc"]
        await gates["a"].reached.wait()
        await gates["b"].reached.wait()
        await turns_of_the_loop()
        assert house.state("c") is None
        gates["a"].open()
        await gates["c"].reached.wait()
        gates["b"].open()
        gates["c"].open()
        await asyncio.gather(*loads)
        house.check("a", "b", "c")

    async def test_a_load_that_is_cancelled_keeps_its_turn_until_it_ends(self, house, front):
        gate = house.steps.hold("load a")
        first = house.begin(front.load("a"))
        await gate.reached.wait()
        first.cancel()
        second = house.begin(front.load("b"))
        await turns_of_the_loop()
        assert house.state("b") is None
        gate.open()
        await second
        house.check("a", "b")

    @pytest.mark.parametrize(("setting", "told"), [("0", 0), ("4", 4), ("instances", 3)])
    async def test_a_model_is_told_with_its_limit(self, house, tmp_path, setting, told):
        front = Front(house, tmp_path, modelmesh_model_concurrency=setting)
        assert (await front.answer("m", None, "")).maxConcurrency == told
        await front.unload("m")
        assert (await front.status()).limitModelConcurrency is (told > 0)


class TestOutage:
    """Of a Triton in another container: what it still has nobody knows until it answers."""

    @pytest.fixture
    async def house(self, open_house):
        return await open_house(limit=10**9, is_embedded=False)

    async def test_load_broken_by_tritons_end_is_repeated(self, house, front):
        gate = house.steps.hold("load m")
        house.steps.fail("load m", CLOSED)
        load = house.begin(front.load("m"))
        await gate.reached.wait()
        house.triton.live = False
        gate.open()
        await turns_of_the_loop()
        assert house.steps.seen.count("load m") == 1
        assert not load.done()

        await house.come_back()
        await load
        house.check("m")

    async def test_load_that_ended_triton_twice_stays_undone(self, house, front):
        house.steps.fail("load m", CLOSED)
        house.steps.fail("load", CLOSED)
        with pytest.raises(BackendUnavailable):
            await front.load("m")
        assert house.steps.seen.count("load m") == 2
        house.check()

    async def test_loads_that_were_broken_off_together_are_done_again_one_by_one(
        self, house, tmp_path
    ):
        """One of them may be what ended Triton; the others are not to end with it once more."""
        front = Front(house, tmp_path, load_concurrency=2)
        house.packages.declared |= {"/m": 1000, "/n": 1000}  # they go on side by side
        first = [house.steps.hold(f"load {name}") for name in "mn"]
        for name in "mn":
            house.steps.fail(f"load {name}", CLOSED)
        loads = [house.begin(front.load(name)) for name in "mn"]
        for gate in first:
            await gate.reached.wait()
        second = [house.steps.hold(f"load {name}") for name in "mn"]
        for gate in first:
            gate.open()
        reached = [house.begin(gate.reached.wait()) for gate in second]
        await asyncio.wait(reached, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        await turns_of_the_loop()
        assert sum(gate.reached.is_set() for gate in second) == 1

        for gate in second:
            gate.open()
        await asyncio.gather(*loads)
        house.check("m", "n")

    async def test_an_unload_that_was_broken_off_is_done_again(self, house, front):
        await front.load("m")
        house.steps.fail("unload m", CLOSED)
        await front.unload("m")
        house.check()

    async def test_a_load_waits_no_longer_than_a_load_may_take(self, house, tmp_path):
        front = Front(house, tmp_path, load_timeout_seconds="0.1")
        house.triton.live = False
        with pytest.raises(BackendUnavailable, match="did not come back in time"):
            await front.load("m")
        assert house.list_acts() == []

    async def test_an_unload_of_what_is_not_loaded_waits_for_nobody(self, house, front):
        house.triton.live = False
        await front.unload("m")

    async def test_an_adapter_that_ends_makes_no_load_wait(self, house, front):
        house.triton.live = False
        waiting = house.begin(front.load("m"))
        await turns_of_the_loop()
        house.control.close()
        for load in (waiting, front.load("m")):
            with pytest.raises(BackendUnavailable, match="draining"):
                await load


class TestStart:
    @pytest.fixture
    async def house(self):
        """Not open yet; Triton has `m` of an earlier run, and `other` was half done."""
        made = House(limit=10**9)
        kept = [left_over("m"), left_over("other", is_loaded=False)]
        made.packages.folders = {model.name: model for model in kept}
        made.triton.models = {"m"}
        yield made
        await made.close()

    async def test_no_call_waits_longer_than_its_limit(self, house, tmp_path):
        front = Front(house, tmp_path, unload_seconds=0.1, load_timeout_seconds="0.1")
        for call in (front.load("m"), front.unload("m")):
            with pytest.raises(BackendUnavailable, match="did not start in time"):
                await call

    async def test_a_start_that_is_given_up_ends_the_wait(self, house, front):
        load = house.begin(front.load("m"))
        await turns_of_the_loop()
        house.control.close()
        with pytest.raises(BackendUnavailable, match="draining"):
            await load
