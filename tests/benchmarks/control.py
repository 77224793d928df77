"""What the control plane takes: to start, to unload, and with many models known."""

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.benchmarks.exchange import Exchange
from tests.benchmarks.figures import Json, p50, ratios, spread
from tests.benchmarks.place import IDENTITY, MIB, Scale, rss_bytes, stack
from tests.benchmarks.rows import CALLS
from tests.benchmarks.stand_in import running
from tests.running import Client, RunningAdapter

_FEW = 10
_PAGE = 10  # as many as the few are, so that both lists are of one length
_TIMES = 300
_LOADS = 20
_LOADERS = 8
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
def external(http: str, grpc: str, *flags: str) -> Iterator[RunningAdapter]:
    """The adapter before a Triton that runs already; yielded when it listens."""
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        repository = Path(folder, "repository")
        repository.mkdir()
        adapter = RunningAdapter(
            *_SERVE,
            f"--triton-http={http}",
            f"--triton-grpc={grpc}",
            f"--repository={repository}",
            f"--model-roots={IDENTITY.parent}",
            *flags,
        )
        try:
            adapter.wait_for("adapter.listening", door="http")
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
    """
    with ExitStack() as servers:
        few, full = (servers.enter_context(_filled(n)) for n in (_FEW, scale.models))
        asked: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in CALLS}
        sizes: tuple[list[float], list[float]] = ([], [])
        for _ in range(scale.rounds):
            for at, known in enumerate((few, full)):
                for name, seconds in known.ask().items():
                    asked[name][at].append(seconds)
                sizes[at].append(rss_bytes(known.adapter.process.pid) / MIB)
        found = {name: ratios(b, a) for name, (a, b) in asked.items()}
        return found | {"rss_few": spread(sizes[0]), "rss": spread(sizes[1])}


@dataclass
class _Known:
    """An adapter with so many models loaded, m0 and so on."""

    adapter: RunningAdapter
    count: int
    number: int = field(default=0)

    def ask(self) -> dict[str, float]:
        """Medians in seconds, one caller."""
        with Exchange(self.adapter.http) as caller:
            middle = f"m{self.count // 2:05}"
            found = {
                "list": p50(caller.timed("GET", f"/models?limit={_PAGE}", times=_TIMES)),
                "get": p50(caller.timed("GET", f"/models/{middle}", times=_TIMES)),
                "invoke": p50(
                    caller.timed("POST", f"/models/{middle}/invoke", infer_body(), times=_TIMES)
                ),
            }
            loads, unloads = [], []
            for _ in range(_LOADS):
                self.number += 1
                name = f"new{self.number}"
                loads += caller.timed("POST", "/models", load_body(name))
                unloads += caller.timed("DELETE", f"/models/{name}")
            return found | {"load": p50(loads), "unload": p50(unloads)}


def infer_body() -> bytes:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [0.5]}
    return json.dumps({"inputs": [tensor]}).encode()


def load_body(name: str) -> bytes:
    return json.dumps({"model_name": name, "url": str(IDENTITY)}).encode()


@contextmanager
def _filled(count: int) -> Iterator[_Known]:
    """Each model is of 1 MiB by the default size, so that the ledger has something to add up."""
    flags = ("--memory-source=off", "--memory-limit=1TiB", "--default-size=1MiB")
    with running() as triton, external(triton.http, triton.grpc, *flags) as adapter:
        adapter.wait_for("adapter.started")
        known = _Known(adapter, count)
        with ThreadPoolExecutor(_LOADERS) as loaders:
            list(loaders.map(lambda first: _load_every(adapter, first, count), range(_LOADERS)))
        yield known


def _load_every(adapter: RunningAdapter, first: int, count: int) -> None:
    with Exchange(adapter.http) as caller:
        for number in range(first, count, _LOADERS):
            caller.timed("POST", "/models", load_body(f"m{number:05}"))
