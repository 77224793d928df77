"""ModelRuntime on a control plane of fakes: order, idempotence, who waits for whom."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest

from adapter._proto import model_runtime_pb2 as pb
from adapter.core.model import ModelId, ModelSource
from adapter.core.state import ModelState
from adapter.errors import (
    BackendError,
    BackendTimeout,
    BackendUnavailable,
    InvalidModel,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
)
from adapter.frontends.grpc.modelmesh import ModelRuntime
from adapter.frontends.grpc.modelmesh_sizes import MeshSizes, scan_package
from adapter.runtime.threads import LOOKUPS
from adapter.settings import load_settings
from tests.fakes.house import House
from tests.trees import CONFIG

CLOSED = BackendUnavailable("it was closed", delivered=True)
STARTING, READY = pb.RuntimeStatusResponse.STARTING, pb.RuntimeStatusResponse.READY


class FakeTriton:
    async def version(self) -> str:
        return self.says

    async def instances(self, name: str) -> int:
        return 3 if name == "m" else 1

    says = "9.9"


class Front:
    """What a mesh may ask, by id and path."""

    def __init__(self, house: House, root: Path, **settings: object) -> None:
        self.triton = FakeTriton()
        self.is_ready = True
        given = load_settings(settings, {}, None).settings
        self.runtime = ModelRuntime(
            house.control,
            self.triton,
            MeshSizes(house.control, given, [root]),
            given,
            house.metrics,
            is_ready=lambda: self.is_ready,
        )

    async def load(self, model_id: str, path: str | None = None, **key: object) -> int:
        return (await self.answer(model_id, path, json.dumps(key))).sizeInBytes

    async def answer(self, model_id: str, path: str | None, key: str) -> pb.LoadModelResponse:
        path = f"/{model_id}" if path is None else path
        return await self.runtime.load(
            pb.LoadModelRequest(modelId=model_id, modelPath=path, modelKey=key)
        )

    async def unload(self, model_id: str) -> None:
        await self.runtime.unload(pb.UnloadModelRequest(modelId=model_id))

    async def predict(self, path: str, key: str = "{}", model_id: str = "any") -> int:
        request = pb.PredictModelSizeRequest(modelId=model_id, modelPath=path, modelKey=key)
        return (await self.runtime.predict_size(request)).sizeInBytes

    async def size(self, model_id: str) -> int:
        return (await self.runtime.size(pb.ModelSizeRequest(modelId=model_id))).sizeInBytes

    async def status(self) -> pb.RuntimeStatusResponse:
        return await self.runtime.status(pb.RuntimeStatusRequest())


@pytest.fixture
async def house():
    made = await House(limit=10**9).open()
    yield made
    await made.close()


@pytest.fixture
def front(house, tmp_path):
    return Front(house, tmp_path)


def come_back(house: House) -> None:
    """It answers."""
    house.triton.live, house.triton.lives = True, house.triton.lives + 1


async def turns_of_the_loop():
    """Enough for the fakes to come to a standstill."""
    for _ in range(50):
        await asyncio.sleep(0)


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

    async def test_a_measured_size_may_be_below_the_default(self, house, front):
        house.sizes["m"] = 700
        assert await front.load("m") == 700

    async def test_a_model_that_was_seen_to_take_nothing_has_the_default(self, house, front):
        assert await front.load("m") == 1_000_000
        assert await front.size("m") == 1_000_000

    async def test_a_load_that_ends_beside_an_unload_is_told_when_it_was_measured(
        self, house, front
    ):
        house.sizes |= {"old": 300, "new": 700}
        await front.load("old")
        gate = house.steps.hold("unload old")
        unload = house.begin(front.unload("old"))
        await gate.reached.wait()

        assert await front.load("new") == 0
        size = house.begin(front.size("new"))
        await turns_of_the_loop()
        assert not size.done()
        gate.open()
        await unload
        assert await size == 700

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

    async def test_other_files_wait_for_the_load_that_they_replace(self, house, front):
        gate = house.steps.hold("load m")
        first = house.begin(front.load("m", "/old"))
        await gate.reached.wait()
        second = house.begin(front.load("m", "/new"))
        gate.open()
        await asyncio.gather(first, second)
        assert house.control.registry.serving(ModelId("m")).source.url == "/new"

    async def test_a_load_behind_an_unload_of_the_same_model_loads_it_anew(self, house, front):
        await front.load("m")
        gate = house.steps.hold("unload m")
        unload = house.begin(front.unload("m"))
        await gate.reached.wait()
        load = house.begin(front.load("m"))
        again = house.begin(front.load("m"))
        await turns_of_the_loop()
        gate.open()
        await asyncio.gather(unload, load, again)
        house.check("m")

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
        assert house.steps.seen == []

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

    async def test_a_failed_load_frees_its_turn(self, house, front):
        house.steps.fail("load a", LoadFailed("no good"))
        with pytest.raises(LoadFailed):
            await front.load("a")
        await front.load("b")

    async def test_a_load_that_is_cancelled_while_it_waits_is_never_begun(self, house, front):
        gate = house.steps.hold("load a")
        first = house.begin(front.load("a"))
        await gate.reached.wait()
        second = house.begin(front.load("b"))
        await turns_of_the_loop()
        second.cancel()
        await front.unload("b")
        gate.open()
        await first
        await front.load("c")
        house.check("a", "c")

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

    async def test_a_cancelled_load_and_an_unload_leave_nothing(self, house, front):
        gate = house.steps.hold("load m")
        load = house.begin(front.load("m"))
        await gate.reached.wait()
        load.cancel()
        unload = house.begin(front.unload("m"))
        await turns_of_the_loop()
        assert not unload.done()
        gate.open()
        await unload
        house.check()

    @pytest.mark.parametrize(("setting", "told"), [("0", 0), ("4", 4), ("instances", 3)])
    async def test_a_model_is_told_with_its_limit(self, house, tmp_path, setting, told):
        front = Front(house, tmp_path, modelmesh_model_concurrency=setting)
        assert (await front.answer("m", None, "")).maxConcurrency == told
        await front.unload("m")
        assert (await front.status()).limitModelConcurrency is (told > 0)


class TestOutage:
    """Of a Triton in another container: what it still has nobody knows until it answers."""

    async def test_a_load_waits_for_triton(self, house, front):
        house.triton.live = False
        load = house.begin(front.load("m"))
        await turns_of_the_loop()
        assert house.steps.seen == []

        come_back(house)
        await house.control.triton_restarted()
        await load
        house.check("m")

    async def test_a_model_that_triton_lost_is_loaded_again_by_a_load_that_waited(
        self, house, front
    ):
        await front.load("m")
        house.triton.live = False
        house.triton.models.clear()
        load = house.begin(front.load("m"))
        come_back(house)  # it answers, and nobody has looked yet what it has
        await turns_of_the_loop()
        assert not load.done()

        await house.control.triton_restarted()
        await load
        house.check("m")

    async def test_a_load_that_never_reached_triton_is_tried_again(self, house, front):
        house.steps.fail("load m", BackendUnavailable("connection refused", delivered=False))
        await front.load("m")
        house.check("m")

    async def test_a_load_that_tritons_end_broke_off_is_done_again_when_it_is_back(
        self, house, front
    ):
        gate = house.steps.hold("load m")
        house.steps.fail("load m", CLOSED)
        load = house.begin(front.load("m"))
        await gate.reached.wait()
        house.triton.live = False
        gate.open()
        await turns_of_the_loop()
        assert house.steps.seen.count("load m") == 1
        assert not load.done()

        come_back(house)
        await house.control.triton_restarted()
        await load
        house.check("m")

    async def test_a_load_that_may_have_ended_triton_twice_is_not_done_a_third_time(
        self, house, front
    ):
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
        assert house.steps.seen == []

    async def test_a_load_that_is_cancelled_waits_no_longer(self, house, front):
        house.triton.live = False
        load = house.begin(front.load("m"))
        await turns_of_the_loop()
        load.cancel()
        come_back(house)
        await house.control.triton_restarted()
        await front.load("other")
        house.check("other")

    async def test_an_unload_waits_for_triton(self, house, front):
        await front.load("m")
        house.triton.live = False
        unload = house.begin(front.unload("m"))
        await turns_of_the_loop()
        assert not unload.done()

        come_back(house)
        await house.control.triton_restarted()
        await unload
        house.check()

    async def test_an_unload_of_what_is_not_loaded_waits_for_nobody(self, house, front):
        house.triton.live = False
        await front.unload("m")

    async def test_an_adapter_that_ends_makes_no_load_wait(self, house, front):
        house.control.close()
        house.triton.live = False
        with pytest.raises(BackendUnavailable, match="starting or stopping"):
            await front.load("m")


class TestUnload:
    @pytest.mark.parametrize("model_id", ["unknown", "", "a\0b", "x" * 5000])
    async def test_what_is_not_loaded_is_unloaded_already(self, front, model_id):
        await front.unload(model_id)

    async def test_two_unloads_at_once_both_succeed(self, house, front):
        await front.load("m")
        await asyncio.gather(front.unload("m"), front.unload("m"))
        house.check()

    async def test_it_returns_when_triton_has_let_go(self, house, front):
        await front.load("m")
        gate = house.steps.hold("wait_gone m")
        unload = house.begin(front.unload("m"))
        await gate.reached.wait()
        assert not unload.done()
        gate.open()
        await unload
        house.check()

    async def test_a_failure_is_told(self, house, front):
        await front.load("m")
        house.steps.fail("unload m", BackendTimeout("no"))
        with pytest.raises(BackendTimeout):
            await front.unload("m")


class TestSizes:
    async def test_learned_beats_the_key(self, house, front):
        house.sizes["m"] = 77
        await front.load("m")
        assert await front.predict("/m", '{"disk_size_bytes": 10000000}') == 77

    async def test_what_was_learned_is_known_by_the_id_where_the_path_is_another(
        self, house, front
    ):
        """A puller asks with the path in the bucket, and loads from a local one."""
        house.sizes["m"] = 77
        await front.load("m", "/models/m/files")
        await front.unload("m")
        assert await front.predict("bucket/files", model_id="m") == 77
        assert await front.predict("bucket/files", model_id="other") == 1_000_000

    async def test_what_was_declared_is_known_by_the_id_too(self, house, front):
        house.memory.limit_bytes = None
        house.packages.declared["/models/m/files"] = 7_000_000
        await front.load("m", "/models/m/files")
        assert await front.predict("bucket/files", model_id="m") == 7_000_000

    @pytest.mark.parametrize(
        ("said", "declared"), [("64MiB", 64 * 2**20), ("64KiB", 2**16), ("much", None)]
    )
    def test_what_configs_declare_is_seen_before_the_load(self, tmp_path, said, declared):
        parameter = f'parameters {{ key: "memory_bytes" value {{ string_value: "{said}" }} }}'
        (tmp_path / "m" / "inner").mkdir(parents=True)
        (tmp_path / "m" / "inner" / "config.pbtxt").write_text(CONFIG + parameter)
        (tmp_path / "m" / "other").mkdir()
        (tmp_path / "m" / "other" / "config.pbtxt").write_text(CONFIG)
        roots = [str(tmp_path)]
        assert scan_package(str(tmp_path / "m"), roots, time.monotonic() + 60)[0] == declared

    async def test_what_is_declared_is_never_told_below_the_default(self, house, front):
        house.memory.limit_bytes = None
        house.packages.declared["/m"] = 2**16
        assert await front.load("m") == 1_000_000
        assert await front.predict("bucket/m", model_id="m") == 1_000_000

    @pytest.mark.parametrize(
        ("key", "size"),
        [
            ({"disk_size_bytes": 5_432_100}, 6_790_125),
            ({"disk_size_bytes": 5432}, 1_000_000),
            ({"disk_size_bytes": 1e30}, 1_000_000),
            ({"disk_size_bytes": -5}, 1_000_000),
            ({"disk_size_bytes": "5"}, 1_000_000),
            ({}, 1_000_000),
        ],
    )
    async def test_the_key_tells_the_size_on_disk_before_any_file_is_here(self, front, key, size):
        assert await front.predict("my/model", json.dumps(key)) == size

    async def test_the_factor_is_a_setting(self, house, tmp_path):
        front = Front(house, tmp_path, size_factor=1.35)
        assert await front.predict("x", '{"disk_size_bytes": 5432100}') == 7_333_335

    async def test_files_that_are_here_are_added_up(self, front, tmp_path):
        (tmp_path / "m" / "1").mkdir(parents=True)
        (tmp_path / "m" / "config.pbtxt").write_bytes(b"#" * 100_000)
        (tmp_path / "m" / "1" / "model.bin").write_bytes(b"x" * 900_000)
        assert await front.predict(str(tmp_path / "m")) == 1_250_000
        assert await front.predict(str(tmp_path / "m" / "1" / "model.bin")) == 1_125_000

    async def test_nothing_is_told_of_files_outside_the_model_roots(self, house, tmp_path):
        (tmp_path / "secret").write_bytes(b"x" * 2_000_000)
        (tmp_path / "root").mkdir()
        front = Front(house, tmp_path / "root")
        assert await front.predict(str(tmp_path / "secret")) == 1_000_000

    async def test_a_disk_that_does_not_answer_is_no_reason_to_wait(self, front, tmp_path):
        (tmp_path / "m").write_bytes(b"x" * 2_000_000)
        loop, stuck = asyncio.get_running_loop(), threading.Event()
        waiting = [asyncio.create_task(LOOKUPS.run(stuck.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        begun = loop.time()
        size = await front.predict(str(tmp_path / "m"))
        taken = loop.time() - begun
        stuck.set()
        await asyncio.gather(*waiting)
        assert size == 1_000_000
        assert taken < 0.05

    def test_files_are_not_counted_past_the_time_for_it(self, tmp_path):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "model.bin").write_bytes(b"x" * 1000)
        roots = [str(tmp_path)]
        assert scan_package(str(tmp_path / "m"), roots, time.monotonic() + 60) == (None, 1000)
        assert scan_package(str(tmp_path / "m"), roots, time.monotonic() - 1) == (None, 0)

    async def test_the_size_of_a_model_is_what_is_held(self, house, front):
        house.sizes["m"] = 700
        await front.load("m")
        assert await front.size("m") == 700

    async def test_a_model_that_is_not_loaded_has_no_size(self, front):
        with pytest.raises(ModelNotFound):
            await front.size("m")


class TestStatus:
    async def test_what_a_mesh_is_told(self, house, tmp_path):
        front = Front(house, tmp_path, load_concurrency=3, modelmesh_default_size="2MiB")
        house.others = 50
        await house.open()
        status = await front.status()
        assert status.status == READY
        assert status.capacityInBytes == 10**9 - 50
        assert status.maxLoadingConcurrency == 3
        assert status.modelLoadingTimeoutMs == 30_000
        assert status.defaultModelSizeInBytes == 2 * 2**20
        assert status.runtimeVersion == "9.9"
        assert not status.limitModelConcurrency
        assert not status.allowAnyMethod
        paths = {name: list(info.idInjectionPath) for name, info in status.methodInfos.items()}
        service = "inference.GRPCInferenceService/"
        assert paths == {
            f"{service}{method}": [1]
            for method in (
                "ModelReady",
                "ModelMetadata",
                "ModelInfer",
                "ModelConfig",
                "ModelStatistics",
            )
        }

    async def test_the_version_of_a_triton_that_tells_none_is_a_setting(self, house, tmp_path):
        front = Front(house, tmp_path, modelmesh_runtime_version="v7")
        front.triton.says = ""
        assert (await front.status()).runtimeVersion == "v7"

    async def test_no_longer_load_is_promised_than_is_allowed(self, house, tmp_path):
        front = Front(house, tmp_path, load_timeout_seconds="12.5")
        assert (await front.status()).modelLoadingTimeoutMs == 12_500
        front = Front(house, tmp_path, modelmesh_load_timeout_seconds="7.5")
        assert (await front.status()).modelLoadingTimeoutMs == 7_500

    async def test_it_is_starting_while_the_adapter_is(self, front):
        front.is_ready = False
        assert (await front.status()).status == STARTING

    async def test_whatever_is_loaded_is_gone_before_it_is_ready(self, house, front):
        await front.load("ours")
        await house.load("another-listeners")
        assert (await front.status()).status == READY
        house.check()

    @pytest.mark.slow
    async def test_a_load_under_way_is_ended_and_undone_before_it_is_ready(self, house, front):
        gate = house.steps.hold("load m")
        load = house.begin(front.load("m"))
        await gate.reached.wait()
        load.cancel()
        assert (await front.status()).status == STARTING
        gate.open()
        assert (await front.status()).status == READY
        house.check()

    async def test_a_load_that_has_only_got_its_turn_is_no_exception(self, house, front):
        load = house.begin(front.load("m"))
        assert (await front.status()).status == READY
        await load
        house.check()

    @pytest.mark.slow
    async def test_another_listeners_load_is_ended_and_undone_before_it_is_ready(
        self, house, front
    ):
        gate = house.steps.hold("load m")
        house.begin(house.load("m"))
        await gate.reached.wait()
        assert (await front.status()).status == STARTING
        gate.open()
        assert (await front.status()).status == READY
        house.check()

    async def test_an_unload_that_fails_is_tried_again_the_next_time(self, house, front, caplog):
        await front.load("m")
        house.steps.fail("unload m", BackendTimeout("not now"))
        assert (await front.status()).status == STARTING
        assert [r.reason for r in caplog.records if r.msg == "modelmesh.purge_failed"] == [
            "not now"
        ]
        assert (await front.status()).status == READY
        house.check()

    async def test_a_model_that_is_unloading_is_waited_for(self, house, front):
        await front.load("m")
        gate = house.steps.hold("wait_gone m")
        unload = house.begin(front.unload("m"))
        await gate.reached.wait()
        status = house.begin(front.status())
        await turns_of_the_loop()
        assert not status.done()
        assert house.state("m") is ModelState.UNLOADING
        gate.open()
        await unload
        assert (await status).status == READY

    async def test_the_container_bounds_the_capacity(self, house, tmp_path):
        front = Front(house, tmp_path, modelmesh_memory="512MiB", modelmesh_memory_buffer="12MiB")
        assert (await front.status()).capacityInBytes == 500 * 2**20

    async def test_the_container_alone_will_do(self, tmp_path):
        house = await House().open()
        front = Front(house, tmp_path, modelmesh_memory="6GiB")
        assert (await front.status()).capacityInBytes == 6 * 2**30 - 256 * 2**20

    async def test_memory_that_nobody_knows_is_told_by_name(self, tmp_path):
        front = Front(await House().open(), tmp_path)
        with pytest.raises(BackendError, match="CONTAINER_MEM_REQ_BYTES"):
            await front.status()

    async def test_memory_with_which_no_mesh_starts_is_told_with_the_reason(self, tmp_path):
        front = Front(await House(limit=10**6).open(), tmp_path)
        with pytest.raises(BackendError, match="no mesh starts below"):
            await front.status()
