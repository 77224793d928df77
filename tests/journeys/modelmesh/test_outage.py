"""Triton goes and comes back: what a mesh and others are told meanwhile."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as v2

from tests.fakes.mesh import Mesh, is_connection_lost
from tests.grpc_calls import infer_request
from tests.journeys.modelmesh.tritons import KINDS, Elsewhere, write_tritonserver
from tests.processes import tritonserver
from tests.running import COMPLETE, EMBEDDED, EXAMPLES, RunningAdapter, embedded_adapter
from tests.trees import write_python_model

pytestmark = pytest.mark.triton

INFER = "inference.GRPCInferenceService/ModelInfer"
IDENTITY = str(EXAMPLES / "identity")


class Outage:
    """The next tritonserver starts when it is over."""

    def __init__(self, folder: Path) -> None:
        self._held_by = folder / "held"
        self.program = write_tritonserver(folder, held_by=self._held_by)

    def hold(self) -> None:
        self._held_by.touch()

    async def begin(self, adapter: RunningAdapter) -> None:
        self.hold()
        os.kill(tritonserver(adapter), signal.SIGKILL)
        await asyncio.to_thread(adapter.wait_for, "triton.exited")

    def end(self) -> None:
        self._held_by.unlink(missing_ok=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a socket's path has at most 107 bytes."""
    made = Path(tempfile.mkdtemp(prefix="mm-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def root(tmp_path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.fixture
def outage(folder) -> Outage:
    return Outage(folder)


@asynccontextmanager
async def mesh_before(outage: Outage, *flags: str) -> AsyncIterator[tuple[Mesh, RunningAdapter]]:
    """One unix socket for everything, as in the manifest."""
    socket = f"unix:{outage.program.parent}/rt.sock"
    flags = (f"--tritonserver={outage.program}", f"--grpc={socket}", *flags)
    flags = ("--on-triton-restart=forget", COMPLETE, *flags)
    with embedded_adapter(*flags) as adapter:
        mesh = Mesh(socket, socket)
        try:
            await mesh.start()
            yield mesh, adapter
        finally:
            outage.end()
            await mesh.close()


@pytest.fixture
def elsewhere(folder) -> Iterator[Elsewhere]:
    made = Elsewhere(folder)
    made.start()
    yield made
    made.stop()


def request(value: float) -> bytes:
    return infer_request("any", value).SerializeToString()


def value_of(answer: bytes) -> float:
    [raw] = v2.ModelInferResponse.FromString(answer).raw_output_contents
    return float(memoryview(raw).cast("f")[0])


async def code_of(mesh: Mesh, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """Of one inference of `m`, by whoever it is."""
    async with grpc.aio.insecure_channel(mesh.data) as channel:
        call = channel.unary_unary(f"/{INFER}")
        try:
            await call(infer_request("m", 1.0).SerializeToString(), metadata=metadata, timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def wait_for_not_found(mesh: Mesh) -> None:
    """Whoever is no mesh is told so once the exit has been handled, and UNAVAILABLE until then."""
    async with asyncio.timeout(20):
        while (code := await code_of(mesh)) is grpc.StatusCode.UNAVAILABLE:
            pass
    assert code is grpc.StatusCode.NOT_FOUND


async def test_mesh_loses_nothing_while_triton_is_away(outage):
    async with mesh_before(outage) as (mesh, adapter):
        await mesh.load("m", IDENTITY)
        await outage.begin(adapter)

        asked = [asyncio.create_task(mesh.infer(INFER, "m", request(n))) for n in range(8)]
        late = asyncio.create_task(mesh.load("late", IDENTITY))
        assert await code_of(mesh, ("mm-model-id", "m")) is grpc.StatusCode.NOT_FOUND
        await wait_for_not_found(mesh)
        # those that come when the mesh has learned it wait for the load that it has sent
        asked += [asyncio.create_task(mesh.infer(INFER, "m", request(n))) for n in range(8, 12)]
        assert await code_of(mesh, ("mm-model-id", "m")) is grpc.StatusCode.NOT_FOUND
        assert not any(task.done() for task in [*asked, late])

        outage.end()
        assert [value_of(answer) for answer in await asyncio.gather(*asked)] == [*range(12)]
        await late
        assert {model["model_id"] for model in adapter.state()["models"]} == {"m", "late"}
        await mesh.evict("m")
        assert await code_of(mesh) is grpc.StatusCode.NOT_FOUND


async def test_mesh_loses_no_request_when_triton_dies(outage):
    async with mesh_before(outage) as (mesh, adapter):
        await mesh.load("m", IDENTITY)
        callers = Callers(mesh)
        await callers.are_answered()
        os.kill(tritonserver(adapter), signal.SIGKILL)
        await asyncio.to_thread(adapter.wait_for, "triton.restarted")
        await callers.are_answered()
        await callers.leave()
        assert callers.breaks == 0


class Callers:
    """Callers of one model, who ask again when the connection to the adapter breaks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._answered = mesh, asyncio.Condition()
        self.breaks, self._count, self._is_over = 0, 0, False
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(4)]

    async def _ask(self) -> None:
        while not self._is_over:
            try:
                assert value_of(await self._mesh.infer(INFER, "m", request(self._count))) >= 0
            except grpc.aio.AioRpcError as error:
                if not is_connection_lost(error):
                    raise
                self.breaks += 1
                await self._mesh.connected()
                continue
            async with self._answered:
                self._count += 1
                self._answered.notify_all()

    async def are_answered(self) -> None:
        answers = asyncio.create_task(self._until_answered())
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait({answers, *self._tasks}, return_when=first)
        answers.cancel()
        await asyncio.gather(*done)  # a caller that has failed says so

    async def _until_answered(self) -> None:
        async with self._answered:
            seen = self._count
            await self._answered.wait_for(lambda: self._count > seen + 20)

    async def leave(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)


def embedded_at(socket: str, outage: Outage) -> RunningAdapter:
    return RunningAdapter(
        *EMBEDDED, COMPLETE, f"--tritonserver={outage.program}", f"--grpc={socket}"
    )


async def test_mesh_loses_no_request_to_a_kill(outage, folder):
    socket = f"unix:{folder}/rt.sock"
    adapter = await asyncio.to_thread(embedded_at, socket, outage)
    mesh = Mesh(socket, socket)
    try:
        await asyncio.to_thread(adapter.wait_for, "adapter.started")
        await mesh.start()
        await mesh.load("m", IDENTITY)
        await mesh.load("unwanted", IDENTITY)
        callers = Callers(mesh)
        await callers.are_answered()
        outage.hold()
        os.kill(tritonserver(adapter), signal.SIGKILL)
        await mesh.wait_until_lost("m")  # the adapter is killed amid its next load
        adapter.stop(signal.SIGKILL)

        adapter = await asyncio.to_thread(embedded_at, socket, outage)
        await asyncio.to_thread(adapter.wait_for, "adapter.listening", listener="grpc")
        await mesh.connected()
        assert await code_of(mesh, ("mm-model-id", "m")) is grpc.StatusCode.NOT_FOUND
        assert await code_of(mesh, ("mm-model-id-bin", b"m")) is grpc.StatusCode.NOT_FOUND
        assert await code_of(mesh) is grpc.StatusCode.UNAVAILABLE
        late = asyncio.create_task(mesh.load("late", IDENTITY))
        eviction = asyncio.create_task(mesh.evict("unwanted"))
        assert await code_of(mesh, ("mm-model-id", "late")) is grpc.StatusCode.NOT_FOUND
        assert not late.done()

        outage.end()
        await asyncio.gather(late, eviction, callers.are_answered())
        await callers.leave()
        assert {model["model_id"] for model in adapter.state()["models"]} == {"m", "late"}
    finally:
        outage.end()
        await mesh.close()
        assert adapter.stop() == 0, adapter.errors


async def test_model_reloaded_by_adapter_is_never_not_found(outage):
    async with mesh_before(outage, "--on-triton-restart=reload") as (mesh, adapter):
        await mesh.load("m", IDENTITY)
        await outage.begin(adapter)
        assert await code_of(mesh, ("mm-model-id", "m")) is grpc.StatusCode.UNAVAILABLE

        load = asyncio.create_task(mesh.load("m", IDENTITY))
        outage.end()
        await load
        assert value_of(await mesh.infer(INFER, "m", request(3))) == 3


def beside(elsewhere: Elsewhere, socket: str, root: Path = EXAMPLES) -> RunningAdapter:
    return RunningAdapter(
        *("--http=127.0.0.1:0", "--admin=127.0.0.1:0", f"--grpc={socket}"),
        *(f"--triton-{kind}={getattr(elsewhere, kind)}" for kind in KINDS),
        *(f"--repository={elsewhere.repository}", f"--model-roots={root}"),
        "--modelmesh-capacity=4GiB",
    )


async def test_mesh_finds_models_of_a_killed_adapter(elsewhere, folder, root):
    socket, loads = f"unix:{folder}/rt.sock", root / "loads"
    write_python_model(root / "m", initialize=f"open({str(loads)!r}, 'a').write('x')")
    adapter = beside(elsewhere, socket, root)
    mesh = Mesh(socket, socket)
    try:
        await asyncio.to_thread(adapter.wait_for, "adapter.started")
        await mesh.start()
        await mesh.load("m", str(root / "m"))
        adapter.stop(signal.SIGKILL)
        elsewhere.send(signal.SIGSTOP)
        adapter = beside(elsewhere, socket, root)
        await asyncio.to_thread(adapter.wait_for, "adapter.listening", listener="grpc")
        await mesh.connected()
        asked = [asyncio.create_task(mesh.infer(INFER, "m", request(n))) for n in range(4)]
        assert await code_of(mesh, ("mm-model-id", "m")) is grpc.StatusCode.NOT_FOUND
        assert await code_of(mesh) is grpc.StatusCode.UNAVAILABLE
        assert not any(task.done() for task in asked)

        elsewhere.send(signal.SIGCONT)
        assert [value_of(answer) for answer in await asyncio.gather(*asked)] == [*range(4)]
        assert loads.read_text() == "x"
    finally:
        elsewhere.send(signal.SIGCONT)
        await mesh.close()
        assert adapter.stop() == 0, adapter.errors
