"""GPUs of the test's making that python models take memory from, and that two readers show.

The book is a folder: a file for each allocation, named by the process that made it, so that it is
free again when the process has ended, however it did. Triton's metrics page shows it late, NVML
(tests/fakes/driver) at once.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.loop_thread import Run, loop_in_thread
from tests.fakes.metrics_endpoint import MetricsEndpoint
from tests.processes import beside, is_alive
from tests.running import RunningAdapter
from tests.trees import CONFIG, write_python_model

FOLDER = "SCRIPTED_GPUS"
_SAMPLE_SECONDS = 0.05

# Within a model: `take(gpu, mebibytes)` or fail in torch's words, `give_back()` what it took.
_ALLOCATOR = """\
import os, pathlib

def take(gpu, mebibytes):
    used = 0
    for held in gpu.glob("*.held"):
        pid = held.name.partition("-")[0]
        if pathlib.Path("/proc", pid).exists() or pid == "others":
            used += int(held.read_text() or 0)
    total = int((gpu / "total").read_text())
    if used + mebibytes * 2**20 > total:
        raise RuntimeError(f"CUDA out of memory. Tried to allocate {mebibytes}.00 MiB")
    (gpu / f"{os.getpid()}-{mebibytes}.held").write_text(str(mebibytes * 2**20))

def give_back(gpu):
    for held in gpu.glob(f"{os.getpid()}-*.held"):
        held.unlink()
"""


class ScriptedGpus:
    """`total` is bytes by UUID."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, uuid: str, total: int) -> None:
        (self.folder / uuid).mkdir(parents=True)
        (self.folder / uuid / "total").write_text(str(total))

    @property
    def total(self) -> dict[str, int]:
        return {p.parent.name: int(p.read_text()) for p in sorted(self.folder.glob("*/total"))}

    @property
    def used(self) -> dict[str, int]:
        return {uuid: sum(map(_bytes, (self.folder / uuid).glob("*.held"))) for uuid in self.total}

    def others_take(self, uuid: str, count: int) -> None:
        """Somebody who is no model of ours has so many bytes now."""
        (self.folder / uuid / "others-0.held").write_text(str(count))

    @property
    def has_driver(self) -> bool:
        return not (self.folder / "no-driver").exists()

    @has_driver.setter
    def has_driver(self, present: bool) -> None:
        if present:
            (self.folder / "no-driver").unlink(missing_ok=True)
        else:
            (self.folder / "no-driver").touch()

    def write_model(self, package: Path, uuid: str, mebibytes: int, declares: str = "") -> Path:
        """A model that takes so much of the GPU, for as long as it is loaded."""
        gpu = f"pathlib.Path({str(self.folder / uuid)!r})"
        said = f'parameters {{ key: "memory_bytes" value {{ string_value: "{declares}" }} }}\n'
        return write_python_model(
            package,
            imports=_ALLOCATOR,
            initialize=f"take({gpu}, {mebibytes})",
            finalize=f"give_back({gpu})",
            config=CONFIG + (said if declares else ""),
        )


class LaggingPage(MetricsEndpoint):
    """What `gpus` had `lag_seconds` ago; `is_broken` is DCGM's error, `is_frozen` its end."""

    def __init__(self, gpus: ScriptedGpus, lag_seconds: float) -> None:
        super().__init__()
        self.is_broken = False
        self.is_frozen = False
        self._gpus = gpus
        self._lag = lag_seconds
        self._seen: deque[tuple[float, Mapping[str, int]]] = deque([(0.0, gpus.used)])
        self._sampling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._sampling = asyncio.create_task(self._sample())

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        await super().stop()

    async def _sample(self) -> None:
        while True:
            self._seen.append((time.monotonic(), self._gpus.used))
            await asyncio.sleep(_SAMPLE_SECONDS)

    @property
    def has_caught_up(self) -> bool:
        """It shows what there is, and did so for as long as it lags."""
        first = time.monotonic() - self._lag
        late = [used for at, used in [*self._seen] if at >= first - _SAMPLE_SECONDS]
        return all(used == self._gpus.used for used in late)

    def _page(self) -> bytes:
        while len(self._seen) > 1 and self._seen[1][0] <= time.monotonic() - self._lag:
            self._seen.popleft()
        if not self.is_frozen:
            self.used, self.total = dict(self._seen[0][1]), self._gpus.total
        if self.is_broken:
            self.used, self.total = (dict.fromkeys(self._gpus.total, 0) for _ in range(2))
        return super()._page()


class ServedPage:
    """The page on a port, from a thread of its own."""

    def __init__(self, page: LaggingPage, run: Run) -> None:
        self.page = page
        self._run = run

    def start(self) -> None:
        self._run(self.page.start())

    def stop(self) -> None:
        self._run(self.page.stop())


@contextmanager
def served(gpus: ScriptedGpus, lag_seconds: float) -> Iterator[ServedPage]:
    with loop_in_thread() as run:
        server = ServedPage(LaggingPage(gpus, lag_seconds), run)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def adapter_beside(
    triton: RunningAdapter, gpus: ScriptedGpus, root: Path, *flags: str
) -> Iterator[RunningAdapter]:
    """A real adapter before this Triton, whose NVML is the one of tests/fakes/driver."""
    flags = (f"--model-roots={root}", "--memory-reserve=0", *flags)
    with beside(triton, *flags, environ=driver_environ(gpus)) as adapter:
        yield adapter


def driver_environ(gpus: ScriptedGpus) -> dict[str, str]:
    """What makes NVML that of tests/fakes/driver in a process."""
    folders = [Path(__file__).parent / "driver", Path(__file__).parent.parent.parent]
    return {FOLDER: str(gpus.folder), "PYTHONPATH": ":".join(map(str, folders))}


def from_environment() -> ScriptedGpus:
    return ScriptedGpus(Path(os.environ[FOLDER]))


def _bytes(held: Path) -> int:
    pid = held.name.partition("-")[0]
    try:
        return int(held.read_text() or 0) if pid == "others" or is_alive(int(pid)) else 0
    except FileNotFoundError:  # given back just now
        return 0
