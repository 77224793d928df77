"""What the adapter makes of a Triton that is newer than the one of the other tests."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from adapter.core import versions
from adapter.core.calls import RpcCall
from adapter.core.model import ModelId, Payload, TritonName
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.errors import BackendUnavailable, InvalidRequest
from adapter.packages.staging import Packages
from adapter.triton.client import TritonControl
from adapter.triton.grpc import GrpcDataPlane
from tests.fakes.unread import unread
from tests.fakes.versioned_triton import VersionedTriton, serving
from tests.packages.staged import make, place

OLD, NEW = "2.51.0", "2.73.0dev"
M = TritonName("m")
FAULTS = Faults(Classifier(()))
LABELLED = 'backend: "python" output { name: "OUT" label_filename: "labels.txt" }'

both = pytest.mark.parametrize("version", [OLD, NEW])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "repository").mkdir()
    return tmp_path / "repository"


@asynccontextmanager
async def control_of(triton: VersionedTriton, *, is_upload: bool = False):
    control = TritonControl(
        FAULTS,
        load_timeout_seconds=10,
        call_timeout_seconds=10,
        payload=(lambda _: Payload("{}", {})) if is_upload else None,
    )
    async with serving(triton) as address:
        control.connect(address)
        await control.wait_live(10)
        try:
            yield control
        finally:
            await control.close()


@both
async def test_labelled_model_loads_from_linked_folder(version, tmp_path, repository):
    source = make(tmp_path / "models" / "m", LABELLED)
    (source / "labels.txt").write_text("cat\n")
    await place(Packages(repository, [tmp_path / "models"]), "m", source)
    async with control_of(VersionedTriton(version, repository)) as control:
        await control.load(M, ModelId("m"))
        assert await control.ready() == {"m"}


@both
async def test_an_upload_comes_and_goes(version, repository):
    async with control_of(VersionedTriton(version, repository), is_upload=True) as control:
        await control.load(M, ModelId("m"))
        assert await control.ready() == {"m"}
        await control.unload(M, ModelId("m"))
        assert await control.wait_gone({"m"}, 5) == set()
        assert await control.ready() == set()


@both
@pytest.mark.parametrize("what", ["not_ready", "dead"])
async def test_unready_upload_is_loaded_all_the_same(version, what, repository):
    """By its own `is_ready`, or as its process has died: it keeps its memory, and its name."""
    triton = VersionedTriton(version, repository)
    async with control_of(triton, is_upload=True) as control:
        await control.load(M, ModelId("m"))
        getattr(triton, what).add("m")
        assert await control.ready() == {"m"}
        assert await control.wait_gone({"m"}, 0) == {"m"}
        await control.load(M, ModelId("m"))  # not answered by what was there before
        assert "m" not in triton.dead


@pytest.mark.parametrize("version", ["2.70.0", "3.0", "", "x"])
def test_unknown_version_is_taken_for_newest(version):
    assert versions.has(versions.LINKS, version)
    assert not versions.has(versions.LINKS, "2.69.0")


async def test_returning_triton_may_have_another_version(tmp_path):
    address = f"unix:{tmp_path / 'grpc.sock'}"
    control = TritonControl(FAULTS, load_timeout_seconds=10, call_timeout_seconds=10)
    control.connect(address)
    for version in (OLD, NEW):
        async with serving(VersionedTriton(version, tmp_path), address):
            await control.wait_live(10)
            assert control.version == version
        with pytest.raises(BackendUnavailable):
            await control.wait_live(0)
    await control.close()


@asynccontextmanager
async def dataplane_to(triton: VersionedTriton):
    dataplane = GrpcDataPlane(
        FAULTS,
        timeout_seconds=10,
        max_message_bytes=2**20,
        unread=unread(),
        takes_cancels=lambda: versions.survives_cancels(triton.version),
    )
    async with serving(triton) as address:
        dataplane.connect(address)
        try:
            yield dataplane
        finally:
            triton.answers.set()
            await dataplane.close()


async def test_left_call_is_cancelled_where_triton_survives(repository):
    triton = VersionedTriton(NEW, repository)
    async with dataplane_to(triton) as dataplane:
        asking = asyncio.ensure_future(dataplane.call(RpcCall("ModelInfer", (), None), b"", None))
        await triton.asked.wait()
        asking.cancel()
        await asyncio.wait_for(triton.cancelled.wait(), 10)
        assert not triton.ended.is_set()
        await dataplane.call(RpcCall("ServerLive", (), None), b"", None)


@pytest.mark.parametrize("version", ["2.51.0", "2.58.1", "", "x"])
def test_only_known_versions_survive_cancels(version):
    assert not versions.survives_cancels(version)
    assert versions.survives_cancels("2.59.0")
    assert versions.survives_cancels("3.0")


@pytest.mark.parametrize("version", [OLD, "2.58.0", ""])
async def test_old_triton_gets_no_cancel(version, repository):
    triton = VersionedTriton(version, repository)
    async with dataplane_to(triton) as dataplane:
        asking = asyncio.ensure_future(dataplane.call(RpcCall("ModelInfer", (), None), b"", None))
        await triton.asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        # the call went on: Triton still takes another on the same connection, and no cancel came
        await dataplane.call(RpcCall("ServerLive", (), None), b"", None)
        assert not triton.cancelled.is_set()
        assert not triton.ended.is_set()


@pytest.mark.parametrize(("version", "code"), [(OLD, None), (NEW, InvalidRequest)])
async def test_closed_shared_memory_is_refused_naming_option(version, code, repository):
    call = RpcCall("SystemSharedMemoryStatus", (), None)
    async with dataplane_to(VersionedTriton(version, repository)) as dataplane:
        if code is None:
            await dataplane.call(call, b"", None)
        else:
            with pytest.raises(code, match="--allow-client-shm=true"):
                await dataplane.call(call, b"", None)
