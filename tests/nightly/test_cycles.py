"""Large models come and go in random order for minutes, several at once, in too little memory for
all of them: packages of 0.7 GiB in a limit of 3 GiB.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Self

import pytest

from tests.asking import quoted
from tests.journeys.memory.models import MIB, check_agreement, counted, tree_bytes, write_eater
from tests.running import COMPLETE, Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body

pytestmark = pytest.mark.triton

_AT_ONCE = 4
_OWN = 2  # models that one caller may keep
_PROCESS_MIB = 30


class Watcher:
    """Looks at the process tree for as long as a `with` block takes; `peak` in bytes."""

    def __init__(self, adapter: RunningAdapter) -> None:
        self.peak = 0
        self._adapter = adapter
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.peak = max(self.peak, tree_bytes(self._adapter))


class Callers:
    """Each keeps a model or two, and unloads one when it is told that there is no room.

    `cycles` of load, invoke and unload are shared out as they come. `refusals` counts the 507s.
    """

    def __init__(
        self, adapter: RunningAdapter, packages: list[Path], cycles: Iterable[int], seed: int
    ) -> None:
        self.refusals = 0
        self._seed = seed
        self._adapter = adapter
        self._packages = packages
        self._cycles = iter(cycles)
        self._news = threading.Condition()
        self._unloads = 0

    def run(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for ended in [pool.submit(self._live, number) for number in range(_AT_ONCE)]:
                ended.result()

    def _live(self, number: int) -> None:
        dice = Random(self._seed + number)
        loaded: dict[str, Path] = {}
        with closing(self._adapter.client()) as client:
            while self._begins_another():
                package = dice.choice([p for p in self._packages if p not in loaded.values()])
                self._load(client, dice, loaded, f"caller-{number}/{package.name}", package)
                for name in dice.sample(sorted(loaded), dice.randint(1, len(loaded))):
                    invoke(client, name)
                while len(loaded) > dice.randrange(_OWN):
                    self._unload(client, dice, loaded)
            while loaded:
                self._unload(client, dice, loaded)

    def _begins_another(self) -> bool:
        with self._news:
            return next(self._cycles, None) is not None

    def _load(
        self, client: Client, dice: Random, loaded: dict[str, Path], name: str, package: Path
    ) -> None:
        unloads = self._unloads
        while (reply := client.load(name, package)).status == 507:
            with self._news:
                self.refusals += 1
            if loaded:
                self._unload(client, dice, loaded)
            else:
                assert self._wait_for_an_unload(unloads), reply.body
            unloads = self._unloads
        assert reply.status == 200, reply.body
        loaded[name] = package

    def _wait_for_an_unload(self, before: int) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._unloads > before, 60)

    def _unload(self, client: Client, dice: Random, loaded: dict[str, Path]) -> None:
        name = dice.choice(sorted(loaded))
        assert client.delete(f"/models/{quoted(name)}").status == 200
        del loaded[name]
        with self._news:
            self._unloads += 1
            self._news.notify_all()


def invoke(client: Client, name: str) -> None:
    reply = client.post(f"/models/{quoted(name)}/invoke", infer_body(1.5))
    assert reply.status == 200, reply.body
    assert reply.json()["outputs"][0]["data"] == [1.5]


def visit(client: Client, package: Path) -> None:
    assert client.load(package.name, package).status == 200
    invoke(client, package.name)
    assert client.delete(f"/models/{package.name}").status == 200


def ratios(adapter: RunningAdapter, at_most: str = "+Inf") -> float:
    """How many loads of packages seen before were predicted within that multiple of the truth."""
    return counted(
        adapter, f'triton_adapter_memory_prediction_ratio_bucket{{basis="learned",le="{at_most}"}}'
    )


def play(
    cycles: Iterable[int], limit_mib: int, sizes_mib: tuple[int, ...], seed: int, root: Path
) -> dict[str, object]:
    """Packages of `sizes_mib` in that limit; what was seen is for the report of the run."""
    packages = [write_eater(root / f"{n}-of-{size}", size) for n, size in enumerate(sizes_mib)]
    # a tenth of what the largest takes, its process included: the error of one prediction
    error_mib = (max(sizes_mib) + _PROCESS_MIB) // 10
    flags = ("--memory-source=host", f"--memory-limit={limit_mib}MiB", "--memory-reserve=0")
    with (
        embedded_adapter(*flags, COMPLETE, f"--model-roots={root}") as adapter,
        closing(adapter.client()) as client,
    ):
        for package in packages * 2:
            visit(client, package)
        within = ratios(adapter, "1.1") - ratios(adapter, "0.9")
        assert (within, ratios(adapter)) == (len(packages), len(packages))

        callers = Callers(adapter, packages, cycles, seed)
        with Watcher(adapter) as watcher:
            callers.run()

        assert watcher.peak <= (limit_mib + error_mib) * MIB
        assert callers.refusals > 0, "there was room for all"
        assert adapter.state()["models"] == []
        check_agreement(adapter)
        assert not any(path.is_dir() for path in adapter.repository.iterdir())
    return {"peak_mib": round(watcher.peak / MIB, 1), "refusals": callers.refusals}


def test_cycles_of_large_models_stay_within_the_limit(
    seconds: float, seed: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The figures are kept as properties: `--junitxml=FILE` writes them down."""
    end = time.monotonic() + seconds
    cycles = itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())
    for key, value in play(cycles, 3072, (717,) * 5, seed, tmp_path).items():
        record_property(key, value)
