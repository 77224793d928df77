"""What the control plane costs: itself, with many models known, and those who infer meanwhile."""

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.benchmarks.exchange import Exchange
from tests.benchmarks.figures import Json, p50, ratios, spread
from tests.benchmarks.place import (
    IDENTITY,
    MIB,
    Scale,
    load,
    rss_bytes,
    stack,
)
from tests.benchmarks.stand_in import running
from tests.running import Client, RunningAdapter

_FEW = 10
_PAGE = 10  # as many as the few are, so that both lists are of one length
_TIMES = 300
_LOADS = 20
_LOADERS = 8
_STORM_RATE = 300
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
    return {"livez": spread(live), "readyz": spread(ready)}


@contextmanager
def external(http: str, grpc: str, *flags: str) -> Iterator[RunningAdapter]:
    """The adapter before a Triton that runs already; yielded when its doors are open."""
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


def delete_idle(scale: Scale) -> Json:
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
    return {"after_gone": spread(late), "whole": spread(whole)}


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


def many_models(scale: Scale) -> Json:
    """The same calls with ten models known and with ten thousand, in turn, each at an adapter of
    its own before a stand-in for Triton that answers at once.
    """
    with ExitStack() as servers:
        few, many = (servers.enter_context(_filled(n)) for n in (_FEW, scale.models))
        asked = {name: ([], []) for name in ("list", "get", "invoke", "load", "unload")}
        for _ in range(scale.rounds):
            for at, known in enumerate((few, many)):
                for name, seconds in known.ask().items():
                    asked[name][at].append(seconds)
        return {
            "models": scale.models,
            "loads_per_second": known.loads_per_second,
            "calls": {
                name: {"few": spread(a), "many": spread(b), "ratio": ratios(b, a)}
                for name, (a, b) in asked.items()
            },
            "rss_mib": spread([rss_bytes(many.adapter.process.pid) / MIB]),
            "rss_few_mib": spread([rss_bytes(few.adapter.process.pid) / MIB]),
        }


@dataclass
class _Known:
    """An adapter with so many models loaded, m0 and so on."""

    adapter: RunningAdapter
    count: int
    loads_per_second: float = 0.0
    number: int = field(default=0)

    def ask(self) -> dict[str, float]:
        """Medians in seconds, one caller."""
        with Exchange(self.adapter.http) as door:
            middle = f"m{self.count // 2:05}"
            found = {
                "list": p50(door.timed("GET", f"/models?limit={_PAGE}", times=_TIMES)),
                "get": p50(door.timed("GET", f"/models/{middle}", times=_TIMES)),
                "invoke": p50(
                    door.timed("POST", f"/models/{middle}/invoke", infer_body(), times=_TIMES)
                ),
            }
            loads, unloads = [], []
            for _ in range(_LOADS):
                self.number += 1
                name = f"new{self.number}"
                loads += door.timed("POST", "/models", load_body(name))
                unloads += door.timed("DELETE", f"/models/{name}")
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
        begun = time.perf_counter()
        with ThreadPoolExecutor(_LOADERS) as loaders:
            list(loaders.map(lambda first: _load_every(adapter, first, count), range(_LOADERS)))
        known.loads_per_second = count / (time.perf_counter() - begun)
        yield known


def _load_every(adapter: RunningAdapter, first: int, count: int) -> None:
    with Exchange(adapter.http) as door:
        for number in range(first, count, _LOADERS):
            door.timed("POST", "/models", load_body(f"m{number:05}"))


# -- storms ---------------------------------------------------------------------------------


def storms(scale: Scale) -> Json:
    """The p99 of inference at a steady rate while one caller does nothing but control calls."""
    with _filled(scale.models) as known:
        adapter = known.adapter
        storms: dict[str, Callable[[], Storm]] = {
            "list of 1000": lambda: Storm(adapter.http, "GET", "/models?limit=1000"),
            "scrape": lambda: Storm(adapter.admin, "GET", "/metrics"),
            "`/debug/state`": lambda: Storm(adapter.admin, "GET", "/debug/state", seconds=0.5),
            "load and unload": lambda: _LoadStorm(adapter.http),
            "refused calls (a log line each)": lambda: Storm(
                adapter.http, "GET", "/models/nobody", status=404
            ),
        }
        quiet: list[float] = []
        found: Json = {}
        for name, make in storms.items():
            rows = []
            for _ in range(scale.slow_rounds):
                before = _p99_at(adapter, scale)
                with make() as storm:
                    during = _p99_at(adapter, scale)
                rows.append((before, during, storm.rate))
            quiet += [row[0] for row in rows]
            found[name] = {
                "p99": spread(row[1] for row in rows),
                "ratio": ratios([r[1] for r in rows], [r[0] for r in rows]),
                "calls_per_second": spread(row[2] for row in rows),
            }
        return {"quiet_p99": spread(quiet), "storms": found, "models": scale.models}


def _p99_at(adapter: RunningAdapter, scale: Scale) -> float:
    args = ("--protocol=sagemaker-json", f"--metadata=http://{adapter.started['triton_http']}")
    pace = (f"--rate={_STORM_RATE}", f"--duration={max(1.0, scale.seconds / 2)}", "--warmup=0.2")
    result = load(f"http://{adapter.http}", "--model=m00000", *args, *pace)
    return float(result["targets"][0]["latency"]["p99"])


class Storm:
    """One caller in a thread of its own; `rate` is how many calls a second it came to."""

    def __init__(
        self, address: str, method: str, path: str, *, status: int = 200, seconds: float = 0.01
    ) -> None:
        """At most one call in so many seconds: what many scrapers or a fast client would do."""
        self.rate = 0.0
        self._address = address
        self._asked = (method, path)
        self._status = status
        self._pause = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        begun, calls = time.perf_counter(), 0
        with Exchange(self._address) as door:
            while not self._over.is_set():
                self.call(door)
                calls += 1
                self._over.wait(max(0.0, begun + calls * self._pause - time.perf_counter()))
        self.rate = calls / (time.perf_counter() - begun)

    def call(self, door: Exchange) -> None:
        door.timed(*self._asked, status=self._status)


class _LoadStorm(Storm):
    def __init__(self, address: str) -> None:
        super().__init__(address, "POST", "/models", seconds=0.05)

    def call(self, door: Exchange) -> None:
        door.timed("POST", "/models", load_body("storm"))
        door.timed("DELETE", "/models/storm")
