"""The machines of a fleet: each is a real `triton-adapter serve` with a Triton, a disk cache and a
ledger of its own; all have one bucket. They keep their ports when they are started again.
"""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.buckets import Bucket
from tests.ports import free_ports
from tests.processes import descendants, is_alive, tritonserver
from tests.running import COMPLETE, Client, RunningAdapter, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

MODEL_BYTES = 100 * 2**20
_OUTPUT = 'output [{ name: "MACHINE" data_type: TYPE_STRING dims: [1] }]'
_FLAGS = ("--triton=embedded", "--on-demand", "--drain-min-seconds=2", COMPLETE)


def room_for(models: int) -> tuple[str, ...]:
    """Return the flags of a ledger that has room for so many models of `put_models`."""
    return ("--memory-source=off", f"--memory-limit={models * MODEL_BYTES * 20 // 19 + 2**20}")


def sized(models: int = 1) -> str:
    """Return the part of a config.pbtxt by which the ledger takes a model to be so large."""
    value = f'value {{ string_value: "{models * MODEL_BYTES}" }}'
    return f'parameters {{ key: "memory_bytes" {value} }}'


def put_model(bucket: Bucket, folder: Path, name: str, *, number: int, before: str = "") -> None:
    """Put a model into the bucket that answers with IN plus `number`, and with the machine that it
    runs on. `before` is a statement before each answer, which sees `values`.
    """
    machine = "machine = np.array([os.environ['MACHINE']], object)"
    answer = "\n".join((before, f"values = values + {number}", machine))
    draft = write_python_model(
        folder / name.replace("/", "-"),
        imports="import os, signal, time\nimport numpy as np",
        answer=answer,
        config=CONFIG + _OUTPUT + sized(),
    )
    code = draft / "1" / "model.py"
    outputs = '[pb_utils.Tensor("OUT", values), pb_utils.Tensor("MACHINE", machine)]'
    code.write_text(code.read_text().replace('[pb_utils.Tensor("OUT", values)]', outputs))
    bucket.put_model(name, draft)


class Machine:
    """One of a fleet. `http`, `admin` and `grpc` are HOST:PORT, the same at each start."""

    def __init__(self, name: str, bucket: Bucket, folder: Path, *flags: str) -> None:
        self.name = name
        self.bucket = bucket
        self.cache = folder / name / "cache"
        self.ports = free_ports(3)
        self.http, self.admin, self.grpc = (f"127.0.0.1:{port}" for port in self.ports)
        self.flags = flags
        self.adapter: RunningAdapter | None = None
        self.roots = folder / name / "roots"
        self.roots.mkdir(parents=True)

    @property
    def argument(self) -> str:
        """What deploy/fleet/generate is told of it."""
        return f"{self.name}=127.0.0.1:{':'.join(str(port) for port in self.ports)}"

    @property
    def is_up(self) -> bool:
        return self.adapter is not None

    def begin(self) -> None:
        """Start it; `wait` waits until it is ready."""
        assert self.adapter is None
        self.adapter = RunningAdapter(
            *_FLAGS,
            f"--http={self.http}",
            f"--admin={self.admin}",
            f"--grpc={self.grpc}",
            *(f"--triton-{each}=127.0.0.1:0" for each in ("http", "grpc", "metrics")),
            f"--model-store=s3://{self.bucket.name}/models",
            f"--cache-dir={self.cache}",
            f"--model-roots={self.roots}",
            *self.flags,
            environ={**self.bucket.environ, "MACHINE": self.name},
        )

    def wait(self) -> None:
        assert self.adapter is not None
        self.adapter.wait_for("adapter.started")
        wait_until(self.is_ready, 60, f"{self.name} is ready")

    def start(self) -> None:
        self.begin()
        self.wait()

    def triton(self) -> int | None:
        """Return its process; None: there is none just now."""
        assert self.adapter is not None
        try:
            return tritonserver(self.adapter)
        except ValueError:
            return None

    def is_ready(self) -> bool:
        return self._admin("/readyz").status == 200

    def stop(self) -> None:
        """End it as an orchestrator does: it drains first."""
        assert self.adapter is not None
        adapter, self.adapter = self.adapter, None
        assert adapter.stop() == 0, adapter.errors

    def kill(self) -> None:
        """End it and all of its processes at once, without a word."""
        assert self.adapter is not None
        adapter, self.adapter = self.adapter, None
        below = descendants(adapter.process.pid)
        for pid in (adapter.process.pid, *below):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        adapter.stop()
        wait_until(lambda: not any(is_alive(pid) for pid in below), 30, f"{self.name} is gone")

    def models(self) -> set[str]:
        """Return what it has in memory."""
        with closing(Client(self.http)) as client:
            listed = client.get("/models?limit=1000").json()
        assert "nextPageToken" not in listed
        return {each["modelName"] for each in listed["models"]}

    def count(self, metric: str) -> float:
        """Return the sum of a metric's lines that begin so."""
        lines = self._admin("/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))

    def _admin(self, path: str) -> Any:
        with closing(Client(self.admin)) as admin:
            return admin.get(path)


@contextmanager
def machines(
    count: int, bucket: Bucket, folder: Path, *flags: str, started: int | None = None
) -> Iterator[list[Machine]]:
    """So many machines, of which the first `started` (all) are up; ended after it."""
    fleet = [Machine(f"machine-{number}", bucket, folder, *flags) for number in range(count)]
    try:
        for each in fleet[:started]:
            each.begin()
        for each in fleet[:started]:
            each.wait()
        yield fleet
    finally:
        with ThreadPoolExecutor(count) as pool:
            ends = [pool.submit(each.stop) for each in fleet if each.is_up]
    for end in ends:
        end.result()


def replaced(fleet: Sequence[Machine], before: Sequence[int | None]) -> list[Machine]:
    """Return the machines that have another Triton than before: wait for one, and until all are
    there.
    """
    found: list[Machine] = []

    def are_there() -> bool:
        now = [each.triton() for each in fleet]
        found[:] = [each for each, pid, was in zip(fleet, now, before, strict=True) if pid != was]
        return bool(found) and None not in now

    wait_until(are_there, 60, "another Triton was started")
    return list(found)


class Answer:
    """Of an inference: `value` is what the model has added, `machine` who answered."""

    def __init__(self, status: int, headers: Any, body: bytes) -> None:
        self.status = status
        self.body = body
        self.cache = headers["X-Triton-Adapter-Cache"]
        self.attempts = int(headers["x-envoy-attempt-count"] or 0)
        self.value: float | None = None
        self.machine = ""
        if status == 200:
            outputs = {each["name"]: each["data"] for each in json.loads(body)["outputs"]}
            self.value, self.machine = outputs["OUT"][0], outputs["MACHINE"][0]


def invoke(client: Client, model: str, body: Any = None) -> Answer:
    """Call a model at the endpoint, through Envoy or at a machine."""
    headers = {"X-Amzn-SageMaker-Target-Model": model}
    body = body or infer_body(0.0)
    reply = client.post("/endpoints/any/invocations", body, headers=headers)
    return Answer(reply.status, reply.headers, reply.body)
