"""Ten models that print, hang, die and load large archives at once, and what their neighbours feel:
the p99 of probes, scrapes and small unloads, as a ratio to a quiet time of the same run.
"""

import io
import os
import tarfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.benchmarks.figures import quantile
from tests.running import Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_ARCHIVE_BYTES = 400 * 2**20
_MOST = 3.0
_PRINTS = """
import time
end = time.monotonic() + float(values[0])
while time.monotonic() < end:
    print("x\\n" * 5000, end="", flush=True)
"""
_KINDS = {
    "prints": (3, _PRINTS),
    "hangs": (2, "import time; time.sleep(float(values[0]))"),
    "dies": (2, "import os; os._exit(1)"),
}
_LOADERS = 3
_PAUSES = {"/ping": 0.01, "/metrics": 0.05}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_python_model(root / "small")
    for kind, (_, answer) in _KINDS.items():
        write_python_model(root / kind, answer=answer)
    with tarfile.open(root / "large.tar.gz", "w:gz", compresslevel=1) as archive:
        entry = tarfile.TarInfo("1/weights")
        entry.size = _ARCHIVE_BYTES
        archive.addfile(entry, io.BytesIO(os.urandom(_ARCHIVE_BYTES)))
    return root


class Felt:
    """Asks each thing again and again, and keeps how long each answer took."""

    def __init__(self, adapter: RunningAdapter, root: Path) -> None:
        self._adapter = adapter
        self._root = root
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def ask(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        asking = [
            threading.Thread(target=self._again, args=(self._adapter.http, "/ping", end)),
            threading.Thread(target=self._again, args=(self._adapter.admin, "/metrics", end)),
            threading.Thread(target=self._unload, args=(end,)),
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()

    def _again(self, address: str, path: str, end: float) -> None:
        with closing(Client(address)) as client:
            while time.monotonic() < end:
                with self._timed(path):
                    assert client.get(path).status == 200
                time.sleep(_PAUSES[path])

    def _unload(self, end: float) -> None:
        with closing(self._adapter.client(timeout=120)) as client:
            while time.monotonic() < end:
                assert client.load("small", self._root / "small").status == 200
                with self._timed("small unload"):
                    assert client.delete("/models/small").status == 200

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[what].append(time.monotonic() - began)


Act = Callable[[Client], object]


def invoke(root: Path, name: str, kind: str) -> Act:
    def act(client: Client) -> None:
        client.post(f"/models/{name}/invoke", infer_body(2.0))
        if kind == "dies":
            client.delete(f"/models/{name}")
            client.load(name, root / kind)

    return act


def unpack(root: Path, name: str) -> Act:
    return lambda client: client.load(name, root / "large.tar.gz")


def bad_models(adapter: RunningAdapter, root: Path) -> list[Act]:
    with closing(adapter.client(timeout=120)) as client:
        acts = []
        for kind, (count, _) in _KINDS.items():
            for number in range(count):
                assert client.load(f"{kind}{number}", root / kind).status == 200
                acts.append(invoke(root, f"{kind}{number}", kind))
    return acts + [unpack(root, f"large{number}") for number in range(_LOADERS)]


@contextmanager
def at_work(adapter: RunningAdapter, acts: list[Act]) -> Iterator[None]:
    """Each again and again until the block is left."""
    is_over = threading.Event()

    def again(act: Act) -> None:
        with closing(adapter.client(timeout=300)) as client:
            while not is_over.is_set():
                with suppress(OSError):
                    act(client)

    threads = [threading.Thread(target=again, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_ten_bad_models_slow_their_neighbours_by_a_bounded_factor(
    root: Path, seconds: float
) -> None:
    with embedded_adapter(f"--model-roots={root}") as adapter:
        quiet, beside = Felt(adapter, root), Felt(adapter, root)
        quiet.ask(seconds / 2)
        with at_work(adapter, bad_models(adapter, root)):
            beside.ask(seconds / 2)
        ratios = {}
        for what in quiet.seconds:
            before, after = (quantile(felt.seconds[what], 0.99) for felt in (quiet, beside))
            ratios[what] = after / before
            counts = f"{len(quiet.seconds[what])} and {len(beside.seconds[what])}"
            print(f"{what}: p99 {before * 1e3:.1f} and {after * 1e3:.1f} ms of {counts}")  # noqa: T201
        assert max(ratios.values()) <= _MOST, ratios
