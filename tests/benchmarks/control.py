"""What the control plane takes: to start, to unload, and with many models known."""

import http.client
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from tests.benchmarks.exchange import Exchange
from tests.benchmarks.figures import Json, p50, ratios, spread
from tests.benchmarks.place import IDENTITY, MIB, NotMeasuredError, Scale, rss_bytes, stack
from tests.benchmarks.rows import CALLS
from tests.benchmarks.stand_in import running
from tests.running import Client, RunningAdapter

_FEW = 10
_PAGE = 10  # as many as the few are, so that both lists are of one length
_TURNS = 40
_TIMES = 10
_LOADERS = 8
_MEMORY = Path("/dev/shm")  # a file system without a disk
_STAGED_BYTES = 2**14  # what a staged model takes there at most
_SERVE = ("--triton=external", "--http=127.0.0.1:0", "--admin=127.0.0.1:0", "--grpc=off")


# -- start ----------------------------------------------------------------------------------


def start(scale: Scale) -> Json:
    """From the start of the process until /livez answers, and until /readyz does."""
    live, ready = [], []
    with running() as triton:
        for _ in range(scale.repeats):
            begun = time.perf_counter()
            with external(triton.http, triton.grpc) as adapter:
                probe = Client(adapter.admin)
                assert probe.get("/livez").status == 200
                live.append(time.perf_counter() - begun)
                while probe.get("/readyz").status != 200:
                    time.sleep(0.005)
                ready.append(time.perf_counter() - begun)
                probe.close()
    return {"livez": spread(live, 1e3), "readyz": spread(ready, 1e3)}


@contextmanager
def external(
    http: str,
    grpc: str,
    *flags: str,
    within: Path | None = None,
    python: str = sys.executable,
) -> Iterator[RunningAdapter]:
    """The adapter before a Triton that runs already; yielded when it listens. The repository is
    made in `within`, or where temporary files are. `python`: of an environment that has it.
    """
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=within) as folder:
        repository = Path(folder, "repository")
        repository.mkdir()
        adapter = RunningAdapter(
            *_SERVE,
            f"--triton-http={http}",
            f"--triton-grpc={grpc}",
            f"--repository={repository}",
            f"--model-roots={IDENTITY.parent}",
            *flags,
            python=python,
        )
        try:
            adapter.wait_for("adapter.listening", listener="http")
            yield adapter
        finally:
            adapter.stop()


# -- unload ---------------------------------------------------------------------------------


def delete(scale: Scale) -> Json:
    """How long after Triton's index shows it gone a DELETE is answered, and how long in all."""
    late, whole = [], []
    with stack() as adapter:
        client = adapter.client()
        for _ in range(scale.repeats):
            assert client.load("idle", IDENTITY).status == 200
            with _Gone(adapter.http_address, "idle") as gone:
                begun = time.perf_counter()
                assert client.delete("/models/idle").status == 200
                ended = time.perf_counter()
            assert gone.at is not None
            late.append(max(0.0, ended - gone.at))
            whole.append(ended - begun)
        client.close()
    return {"after_gone": spread(late, 1e3), "whole": spread(whole)}


class _Gone:
    """Asks Triton's index again and again. `at` is when the answer without the model was there."""

    def __init__(self, address: str, model: str) -> None:
        self.at: float | None = None
        self._address = address
        self._model = model
        self._is_there = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_there.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=10)
        end = time.monotonic() + 60
        while self.at is None and time.monotonic() < end:
            connection.request("POST", "/v2/repository/index", b"{}")
            models = json.loads(connection.getresponse().read())
            states = {m.get("state") for m in models if m["name"] == self._model}
            if states & {"READY", "LOADING", "UNLOADING"}:
                self._is_there.set()
            elif self._is_there.is_set():
                self.at = time.perf_counter()
            time.sleep(0.002)
        connection.close()


# -- many models ----------------------------------------------------------------------------


def many(scale: Scale) -> Json:
    """The same calls with ten models known and with ten thousand, in turn, each at an adapter of
    its own before a stand-in for Triton that answers at once.

    Their repositories are in memory: on ext4 half of an unload was the file system's, and the
    loads of two adapters with ten models each differed by a quarter.
    """
    if shutil.disk_usage(_MEMORY).free < scale.models * _STAGED_BYTES:
        raise NotMeasuredError(f"{_MEMORY} has no room for {scale.models} folders")
    with ExitStack() as opened:
        adapters = [opened.enter_context(_filled(n)) for n in (_FEW, scale.models)]
        both = [
            _Known(n, opened.enter_context(Exchange(adapter.http)))
            for n, adapter in zip((_FEW, scale.models), adapters, strict=True)
        ]
        medians: list[tuple[dict[str, float], ...]] = []
        sizes: list[list[float]] = []
        for _ in range(scale.rounds):
            for turn in range(_TURNS):
                for known in both[:: -1 if turn % 2 else 1]:
                    known.ask(turn)
            medians.append(tuple(known.medians() for known in both))
            sizes.append([rss_bytes(adapter.process.pid) / MIB for adapter in adapters])
    few, full = zip(*medians, strict=True)
    found = {name: ratios((m[name] for m in full), (m[name] for m in few)) for name in CALLS}
    rss_few, rss = zip(*sizes, strict=True)
    return found | {"rss_few": spread(rss_few), "rss": spread(rss)}


class _Known:
    """A caller of an adapter with so many models loaded, m0 and so on."""

    def __init__(self, count: int, caller: Exchange) -> None:
        self._middle = f"m{count // 2:05}"
        self._caller = caller
        self._took: dict[str, list[float]] = {name: [] for name in CALLS}

    def ask(self, turn: int) -> None:
        middle, new = f"/models/{self._middle}", f"new{turn}"
        self._time("list", "GET", f"/models?limit={_PAGE}", times=_TIMES)
        self._time("get", "GET", middle, times=_TIMES)
        self._time("invoke", "POST", f"{middle}/invoke", infer_body(), times=_TIMES)
        self._time("load", "POST", "/models", load_body(new))
        self._time("unload", "DELETE", f"/models/{new}")

    def medians(self) -> dict[str, float]:
        """In seconds, since the last time."""
        took, self._took = self._took, {name: [] for name in CALLS}
        return {name: p50(seconds) for name, seconds in took.items()}

    def _time(self, name: str, method: str, path: str, body: bytes = b"", times: int = 1) -> None:
        self._took[name] += self._caller.timed(method, path, body, times=times)


def infer_body() -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [0.5]}
    return json.dumps({"inputs": [tensor]}).encode()


def load_body(name: str) -> bytes:
    return json.dumps({"model_name": name, "url": str(IDENTITY)}).encode()


@contextmanager
def _filled(count: int) -> Iterator[RunningAdapter]:
    """Each model is of 1 MiB by the default size, so that the ledger has something to add up."""
    flags = ("--memory-source=off", "--memory-limit=1TiB", "--default-size=1MiB")
    with (
        running() as triton,
        external(triton.http, triton.grpc, *flags, within=_MEMORY) as adapter,
    ):
        adapter.wait_for("adapter.started")
        with ThreadPoolExecutor(_LOADERS) as loaders:
            list(loaders.map(lambda first: _load_every(adapter, first, count), range(_LOADERS)))
        yield adapter


def _load_every(adapter: RunningAdapter, first: int, count: int) -> None:
    with Exchange(adapter.http) as caller:
        for number in range(first, count, _LOADERS):
            caller.timed("POST", "/models", load_body(f"m{number:05}"))
