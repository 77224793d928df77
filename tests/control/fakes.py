"""A Triton with devices and processes, packages and a store to play with: no file, no waiting.

All of it obeys the loop's clock, which jumps (tests/simulation/loop.py).
"""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from adapter.control.ports import DiskEvictor, GpuBytes
from adapter.core.artifacts import Artifact, ArtifactKey, CacheUse, DiskUse, FetchProgress
from adapter.core.memory import HOST, Bytes, Device, DeviceReading, MemoryReading
from adapter.core.model import (
    ModelId,
    ModelPart,
    ModelSource,
    Package,
    Placement,
    ProcessId,
    Role,
    StagedModel,
    TritonName,
)
from adapter.core.record import ModelRecord
from adapter.errors import (
    ArtifactNotFound,
    BackendUnavailable,
    InferenceFailed,
    InvalidModel,
    LoadFailed,
    MemoryFigures,
    ModelNotFound,
    NoRoom,
    OutOfMemory,
    StubDied,
)
from adapter.runtime.clock import run_to_end

MIB = 2**20
GPU = Device("GPU-0")
OTHER_GPU = Device("GPU-1")
_ARTIFACT_BYTES = 100


@dataclass
class Script:
    """Says what a package does in Triton."""

    size: int | Mapping[Device, int] = 100  # MiB, of GPU if it is a number
    declared: int | None = None  # MiB
    files: int | None = None  # MiB; half of the size if None
    load_seconds: float = 1.0
    fault: str = ""  # of its files
    failure: str = ""  # of its load
    oom_kills: int = 0  # by the kernel, as its load fails
    load_ends_triton: bool = False
    hangs: bool = False
    is_python: bool = False
    request_runs_out: bool = False
    has_warm_up: bool = False  # its config has a model_warmup
    reported: int | None = None  # MiB of GPU-0, by Triton's own report
    gpus: frozenset[int] | None = frozenset({0})
    leaves_gpu_open: bool = False

    def bytes_on(self, gpu: int | None) -> Bytes:
        """Return what a model of the package takes, once it is loaded."""
        if isinstance(self.size, int):
            device = GPU if gpu is None else Device(f"GPU-{gpu}")
            return {device: self.size * MIB}
        return {device: mib * MIB for device, mib in self.size.items()}


@dataclass
class Staged:
    """A package in Triton's repository."""

    package: Package
    gpu: int | None


@dataclass(eq=False)
class Loaded:
    """A model in Triton."""

    folder: str
    script: Script
    size: Bytes
    process: ProcessId | None = None
    has_died: bool = False
    killed: asyncio.Event = field(default_factory=asyncio.Event)


class FakeTriton:
    """An embedded Triton with its devices and processes; also its memory reader."""

    def __init__(self, scripts: dict[str, Script], device_mib: int, devices: int) -> None:
        self.scripts = scripts
        self.device_bytes = device_mib * MIB
        self.devices = [Device(f"GPU-{number}") for number in range(devices)]
        self.base_bytes = 10 * MIB  # of Triton itself, on each device
        self.growth: Counter[Device] = Counter()
        self.version = "2.51.0"
        self.live = True
        self.lives = 1
        self.pid: int | None = 100
        self.load_threads = 4
        self.restart_seconds = 2.0
        self.end_seconds = 0.0  # from its closed connections to the end of its process
        self.lag_seconds = 0.0
        self.has_readings = True
        self.oom_kills = 0  # by the kernel
        self.repository: dict[TritonName, Staged] = {}
        self.loading: dict[TritonName, Loaded] = {}
        self.loaded: dict[TritonName, Loaded] = {}
        self.unloading: dict[TritonName, Loaded] = {}
        self.exits = 0
        self.unload_seconds = 0.2
        self.answer_seconds = 0.01  # until it answers the call of an unload
        self._pids = count(101)
        self._exited = asyncio.Event()  # of this life
        self._cut = asyncio.Event()  # of this connection
        self._tasks: set[asyncio.Task[None]] = set()
        self._readings: list[tuple[float, dict[Device, int]]] = []

    # -- loads and unloads ------------------------------------------------------------------

    async def load(self, name: TritonName, model_id: ModelId) -> None:
        assert name not in self.loading, f"{name} is loaded twice"
        assert name not in self.loaded, f"{name} is loaded already"
        staged = self.repository[name]
        script = self.scripts[staged.package.root]
        process = ProcessId(next(self._pids), 0) if script.is_python else None
        model = Loaded(staged.package.root, script, script.bytes_on(staged.gpu), process)
        self.unloading.pop(name, None)
        self.loading[name] = model
        # Triton goes on with a load whose caller has left, or whose connection was cut
        task = asyncio.create_task(self._load(name, model))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        done = asyncio.Event()
        task.add_done_callback(lambda _: done.set())
        await self._work(math.inf, done)
        await task

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _load(self, name: TritonName, model: Loaded) -> None:
        script = model.script
        try:
            seconds = math.inf if script.hangs else script.load_seconds
            await _wait_for_any([self._exited, model.killed], seconds)
            if self.loading.get(name) is not model:
                raise BackendUnavailable("connection closed", delivered=True)
            if model.killed.is_set():
                raise LoadFailed(f"{name}: its process was killed", suspected="process ended")
            if script.load_ends_triton:
                self.exit()
                raise BackendUnavailable("connection closed", delivered=True)
            if script.failure:
                self.oom_kills += script.oom_kills
                suspected = "process ended" if script.oom_kills else None
                raise LoadFailed(script.failure, suspected=suspected)
            for device, size in model.size.items():
                if self.used[device] + size > self.device_bytes:
                    raise OutOfMemory(
                        f"{name}: CUDA out of memory",
                        matched="CUDA out of memory",
                        pattern="cuda",
                        figures=MemoryFigures(size),
                        was_tried=True,
                    )
            self.loaded[name] = model
        finally:
            if self.loading.get(name) is model:
                del self.loading[name]

    async def unload(self, name: TritonName, model_id: ModelId) -> None:
        await self._work(self.answer_seconds)
        while name in self.loading:
            await self._work(0.05)
        model = self.loaded.pop(name, None)
        if model is None:
            return
        self.unloading[name] = model
        if not model.has_died:  # Triton waits for ever for a process that has died
            task = asyncio.create_task(self._unload(name, model))
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    async def _unload(self, name: TritonName, model: Loaded) -> None:
        await asyncio.sleep(self.unload_seconds)
        if self.unloading.get(name) is model and not model.has_died:
            del self.unloading[name]

    async def wait_gone(self, names: Collection[str], seconds: float) -> set[str]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            remaining = set(names) & await self.present()
            if not remaining or loop.time() >= deadline:
                return remaining
            await asyncio.sleep(0.1)

    async def ready(self) -> set[str]:
        await self._work(0.01)
        return set(self.loaded)

    async def being_loaded(self) -> set[str]:
        await self._work(0.01)
        return set(self.loading)

    async def present(self) -> set[str]:
        await self._work(0.01)
        return {*self.loading, *self.loaded, *self.unloading}

    async def warm_up(self, name: TritonName, model_id: ModelId, seconds: float) -> str | None:
        await self._work(0.1)
        model = self.loaded[name]
        if model.has_died:
            raise StubDied("Stub process is not healthy.", suspected="not healthy")
        return None

    async def gpu_bytes(self, name: TritonName) -> GpuBytes:
        reported = self.loaded[name].script.reported
        return {} if reported is None else {0: reported * MIB}

    async def unclassified(self, name: TritonName) -> None:
        await self._work(0.001)

    # -- processes --------------------------------------------------------------------------

    def _models(self, name: TritonName) -> list[Loaded]:
        tables = (self.loading, self.loaded, self.unloading)
        return [table[name] for table in tables if name in table]

    are_seen = True
    more_instances: Sequence[str] = ()  # of each python model, with a live process

    async def models(self) -> frozenset[TritonName]:
        names = [*self.loading, *self.loaded, *self.unloading]
        instances = await self.instances(names)
        return frozenset(name for name, living in instances.items() if living)

    async def instances(
        self, names: Collection[TritonName]
    ) -> Mapping[TritonName, Sequence[str | None]]:
        await asyncio.sleep(0.001)
        found: dict[TritonName, list[str | None]] = {}
        for name in names:
            models = [model for model in self._models(name) if model.process is not None]
            if models:
                living = [f"{name}_0" for model in models if not model.has_died]
                found[name] = [*living, *self.more_instances]
        return found

    async def claim(self, names: Collection[TritonName]) -> frozenset[ProcessId]:
        models = [model for name in names for model in self._models(name)]
        return frozenset(
            model.process for model in models if model.process is not None and not model.has_died
        )

    daemons: frozenset[ProcessId] = frozenset()  # processes of models that Triton no longer lists

    async def abandoned(self) -> frozenset[ProcessId]:
        return self.daemons

    async def kill(self, processes: Collection[ProcessId]) -> frozenset[ProcessId]:
        killed = set(self.daemons.intersection(processes))
        self.daemons -= killed
        for table in (self.loading, self.loaded, self.unloading):
            for model in table.values():
                if model.process in processes and not model.has_died:
                    killed.add(model.process)
                    model.has_died = True
                    model.killed.set()
        return frozenset(killed)

    async def end_loads(self, names: Collection[TritonName]) -> bool:
        return bool(await self.kill(await self.claim(names)))  # also of models that are loaded

    async def wait(
        self,
        names: Collection[TritonName],
        processes: Collection[ProcessId],
        limit_seconds: float,
    ) -> frozenset[ProcessId]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_seconds
        while True:
            tables = [*self.loading, *self.loaded, *self.unloading]
            living = await self.claim(names) | (await self.claim(tables) & frozenset(processes))
            if not living or loop.time() >= deadline:
                return living
            await asyncio.sleep(0.1)

    async def free_regions(self, names: Collection[TritonName]) -> int:
        return 0

    exit_reason = "was killed by SIGKILL"

    async def restart(self, reason: str) -> None:
        self.exit()

    def kill_process_of(self, name: TritonName) -> None:
        """Have the process of a python model die."""
        for model in self._models(name):
            model.has_died = True

    # -- memory -----------------------------------------------------------------------------

    @property
    def used(self) -> dict[Device, int]:
        """Return the bytes in use, by device."""
        used = {device: self.base_bytes + self.growth[device] for device in self.devices}
        if self.pid is None:
            return dict.fromkeys(self.devices, 0)
        for model in [*self.loaded.values(), *self.unloading.values()]:
            if model.has_died:
                continue  # its process has freed it
            for device, size in model.size.items():
                used[device] += size
        return used

    async def read(self) -> MemoryReading | None:
        await asyncio.sleep(0.002)
        if not self.has_readings:
            return None
        now = asyncio.get_running_loop().time()
        self._readings.append((now, self.used))
        shown = [used for at, used in self._readings if at <= now - self.lag_seconds]
        used = shown[-1] if shown else self._readings[0][1]
        self._readings = [each for each in self._readings if each[0] >= now - self.lag_seconds - 1]
        devices = {
            device: DeviceReading(self.device_bytes, used[device], number)
            for number, device in enumerate(self.devices)
        }
        host = devices.get(HOST)
        available_bytes = None if host is None else host.limit_bytes - host.used_bytes
        return MemoryReading(
            devices,
            "nvml",
            self.lag_seconds,
            oom_kills=self.oom_kills,
            available_bytes=available_bytes,
        )

    # -- requests and exits -----------------------------------------------------------------

    async def infer(self, record: ModelRecord, seconds: float = 0.1) -> str:
        """Answer one request; return the folder whose model has computed it."""
        if not self.live:
            raise BackendUnavailable("connection refused", delivered=False)
        model = self.loaded.get(record.name)
        if model is None:
            raise ModelNotFound(f"{record.name} is not found", model_id=record.id)
        if model.has_died:
            raise StubDied("Stub process is not healthy.", suspected="not healthy")
        await self._work(seconds)
        if model.script.request_runs_out:
            raise OutOfMemory(
                "CUDA out of memory. Tried to allocate 500 MiB",
                matched="CUDA out of memory",
                pattern="cuda",
                figures=MemoryFigures(500 * MIB),
                was_tried=True,
                model_id=record.id,
            )
        if self.loaded.get(record.name) is not model and not model.has_died:
            raise InferenceFailed(f"{record.name} was unloaded under a request")
        return model.folder

    def exit(self) -> None:
        """Exit, and be live again a moment later."""
        if self.pid is None:
            return
        self.live = False
        loop = asyncio.get_running_loop()
        if self.end_seconds:
            loop.call_later(self.end_seconds, self._end)
        else:
            self._end()
        self.exits += 1
        self.loading.clear()
        self.loaded.clear()
        self.unloading.clear()
        self.growth.clear()
        self._cut_connections()
        exited = self._exited
        self._exited = asyncio.Event()
        exited.set()
        loop.call_later(self.end_seconds + self.restart_seconds, self._start)

    def _end(self) -> None:
        self.pid = None

    def _start(self) -> None:
        self.lives += 1
        self.pid = 100 + 1000 * self.lives
        self.live = True

    async def disconnect(self, seconds: float) -> None:
        """Be unreachable for a moment, with all models kept."""
        self.live = False
        self._cut_connections()
        await asyncio.sleep(seconds)
        self.lives += 1
        self.live = True

    def _cut_connections(self) -> None:
        cut = self._cut
        self._cut = asyncio.Event()
        cut.set()

    async def _work(self, seconds: float, done: asyncio.Event | None = None) -> None:
        """Take some seconds, or until `done`. Raises BackendUnavailable if Triton exits, or is
        away.
        """
        if not self.live:
            raise BackendUnavailable("connection refused", delivered=False)
        cut = self._cut
        await _wait_for_any([cut] if done is None else [cut, done], seconds)
        if cut.is_set():
            raise BackendUnavailable("connection closed", delivered=True)


async def _wait_for_any(events: list[asyncio.Event], seconds: float) -> None:
    """Wait for the first of these events, for so many seconds at most."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        limit_seconds = None if seconds == math.inf else seconds
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait(waits, timeout=limit_seconds, return_when=first)
    finally:
        for wait in waits:
            wait.cancel()


class FakePackages:
    """Places packages in the fake Triton's repository."""

    def __init__(self, triton: FakeTriton) -> None:
        self.left_behind: list[StagedModel] = []
        self.confirm_seconds = 0.001
        self.prepare_seconds = 0.01
        self.remove_seconds = 0.001
        self.confirmed: dict[TritonName, Bytes] = {}
        self._prepared: set[TritonName] = set()  # with a folder, as of an archive
        self._triton = triton

    async def prepare(self, name: TritonName, model_id: ModelId, source: ModelSource) -> Package:
        await asyncio.sleep(self.prepare_seconds)
        script = self._triton.scripts[source.url]
        if script.fault:
            raise InvalidModel(script.fault, model_id=model_id)
        self._prepared.add(name)
        total = sum(script.bytes_on(None).values())
        files_bytes = total // 2 if script.files is None else script.files * MIB
        config_text = "model_warmup {}" if script.has_warm_up else ""
        part = ModelPart(source.url, Role.ENTRY, config_text, ())
        return Package(
            root=source.url,
            parts=(part,),
            size_bytes=files_bytes,
            declared_bytes=None if script.declared is None else script.declared * MIB,
            content_key=source.url,
            gpus=script.gpus,
            leaves_gpu_open=script.leaves_gpu_open,
            processes=1,
        )

    async def has_changed(self, source: ModelSource, content_key: str, since: float) -> bool:
        return False

    async def place(
        self,
        name: TritonName,
        model_id: ModelId,
        package: Package,
        gpu: int | None = None,
        **_: object,
    ) -> Placement:
        await asyncio.sleep(0.001)
        assert name in self._prepared, f"{name} is placed without its files"
        known = self._triton.repository.get(name)
        is_other = known is not None and known.package.root != package.root
        assert not is_other, f"{name} is placed over another package"
        self._triton.repository[name] = Staged(package, gpu)
        return Placement((name,))

    async def confirm(
        self, name: TritonName, source: ModelSource, content_key: str, held: Bytes
    ) -> None:
        await asyncio.sleep(self.confirm_seconds)
        self.confirmed[name] = dict(held)

    async def remove(self, name: TritonName) -> None:
        await asyncio.sleep(self.remove_seconds)
        assert name not in self._triton.loaded, f"{name} is removed under Triton"
        self._prepared.discard(name)
        self._triton.repository.pop(name, None)

    async def set_aside(self, name: TritonName) -> str:
        return ""

    async def discard(self, kept: str) -> None:
        pass

    async def staged(self) -> Sequence[StagedModel]:
        return self.left_behind


class FakeStore:
    """A bucket; its folder of a key and version is `key@version`."""

    def __init__(self, keys: Collection[str]) -> None:
        self.keys = set(keys)
        self.versions: Counter[str] = Counter()
        self.fetch_seconds = 1.0
        self.answer_seconds = 0.01  # until it says whether a version is current
        self.fetches = 0
        self.questions = 0  # whether a version is current
        self.kept: Counter[str] = Counter()
        self.idle_seconds: dict[str, float] = {}  # since the last use, at the last release
        self.disk_limit: int | None = None  # artifacts at a time
        self._on_disk: set[str] = set()

    async def fetch(
        self,
        key: ArtifactKey,
        progress: FetchProgress,
        *,
        evictor: DiskEvictor | None = None,
        callers: Collection[str] = (),
    ) -> tuple[Artifact, CacheUse]:
        await asyncio.sleep(0.01)
        if key.path not in self.keys:
            raise ArtifactNotFound(f"there is no {key}")
        folder = f"{key.path}@{self.versions[key.path] + 1}"
        use = CacheUse.DISK if folder in self._on_disk else CacheUse.MISS
        if use is CacheUse.MISS:
            if self.disk_limit is not None:
                # the real cache does this in a thread, which nobody can cancel
                await run_to_end(self._make_room(self.disk_limit, evictor))
            self.fetches += 1
            await asyncio.sleep(self.fetch_seconds)
            self._on_disk.add(folder)
        self.kept[folder] += 1
        return Artifact(key, folder, folder, _ARTIFACT_BYTES), use

    async def _make_room(self, limit: int, evictor: DiskEvictor | None) -> None:
        if evictor is not None and evictor.unevictable_bytes() >= limit * _ARTIFACT_BYTES:
            raise NoRoom("all files are of models that stay")
        for _ in range(40):
            if len(+self.kept) < limit:
                return
            if evictor is None or not evictor.can_unload_later:
                break
            if not await evictor.unload_one(1):
                await asyncio.sleep(0.25)
        raise NoRoom("all files are in use")

    def release(self, artifact: Artifact, *, idle_seconds: float = 0.0) -> None:
        self.idle_seconds[artifact.folder] = idle_seconds
        self.kept[artifact.folder] -= 1
        assert self.kept[artifact.folder] >= 0, artifact

    def disk(self) -> DiskUse:
        return DiskUse(0, 0, 0, 0, 0)

    def unused(self) -> tuple[int, int]:
        return 0, 0

    async def is_current(self, artifact: Artifact) -> bool:
        self.questions += 1
        await asyncio.sleep(self.answer_seconds)
        path = artifact.key.path
        if path not in self.keys:
            raise ArtifactNotFound(f"there is no {artifact.key}")
        return artifact.folder == f"{path}@{self.versions[path] + 1}"

    async def find(self, key: ArtifactKey) -> ArtifactKey | None:
        await asyncio.sleep(0.01)
        return key if key.path in self.keys else None
