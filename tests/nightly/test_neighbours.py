"""Ten models that print, hang, die and load large archives at once, and what their neighbours feel:
how long probes, scrapes and small unloads take, as a ratio to a quiet time of the same run.

The adapter, and who asks it, have sessions of their own, as in containers: with autogroups
(sched(7)) Linux shares the CPUs out among sessions, and the bad models' callers take theirs.

Where they have all CPUs to themselves no more is left for the adapter than for anybody. So in each
round the same work is done once by processes that no adapter knows of: what that costs is the
machine's, and the adapter may add as much again.
"""

import io
import os
import subprocess
import sys
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.figures import quantile
from tests.running import Client, RunningAdapter, embedded_adapter
from tests.trees import infer_body, write_python_model

pytestmark = pytest.mark.triton

_ARCHIVE_BYTES = 400 * 2**20
_MOST = 3.0
_MOST_OF_STRANGERS = 2.0
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
_UNLOADERS = 2
_UNLOAD = "small unload"
_QUANTILES = {"/ping": 0.99, "/metrics": 0.99, _UNLOAD: 0.9}  # of some dozen there is no p99
_ROUNDS = 3
_APART: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
# The work of the bad models, by processes that no adapter knows of.
_UNPACKS = """
import pathlib, shutil, sys, tarfile
while True:
    with tarfile.open(sys.argv[1]) as archive:
        archive.extractall(sys.argv[2])
    shutil.rmtree(sys.argv[2])
"""
_STARTS = """
import subprocess, sys
while True:
    subprocess.run([sys.executable, "-c", "import numpy"], check=True)
"""


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
    """Asks each thing again and again, and keeps how long each answer took, in seconds."""

    def __init__(self, adapter: RunningAdapter, root: Path) -> None:
        small = str(root / "small")
        self._questions = [
            ("/ping", adapter.http, "0.01", "/ping"),
            ("/metrics", adapter.admin, "0.05", "/metrics"),
            *((_UNLOAD, adapter.http, f"small{n}", small, "unload") for n in range(_UNLOADERS)),
        ]
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def ask(self, seconds: float) -> None:
        """Ask for so long, each by a process and in a session of its own, as callers elsewhere."""
        program = (sys.executable, "-m", "tests.nightly.felt", str(seconds))
        asking = [
            (what, subprocess.Popen((*program, *question), **_APART))
            for what, *question in self._questions
        ]
        for what, process in asking:
            taken, _ = process.communicate()
            assert process.returncode == 0
            self.seconds[what] += map(float, taken.split())


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


@contextmanager
def strangers_at_work(root: Path, folder: Path) -> Iterator[None]:
    """As much to do for the machine, and nothing of it for the adapter."""
    commands = [[_UNPACKS, root / "large.tar.gz", folder / str(n)] for n in range(_LOADERS)]
    commands += [[_STARTS]] * _KINDS["dies"][0]
    with ExitStack() as ends:
        for command in commands:
            process = subprocess.Popen([sys.executable, "-c", *command])
            ends.callback(process.wait)
            ends.callback(process.kill)
        yield


def unload_bad_models(adapter: RunningAdapter) -> None:
    with closing(adapter.client(timeout=120)) as client:
        for model in adapter.state()["models"]:
            client.delete(f"/models/{model['model_id']}")


def test_ten_bad_models_slow_their_neighbours_by_a_bounded_factor(
    root: Path, tmp_path: Path, seconds: float
) -> None:
    with embedded_adapter(f"--model-roots={root}", own_session=True) as adapter:
        felt = {when: Felt(adapter, root) for when in ("quiet", "strangers", "beside")}
        share = seconds / _ROUNDS / len(felt)
        for _ in range(_ROUNDS):
            felt["quiet"].ask(share)
            with strangers_at_work(root, tmp_path):
                felt["strangers"].ask(share)
            with at_work(adapter, bad_models(adapter, root)):
                felt["beside"].ask(share)
            unload_bad_models(adapter)
    missed = []
    for what, share in _QUANTILES.items():
        taken = {when: sorted(each.seconds[what]) for when, each in felt.items()}
        found = {when: quantile(each, share) for when, each in taken.items()}
        shown = (f"{when} {found[when] * 1e3:.1f} ms of {len(taken[when])}" for when in found)
        print(f"{what}, p{share * 100:.0f}: {', '.join(shown)}")  # noqa: T201
        most = max(_MOST * found["quiet"], _MOST_OF_STRANGERS * found["strangers"])
        if found["beside"] > most:
            missed.append((what, found))
    assert not missed
