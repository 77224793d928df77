"""The doubles under the tests of the control plane do what the real parts do: both are asked.

Triton's own double is held to a real Triton in test_triton.py.
"""

import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from adapter.control.door import Lease
from adapter.control.ports import MemoryReader, Packages, SizeStore
from adapter.core.memory import HOST
from adapter.core.model import ModelId, ModelSource, Placement, StagedModel, TritonName
from adapter.core.record import LoadedFor, ModelRecord
from adapter.errors import BackendError, InferenceFailed
from adapter.packages.sizes_file import LearnedFile
from adapter.packages.staging import Packages as RealPackages
from tests.fakes.calls import Calls
from tests.fakes.control import ControlOnFakes
from tests.fakes.lease import FakeLease
from tests.fakes.memory import FakeMemory
from tests.fakes.memory_place import Place
from tests.fakes.packages import FakePackages, FakeStore
from tests.packages.staged import CONFIG

NAME, ID = TritonName("m"), ModelId("the model")
MIB = 2**20

both = pytest.mark.parametrize("kind", ["fake", "real"])


# -- packages ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Staging:
    """Packages, one that is good, and a way to have the next `place` refused by the disk."""

    packages: Packages
    good: ModelSource
    break_disk: Callable[[], None]

    async def staged(self) -> list[StagedModel]:
        return list(await self.packages.staged())

    async def load(self) -> Placement:
        package = await self.packages.prepare(NAME, ID, self.good)
        return await self.packages.place(NAME, ID, package)


def fake_staging(_: Path) -> Staging:
    calls = Calls()
    return Staging(
        FakePackages(calls),
        ModelSource("/m"),
        lambda: calls.fail("place m", BackendError("the disk refuses")),
    )


def real_staging(root: Path) -> Staging:
    """Of an archive, which is unpacked before it is looked at."""
    folder, repository = root / "m", root / "repository"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text("def auto_complete_config(config): ...")
    (folder / "config.pbtxt").write_text(CONFIG)
    with tarfile.open(root / "m.tar", "w") as archive:
        archive.add(folder, ".")
    repository.mkdir()

    def take_the_folder_away() -> None:
        """And put a file in its place, so that root is refused as well."""
        repository.rename(root / "elsewhere")
        repository.touch()

    return Staging(
        RealPackages(repository, [root]), ModelSource(str(root / "m.tar")), take_the_folder_away
    )


STAGINGS = {"fake": fake_staging, "real": real_staging}


@pytest.fixture
def staging(kind: str, tmp_path: Path) -> Staging:
    return STAGINGS[kind](tmp_path)


@both
async def test_what_was_looked_at_says_what_it_takes(staging: Staging) -> None:
    package = await staging.packages.prepare(NAME, ID, staging.good)
    assert package.size_bytes > 0
    assert package.declared_bytes is None
    assert package.content_key
    assert (package.warnings, package.gpus) == ((), None)


@both
async def test_the_same_package_has_the_same_key(staging: Staging) -> None:
    keys = {(await staging.packages.prepare(NAME, ID, staging.good)).content_key for _ in range(2)}
    assert len(keys) == 1


@both
async def test_single_model_is_placed_under_its_name(staging: Staging) -> None:
    assert await staging.load() == Placement((NAME,))


@both
async def test_prepared_or_placed_model_is_not_loaded(staging: Staging) -> None:
    begun = StagedModel(NAME, ID, Placement((NAME,)))
    package = await staging.packages.prepare(NAME, ID, staging.good)
    assert await staging.staged() == [begun]
    await staging.packages.place(NAME, ID, package)
    assert await staging.staged() == [begun]


@both
async def test_confirmed_package_keeps_all_that_was_said(staging: Staging) -> None:
    placement = await staging.load()
    for held in ({HOST: 5}, {HOST: 7}):
        await staging.packages.confirm(NAME, staging.good, "key", held)
        loaded = StagedModel(
            NAME,
            ID,
            placement,
            is_loaded=True,
            source=staging.good,
            can_load_again=True,
            content_key="key",
            held=held,
        )
        assert await staging.staged() == [loaded]


@both
async def test_nothing_is_confirmed_of_what_is_not_there(staging: Staging) -> None:
    await staging.packages.confirm(NAME, staging.good, "key", {})
    assert await staging.staged() == []


@both
async def test_removed_package_may_come_again(staging: Staging) -> None:
    for _ in range(2):
        await staging.load()
        await staging.packages.confirm(NAME, staging.good, "key", {})
        await staging.packages.remove(NAME)
        assert await staging.staged() == []
    await staging.packages.remove(NAME)  # nothing is there: that is no error


@both
async def test_refusing_disk_is_a_backend_error(staging: Staging) -> None:
    package = await staging.packages.prepare(NAME, ID, staging.good)
    staging.break_disk()
    with pytest.raises(BackendError):
        await staging.packages.place(NAME, ID, package)


# -- what was learned of sizes -------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    store: SizeStore
    last: Callable[[], object]


@pytest.fixture
def kept(kind: str, tmp_path: Path) -> Kept:
    if kind == "fake":
        fake = FakeStore(Calls())
        return Kept(fake, lambda: fake.saved[-1])
    file = LearnedFile(tmp_path / "sizes.json")
    return Kept(file, file.load)


@both
async def test_what_was_saved_last_is_kept(kept: Kept) -> None:
    for data in ({"packages": [["key", {"host": 7}]], "version": 1}, {"packages": []}):
        await kept.store.save(data)
        assert kept.last() == data


# -- memory --------------------------------------------------------------------------------------


@dataclass
class Seen:
    """A reader of 1000 MiB, of which `used` are taken, all by the model m."""

    reader: MemoryReader
    take: Callable[[int], None]
    lose: Callable[[], None] = field(repr=False)


def fake_memory() -> Seen:
    taken = [0]
    fake = FakeMemory(Calls(), lambda: taken[0])
    fake.limit_bytes = 1000 * MIB

    def lose() -> None:
        fake.limit_bytes = None

    return Seen(fake, lambda count: taken.__setitem__(0, count), lose)


def real_memory(place: Place, root: Path) -> Seen:
    place.host._limit = 1000 * MIB
    place.host._list_pids = lambda: place.pids

    def take(count: int) -> None:
        pages = count // 4096
        (root / "proc/7/statm").write_text(f"{pages} {pages} 1 0 0 0 0")
        (root / "proc/7/smaps_rollup").write_text(f"Pss: {count // 1024} kB")

    return Seen(place.choose("host"), take, place.pids.clear)


@pytest_asyncio.fixture
async def seen(kind: str, tmp_path: Path) -> AsyncIterator[Seen]:
    if kind == "fake":
        yield fake_memory()
        return
    place = Place(tmp_path)
    yield real_memory(place, tmp_path)
    await place.close()


@both
async def test_a_reading_is_what_is_taken_now(seen: Seen) -> None:
    for taken in (300 * MIB, 100 * MIB):
        seen.take(taken)
        reading = await seen.reader.read()
        assert reading is not None
        assert {d: (r.limit_bytes, r.used_bytes) for d, r in reading.devices.items()} == {
            HOST: (1000 * MIB, taken)
        }
        assert reading.lag_seconds == 0


@both
async def test_no_reading_where_nothing_is_seen(seen: Seen) -> None:
    await seen.reader.read()
    seen.lose()
    assert await seen.reader.read() is None


# -- leases --------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def lease(kind: str) -> AsyncIterator[Lease]:
    if kind == "fake":
        yield FakeLease(ModelRecord(ID, NAME, ModelSource("/m"), LoadedFor.PLATFORM))
        return
    fakes = await ControlOnFakes().open()
    await fakes.load("m")
    yield fakes.control.lease(ModelId("m"))
    await fakes.close()


@both
async def test_a_lease_counts_from_begin_to_end(lease: Lease) -> None:
    usage = lease.record.usage
    lease.begin()
    assert (lease.is_held(), lease.is_lost(), usage.in_flight) == (True, False, 1)
    lease.abandon()
    assert (lease.is_held(), usage.in_flight, usage.abandoned) == (False, 1, 1)
    assert lease.end() is None
    assert (usage.in_flight, usage.abandoned) == (0, 0)
    assert lease.end() is None
    assert usage.in_flight == 0


@both
async def test_a_lease_returns_the_error_to_send(lease: Lease) -> None:
    error = InferenceFailed("no")
    with pytest.raises(InferenceFailed), lease:
        raise error
    assert lease.record.usage.in_flight == 0
    assert lease.end(error) is error
    assert lease.note_failure(error) is error
    assert await lease.judge(error) is error
