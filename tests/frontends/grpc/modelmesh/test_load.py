"""loadModel and unloadModel: order, idempotence, who waits for whom, and a Triton that is away."""

import asyncio
import json

import pytest

from adapter._proto import model_runtime_pb2 as pb
from adapter.core.model import ModelId, ModelSource
from adapter.core.record import OnExit
from adapter.core.states import ModelState
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    InvalidRequest,
    LoadFailed,
    UnloadedMeanwhile,
)
from tests.fakes.control import ControlOnFakes
from tests.frontends.grpc.modelmesh.front import (
    CLOSED,
    Front,
    left_over,
    turns_of_the_loop,
)


class TestLoad:
    async def test_last_slash_of_path_names_the_same_model(self, fakes, front):
        fakes.sizes["m"] = 700
        await front.load("m", "/models/m/")
        assert await front.load("m", "/models/m") == 700
        assert fakes.calls.seen.count("load m") == 1

    async def test_load_waits_while_modelmesh_makes_room(self, fakes, front):
        """ModelMesh is to evict the model that takes more than its capacity, by its own books."""
        fakes.sizes |= {"large": 900_000_000, "small": 700}
        assert (await front.status()).capacityInBytes < 900_000_000
        await front.load("large")
        load = asyncio.create_task(front.load("small"))
        await turns_of_the_loop()
        assert "load small" not in fakes.calls.seen
        await front.unload("large")
        assert await load == 700

    async def test_load_of_lost_model_waits_for_triton(self, open_fakes, tmp_path):
        fakes = await open_fakes(limit=10**9, on_exit=OnExit.RELOAD)
        front = Front(fakes, tmp_path)
        for name in ("m", "a", "b"):  # the one that was loaded first comes back last
            fakes.sizes[name] = 700
            await front.load(name)
        gates = [fakes.calls.hold("load a"), fakes.calls.hold("load b")]  # it has two threads
        fakes.triton.models.clear()
        fakes.begin(fakes.come_back())
        for gate in gates:
            await gate.reached.wait()
        again = fakes.begin(front.load("m"))
        await turns_of_the_loop()
        assert not again.done()
        for gate in gates:
            gate.open()
        assert await again == 700
        assert fakes.calls.seen.count("load m") == 2
        for name in ("a", "b"):
            await fakes.until_state(name, ModelState.READY)
        fakes.check("a", "b", "m")

    async def test_whoever_waits_for_a_load_hears_its_failure(self, fakes, front):
        gate = fakes.calls.hold("load m")
        fakes.calls.fail("load m", LoadFailed("no good"))
        first = fakes.begin(front.load("m"))
        await gate.reached.wait()
        second = fakes.begin(front.load("m"))
        await turns_of_the_loop()
        gate.open()
        heard = await asyncio.gather(first, second, return_exceptions=True)
        assert [str(error) for error in heard] == ["no good", "no good"]
        fakes.check()

    async def test_load_by_another_listener_is_waited_for(self, fakes, front):
        gate = fakes.calls.hold("load m")
        other = fakes.begin(fakes.load("m"))
        await gate.reached.wait()
        waiting = fakes.begin(front.load("m"))
        await turns_of_the_loop()
        gate.open()
        await asyncio.gather(other, waiting)
        assert fakes.calls.seen.count("load m") == 1

    async def test_other_files_replace_the_loaded_ones(self, fakes, front):
        await front.load("m", "/old")
        await front.load("m", "/new")
        fakes.check("m")
        assert fakes.control.registry.serving(ModelId("m")).source.url == "/new"

    async def test_other_files_end_the_load_that_they_replace(self, fakes, front):
        gate = fakes.calls.hold("load m")
        first = fakes.begin(front.load("m", "/old"))
        await gate.reached.wait()
        second = fakes.begin(front.load("m", "/new"))
        await turns_of_the_loop()
        gate.open()  # a load goes on in Triton
        with pytest.raises(UnloadedMeanwhile):
            await first
        await second
        assert fakes.control.registry.serving(ModelId("m")).source.url == "/new"

    @pytest.mark.parametrize(
        "key", ["", "junk", "[]", "{", "null", "[" * 100_000, '{"disk_size_bytes": NaN}']
    )
    async def test_a_key_that_makes_no_sense_is_ignored(self, fakes, front, key):
        await front.answer("m", None, key)
        fakes.check("m")

    @pytest.mark.parametrize(
        ("key", "source"),
        [
            ({"model_type": {"name": "onnx", "version": "1"}}, ModelSource("/m", "onnx")),
            ({"model_type": "pytorch:1.5"}, ModelSource("/m", "pytorch:1.5")),
            ({"model_type": {"version": "1"}}, ModelSource("/m", "keras")),
            ({"model_type": 7, "storage_key": "s", "bucket": None}, ModelSource("/m", "keras")),
            ({"schema_path": "/m/_schema.json"}, ModelSource("/m", "keras", "/m/_schema.json")),
        ],
    )
    async def test_source_comes_from_key_then_request(self, fakes, front, key, source):
        request = pb.LoadModelRequest(
            modelId="m", modelPath="/m", modelType="keras", modelKey=json.dumps(key)
        )
        await front.runtime.load(request)
        assert fakes.control.registry.serving(ModelId("m")).source == source

    @pytest.mark.parametrize(
        ("model_id", "path", "key"),
        [("", "/m", {}), ("m", "", {}), ("m", "/m", {"schema_path": 2})],
    )
    async def test_senseless_load_is_refused_before_trying(self, fakes, front, model_id, path, key):
        with pytest.raises(InvalidRequest):
            await front.load(model_id, path, **key)
        assert fakes.list_acts() == []


class TestConcurrency:
    @pytest.mark.slow
    async def test_loads_at_once_stay_within_the_advertised(self, fakes, tmp_path):
        front = Front(fakes, tmp_path, load_concurrency=2)
        fakes.packages.declared |= {"/a": 1000, "/b": 1000, "/c": 1000}
        gates = {name: fakes.calls.hold(f"load {name}") for name in "abc"}
        loads = [fakes.begin(front.load(name)) for name in "abc"]
        await gates["a"].reached.wait()
        await gates["b"].reached.wait()
        await turns_of_the_loop()
        assert fakes.state("c") is None
        gates["a"].open()
        await gates["c"].reached.wait()
        gates["b"].open()
        gates["c"].open()
        await asyncio.gather(*loads)
        fakes.check("a", "b", "c")

    async def test_cancelled_load_keeps_its_turn_until_ended(self, fakes, front):
        gate = fakes.calls.hold("load a")
        first = fakes.begin(front.load("a"))
        await gate.reached.wait()
        first.cancel()
        second = fakes.begin(front.load("b"))
        await turns_of_the_loop()
        assert fakes.state("b") is None
        gate.open()
        await second
        fakes.check("a", "b")

    @pytest.mark.parametrize(("setting", "told"), [("0", 0), ("4", 4), ("instances", 3)])
    async def test_a_model_is_told_with_its_limit(self, fakes, tmp_path, setting, told):
        front = Front(fakes, tmp_path, modelmesh_model_concurrency=setting)
        assert (await front.answer("m", None, "")).maxConcurrency == told
        await front.unload("m")
        assert (await front.status()).limitModelConcurrency is (told > 0)


class TestOutage:
    """Of a Triton in another container: what it still has nobody knows until it answers."""

    @pytest.fixture
    async def fakes(self, open_fakes):
        return await open_fakes(limit=10**9, is_embedded=False)

    async def test_load_that_ended_triton_twice_stays_undone(self, fakes, front):
        fakes.calls.fail("load m", CLOSED)
        fakes.calls.fail("load", CLOSED)
        with pytest.raises(BackendUnavailable):
            await front.load("m")
        assert fakes.calls.seen.count("load m") == 2
        fakes.check()

    async def test_broken_off_loads_are_repeated_one_by_one(self, fakes, tmp_path):
        """One of them may be what ended Triton; the others are not to end with it once more."""
        front = Front(fakes, tmp_path, load_concurrency=2)
        fakes.packages.declared |= {"/m": 1000, "/n": 1000}  # they go on side by side
        first = [fakes.calls.hold(f"load {name}") for name in "mn"]
        for name in "mn":
            fakes.calls.fail(f"load {name}", CLOSED)
        loads = [fakes.begin(front.load(name)) for name in "mn"]
        for gate in first:
            await gate.reached.wait()
        second = [fakes.calls.hold(f"load {name}") for name in "mn"]
        for gate in first:
            gate.open()
        reached = [fakes.begin(gate.reached.wait()) for gate in second]
        await asyncio.wait(reached, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        await turns_of_the_loop()
        assert sum(gate.reached.is_set() for gate in second) == 1

        for gate in second:
            gate.open()
        await asyncio.gather(*loads)
        fakes.check("m", "n")

    async def test_load_waits_at_most_a_loads_time(self, fakes, tmp_path):
        front = Front(fakes, tmp_path, load_timeout_seconds="0.1")
        fakes.triton.live = False
        with pytest.raises(BackendUnavailable, match="did not come back in time"):
            await front.load("m")
        assert fakes.list_acts() == []

    async def test_unload_of_absent_model_waits_for_nobody(self, fakes, front):
        fakes.triton.live = False
        await front.unload("m")

    async def test_an_adapter_that_ends_makes_no_load_wait(self, fakes, front):
        fakes.triton.live = False
        waiting = fakes.begin(front.load("m"))
        await turns_of_the_loop()
        fakes.control.close()
        for load in (waiting, front.load("m")):
            with pytest.raises(BackendUnavailable, match="draining"):
                await load


class TestStart:
    @pytest.fixture
    async def fakes(self):
        """Not open yet; Triton has `m` of an earlier run, and `other` was half done."""
        made = ControlOnFakes(limit=10**9)
        kept = [left_over("m"), left_over("other", is_loaded=False)]
        made.packages.folders = {model.name: model for model in kept}
        made.triton.models = {"m"}
        yield made
        await made.close()

    async def test_no_call_waits_longer_than_its_limit(self, fakes, tmp_path):
        front = Front(fakes, tmp_path, unload_seconds=0.1, load_timeout_seconds="0.1")
        for call in (front.load("m"), front.unload("m")):
            with pytest.raises(BackendUnavailable, match="did not start in time"):
                await call


class TestUnload:
    @pytest.mark.parametrize("model_id", ["unknown", "", "a\0b", "x" * 5000])
    async def test_what_is_not_loaded_is_unloaded_already(self, front, model_id):
        await front.unload(model_id)

    async def test_a_failure_is_told(self, fakes, front):
        await front.load("m")
        fakes.calls.fail("unload m", BackendTimeout("no"))
        with pytest.raises(BackendTimeout):
            await front.unload("m")
