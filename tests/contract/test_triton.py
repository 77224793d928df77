"""What we believe of Triton's control plane and its texts, and what TritonControl makes of both."""

import asyncio
import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import pytest_asyncio
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from adapter.backend.retry import control_retries
from adapter.backend.triton import TritonControl
from adapter.core.faults import Faults
from adapter.core.model import ModelId, TritonName
from adapter.core.oom import Classifier
from adapter.errors import (
    BackendTimeout,
    BackendUnavailable,
    InferenceFailed,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    OutOfMemory,
    StubDied,
)
from tests.fakes.steps import Steps
from tests.fakes.triton import FakeControlTriton
from tests.running import Client, Reply
from tests.trees import infer_body, write_python_model

real = pytest.mark.triton
FAULTS = Faults(Classifier())
PATIENCE = 30


ENSEMBLE = """\
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step {
  model_name: "%s"
  model_version: -1
  input_map { key: "IN" value: "IN" }
  output_map { key: "OUT" value: "OUT" }
} }
"""


class Shelf:
    """A TritonControl on a real Triton, and packages written straight into its repository."""

    def __init__(self, control: TritonControl, repository: Path, http: str) -> None:
        self.control = control
        self._repository = repository
        self._http = http
        self._names: set[str] = set()

    def put(self, name: str, **bodies: str) -> None:
        self._names.add(name)
        write_python_model(self._repository / name, **bodies)

    def put_ensemble(self, name: str, step: str) -> None:
        self._names.add(name)
        (self._repository / name / "1").mkdir(parents=True)
        (self._repository / name / "config.pbtxt").write_text(ENSEMBLE % step)

    async def load(self, name: str) -> None:
        await self.control.load(TritonName(name), ModelId(name))

    async def unload(self, name: str) -> None:
        await self.control.unload(TritonName(name), ModelId(name))

    async def wait_gone(self, name: str, seconds: float = PATIENCE) -> bool:
        return not await self.control.wait_gone({name}, seconds)

    async def infer(self, name: str, *values: float, body: object = None) -> Reply:
        def ask() -> Reply:
            client = Client(self._http)
            try:
                return client.post(f"/v2/models/{name}/infer", body or infer_body(*values))
            finally:
                client.close()

        return await asyncio.to_thread(ask)

    async def fault(self, name: str, *values: float, body: object = None) -> Exception:
        """What we make of the answer to an inference that fails."""
        reply = await self.infer(name, *values, body=body)
        assert reply.status >= 400
        kind = reply.headers["Content-Type"]
        text = json.loads(reply.body)["error"]
        return FAULTS.of_inference(
            reply.status, kind, text, name=TritonName(name), model_id=ModelId(name)
        )

    async def clear(self) -> None:
        for name in self._names:
            await self.unload(name)
            assert await self.wait_gone(name)
            shutil.rmtree(self._repository / name)
            await self.unload(name)


async def until(met: Callable[[], bool]) -> None:
    """Bounded poll, for what no event tells."""
    for _ in range(PATIENCE * 50):
        if met():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE} s")


def made(address: str, on_retry: Callable[[str], None] = lambda _: None, **limits: float):
    control = TritonControl(
        FAULTS,
        load_timeout_seconds=limits.get("load", 60),
        call_timeout_seconds=limits.get("call", 10),
        on_retry=on_retry,
    )
    control.connect(address)
    return control


@pytest_asyncio.fixture
async def shelf(triton):
    control = made(triton.grpc_address)
    shelf = Shelf(control, triton.repository, triton.http_address)
    yield shelf
    await shelf.clear()
    await control.close()


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


# -- what the fake of the service tests has in common with the real one -------------------------


class FakeShelf:
    def __init__(self) -> None:
        self.control = FakeControlTriton(Steps())

    def put(self, name: str) -> None:
        pass

    def put_ensemble(self, name: str, step: str) -> None:
        self.control.along[name] = {step}

    load, unload, wait_gone = Shelf.load, Shelf.unload, Shelf.wait_gone


@pytest.fixture(params=["fake", pytest.param("real", marks=real)])
def either(request):
    return FakeShelf() if request.param == "fake" else request.getfixturevalue("shelf")


async def test_a_loaded_model_is_ready_and_an_unloaded_one_is_gone(either):
    either.put("m")
    await either.load("m")
    assert "m" in await either.control.ready()
    assert not await either.wait_gone("m", 0.1)
    await either.unload("m")
    assert await either.wait_gone("m")
    assert "m" not in await either.control.ready()


async def test_what_was_never_there_is_gone_and_its_unload_is_no_error(either):
    await either.unload("never")
    assert await either.wait_gone("never", 0)


async def test_of_several_models_those_that_are_left_are_told(either):
    either.put("a")
    either.put("b")
    await either.load("a")
    await either.load("b")
    await either.unload("b")
    assert await either.wait_gone("b")
    assert await either.control.wait_gone({"a", "b", "never"}, 0.1) == {"a"}


async def test_the_steps_of_an_ensemble_come_and_go_with_it(either):
    either.put("step")
    either.put_ensemble("whole", "step")
    await either.load("whole")
    assert {"whole", "step"} <= await either.control.ready()
    await either.unload("whole")
    assert await either.control.wait_gone({"whole", "step"}, PATIENCE) == set()


async def test_a_second_load_changes_nothing(either):
    either.put("m")
    await either.load("m")
    await either.load("m")
    assert "m" in await either.control.ready()
    await either.unload("m")
    assert await either.wait_gone("m")


# -- loads ------------------------------------------------------------------------------------


@real
async def test_a_load_of_a_loaded_model_with_unchanged_files_keeps_its_process(shelf):
    """Python's first import writes __pycache__ beside the model, which counts as a change."""
    shelf.put("m", imports="import os", answer="values = values * 0 + os.getpid()")
    await shelf.load("m")
    await shelf.load("m")
    before = (await shelf.infer("m", 1)).json()["outputs"]
    await shelf.load("m")
    assert (await shelf.infer("m", 1)).json()["outputs"] == before


@real
async def test_a_load_that_fails_tells_tritons_reason(shelf):
    shelf.put("m", initialize='raise ValueError("no weights in this folder")')
    with pytest.raises(LoadFailed, match="no weights in this folder") as caught:
        await shelf.load("m")
    assert caught.value.model_id == "m"
    assert str(caught.value).startswith("load failed for model 'm': version 1 is at UNAVAILABLE")
    assert caught.value.__cause__ is not None


@real
async def test_a_model_that_failed_to_load_is_not_present_and_loads_once_mended(shelf, triton):
    shelf.put("m", initialize='raise ValueError("no weights")')
    with pytest.raises(LoadFailed):
        await shelf.load("m")
    assert "m" not in await shelf.control.present()
    raw = InferenceServerClient(triton.grpc_address)
    (entry,) = [m for m in (await raw.get_model_repository_index()).models if m.name == "m"]
    await raw.close()
    assert entry.state == "UNAVAILABLE"
    assert "no weights" in entry.reason
    shelf.put("m")
    await shelf.load("m")
    assert "m" in await shelf.control.ready()


@real
async def test_a_failure_text_of_300_kb_survives_whole(shelf):
    shelf.put("m", initialize='raise ValueError("begin" + "x" * 300_000 + "end")')
    with pytest.raises(LoadFailed) as caught:
        await shelf.load("m")
    assert "begin" + "x" * 300_000 + "end" in str(caught.value)


@real
async def test_a_load_without_memory_is_told_apart(shelf):
    shelf.put("m", initialize="raise MemoryError()")
    with pytest.raises(OutOfMemory) as caught:
        await shelf.load("m")
    assert caught.value.matched == "MemoryError"


@real
async def test_a_load_of_what_is_not_in_the_repository_fails(shelf):
    with pytest.raises(LoadFailed, match="failed to load 'never', failed to poll from model"):
        await shelf.load("never")


@real
async def test_a_folder_that_goes_while_triton_lists_its_models_is_no_failure(shelf, triton):
    """Another model's unload removes a folder at any time. Triton itself is asked as often, so that
    it is known that such lists fail.
    """
    raw, failed = InferenceServerClient(triton.grpc_address), 0
    stopped = threading.Event()

    def come_and_go(name: str) -> None:
        while not stopped.is_set():
            (triton.repository / name / "1").mkdir(parents=True)
            shutil.rmtree(triton.repository / name)

    with ThreadPoolExecutor(2) as pool:
        going = [pool.submit(come_and_go, name) for name in ("going-1", "going-2")]
        try:
            async with asyncio.timeout(60):
                while failed < 10:
                    await shelf.control.present()
                    try:
                        await raw.get_model_repository_index()
                    except InferenceServerException as error:
                        failed += "failed to stat file" in str(error)
        finally:
            stopped.set()
            await raw.close()
    for each in going:
        each.result()


@real
async def test_two_loads_go_side_by_side(shelf, tmp_path):
    body = f"""
        import time
        begun = time.time()
        time.sleep(2)
        open("{tmp_path}/" + args["model_name"], "w").write(f"{{begun}} {{time.time()}}")
    """
    for name in "ab":
        shelf.put(name, initialize=body)
    await asyncio.gather(shelf.load("a"), shelf.load("b"))
    (a_begun, a_ended), (b_begun, b_ended) = (
        map(float, (tmp_path / name).read_text().split()) for name in "ab"
    )
    assert max(a_begun, b_begun) < min(a_ended, b_ended)


@real
@pytest.mark.races
async def test_a_load_over_grpc_does_not_hold_up_inference_over_http(shelf, tmp_path):
    """Over Triton's HTTP port it does, for as long as the load takes: hence gRPC."""
    shelf.put("quick")
    await shelf.load("quick")
    mark = tmp_path / "begun"
    shelf.put("slow", initialize=f'open("{mark}", "w"); import time; time.sleep(3)')
    load = asyncio.create_task(shelf.load("slow"))
    await until(mark.exists)
    waits = []
    while not load.done():
        begun = time.monotonic()
        assert (await shelf.infer("quick", 1)).status == 200
        waits.append(time.monotonic() - begun)
    await load
    assert len(waits) > 10
    assert max(waits) < 1.5


@real
async def test_a_load_goes_on_in_triton_after_the_time_limit_and_its_unload_waits(shelf, triton):
    shelf.put("m", initialize="import time; time.sleep(3)")
    hasty = made(triton.grpc_address, load=1)
    with pytest.raises(BackendTimeout) as caught:
        await hasty.load(TritonName("m"), ModelId("m"))
    await hasty.close()
    assert caught.value.model_id == "m"
    assert "m" in await shelf.control.present()
    assert "m" not in await shelf.control.ready()
    await shelf.unload("m")
    assert await shelf.wait_gone("m")


# -- unloads ----------------------------------------------------------------------------------


@real
async def test_an_unload_waits_for_the_requests_under_way_and_they_are_answered(shelf, tmp_path):
    shelf.put("m", answer=f'open("{tmp_path}/begun", "w"); import time; time.sleep(1.5)')
    await shelf.load("m")
    answer = asyncio.create_task(shelf.infer("m", 7))
    await until((tmp_path / "begun").exists)
    await shelf.unload("m")
    assert not answer.done()
    assert "m" in await shelf.control.present()
    assert "m" not in await shelf.control.ready()
    assert type(await shelf.fault("m", 1)) is ModelNotFound
    assert await shelf.wait_gone("m")
    assert (await answer).json()["outputs"][0]["data"] == [7]


@real
async def test_a_dead_process_is_told_by_the_inference_and_needs_a_load_before_its_unload(shelf):
    shelf.put("m", answer="import os; os._exit(1)")
    await shelf.load("m")
    assert type(await shelf.fault("m", 1)) is StubDied
    assert "m" in await shelf.control.ready()
    await shelf.unload("m")
    assert not await shelf.wait_gone("m", 2)
    await shelf.load("m")
    await shelf.unload("m")
    assert await shelf.wait_gone("m")


# -- inferences that fail ---------------------------------------------------------------------


@real
async def test_what_a_failed_inference_says_becomes_the_right_error(shelf):
    shelf.put(
        "m",
        answer="""
            import triton_python_backend_utils as pb
            kind = int(values[0])
            if kind == 1:
                raise ValueError("bad label")
            if kind == 2:
                raise MemoryError()
            if kind == 3:
                error = pb.TritonError("no such user", pb.TritonError.NOT_FOUND)
                return pb.InferenceResponse(error=error)
            if kind == 4:
                raise ValueError("unknown label: Stub process 'm_0_0' is not healthy.")
        """,
    )
    await shelf.load("m")
    assert (await shelf.infer("m", 0)).status == 200
    assert type(await shelf.fault("m", 1)) is InferenceFailed
    assert type(await shelf.fault("m", 2)) is OutOfMemory
    assert type(await shelf.fault("m", 3)) is InferenceFailed
    assert type(await shelf.fault("m", 4)) is InferenceFailed
    assert type(await shelf.fault("m", body=b"{")) is InvalidRequest
    assert type(await shelf.fault("m", body={"no": "inputs"})) is InvalidRequest
    wrong = infer_body(1)
    wrong["inputs"][0]["name"] = "CUDA out of memory"
    assert type(await shelf.fault("m", body=wrong)) is InvalidRequest
    assert type(await shelf.fault("never", 1)) is ModelNotFound


# -- no Triton --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_triton_that_is_not_there_is_tried_again_for_a_few_seconds_only(nobody):
    retries: list[str] = []
    control = made(nobody, retries.append)
    begun = time.monotonic()
    with pytest.raises(BackendUnavailable) as caught:
        await control.load(TritonName("m"), ModelId("m"))
    assert time.monotonic() - begun < 8
    assert caught.value.delivered is False
    assert caught.value.model_id == "m"
    assert retries == ["load_model"] * 5
    await control.close()


async def test_a_triton_that_comes_back_in_time_is_not_missed():
    attempts: list[int] = []

    async def call() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise BackendUnavailable("nobody there", delivered=False)
        return "loaded"

    assert await control_retries(lambda: None, wait_seconds=0)(call) == "loaded"
    assert len(attempts) == 3


@pytest.mark.parametrize(
    "error", [BackendUnavailable("broke", delivered=True), LoadFailed("x"), OutOfMemory("x")]
)
async def test_a_call_that_arrived_is_not_sent_again(error):
    """Its load may be what killed Triton."""
    attempts: list[int] = []

    async def call() -> None:
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        await control_retries(lambda: None, wait_seconds=0)(call)
    assert len(attempts) == 1


@pytest.mark.slow
async def test_before_it_is_connected_and_after_it_is_closed_triton_is_not_up(nobody):
    control = TritonControl(FAULTS, load_timeout_seconds=5, call_timeout_seconds=5)
    for _ in range(2):
        with pytest.raises(BackendUnavailable, match="starting or stopping"):
            await control.ready()
        control.connect(nobody)
        await control.close()


@pytest.mark.slow
async def test_a_call_that_is_tried_again_while_the_connection_is_closed_ends_as_unavailable(
    nobody,
):
    retried = asyncio.Event()
    control = made(nobody, lambda _: retried.set())
    load = asyncio.create_task(control.load(TritonName("m"), ModelId("m")))
    await retried.wait()
    await control.close()
    with pytest.raises(BackendUnavailable):
        await load


async def test_waiting_for_a_triton_that_does_not_come_ends(nobody):
    control = made(nobody)
    with pytest.raises(BackendUnavailable, match=r"not live within 0\.2 s"):
        await control.wait_live(0.2)
    assert control.live is False
    await control.close()


@real
async def test_a_triton_that_is_there_is_live_at_once_and_watched(triton):
    control = made(triton.grpc_address)
    assert control.live is False
    back = asyncio.Event()

    async def on_back() -> None:
        back.set()

    watch = asyncio.create_task(control.monitor(on_back))
    await asyncio.wait_for(back.wait(), PATIENCE)
    assert control.live is True
    watch.cancel()
    await asyncio.wait({watch})
    await control.wait_live(1)
    await control.close()
    assert control.live is False


class Relay:
    """Stands between client and Triton, to go away and come back in place of the server itself."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, other_writer]
        ends = self._pump(reader, other_writer), self._pump(other_reader, writer)
        await asyncio.gather(*ends, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            writer.write(chunk)
        writer.close()


@real
async def test_a_watched_triton_that_goes_away_is_noticed_and_so_is_its_return(triton, caplog):
    caplog.set_level(logging.INFO)
    relay = Relay(triton.grpc_address)
    await relay.open()
    control = made(f"127.0.0.1:{relay.port}")
    backs: list[bool] = []

    async def on_back() -> None:
        backs.append(control.live)

    watch = asyncio.create_task(control.monitor(on_back))
    await until(lambda: len(backs) == 1)
    await relay.close()
    await until(lambda: not control.live)
    await until(lambda: "triton.unreachable" in [r.message for r in caplog.records])
    await relay.open()
    await until(lambda: len(backs) == 2)
    assert backs == [True, True]
    watch.cancel()
    await asyncio.wait({watch})
    await control.close()
    await relay.close()
    outage = [r for r in caplog.records if r.message.startswith("triton.")]
    assert [r.message for r in outage] == ["triton.unreachable", "triton.reachable"]
    assert outage[1].seconds > 0


@real
async def test_a_connection_that_breaks_during_a_call_may_have_delivered_it(
    shelf, triton, tmp_path
):
    mark = tmp_path / "begun"
    shelf.put("m", initialize=f'open("{mark}", "w"); import time; time.sleep(2)')
    relay = Relay(triton.grpc_address)
    await relay.open()
    retries: list[str] = []
    control = made(f"127.0.0.1:{relay.port}", retries.append)
    load = asyncio.create_task(control.load(TritonName("m"), ModelId("m")))
    await until(mark.exists)
    await relay.close()
    with pytest.raises(BackendUnavailable) as caught:
        await load
    assert caught.value.delivered is True
    assert retries == []
    await control.close()
