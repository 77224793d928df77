"""A folder of models as a store, and a caller who sees what each has added."""

import os
import signal
import tarfile
from pathlib import Path
from typing import Any

from tests.journeys.memory.models import metric
from tests.processes import tritonserver
from tests.running import Client, Reply, RunningAdapter, wait_until
from tests.trees import CONFIG, infer_body, write_python_model

MEMORY = 'parameters { key: "memory_bytes" value { string_value: "100MiB" } }'


class Store:
    """A folder of models, each of which adds its own number to what it is sent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(
        self,
        name: str,
        number: int,
        *,
        config: str = CONFIG,
        weights: bytes = b"",
        initialize: str = "pass",
        answer: str = "",
    ) -> None:
        """A new version takes the place of the old one in one step, with another time. `weights`
        are more bytes for the disk; `answer` are statements before its own answer.
        """
        draft = self.path.parent / f"draft-{name.replace('/', '-')}-{number}"
        answer = f"{answer}\nvalues = values + {number}"
        write_python_model(draft, config=config + MEMORY, answer=answer, initialize=initialize)
        (draft / "1" / "weights.bin").write_bytes(weights)
        packed = draft.with_suffix(".tar.gz")
        with tarfile.open(packed, "w:gz") as tar:
            tar.add(draft, ".")
        place = self.path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        packed.replace(place)

    def put_all(self, *names: str) -> None:
        """The first one adds 0, the next one 1, and so on."""
        for number, name in enumerate(names):
            self.put(name, number)


class Caller:
    def __init__(self, adapter: RunningAdapter) -> None:
        self.adapter = adapter
        self.http = adapter.client()
        self.admin = Client(adapter.admin)

    def close(self) -> None:
        self.http.close()
        self.admin.close()

    def call(self, target: str) -> Reply:
        return self.http.call_endpoint(target, infer_body(0.0))

    def invoke(self, target: str) -> tuple[float, str]:
        """Return what the model has added, and what the cache had."""
        reply = self.call(target)
        assert reply.status == 200, reply.body
        answer = reply.json()
        assert answer["model_name"] == target
        return answer["outputs"][0]["data"][0], reply.headers["X-Triton-Adapter-Cache"]

    def refused(self, target: str) -> tuple[int, dict[str, Any]]:
        reply = self.call(target)
        return reply.status, reply.json()

    def loaded(self) -> list[str]:
        return [each["modelName"] for each in self.http.get("/models").json()["models"]]

    def ledger(self) -> set[str]:
        """The models that the ledger has, by /debug/state."""
        models = self.admin.get("/debug/state").json()["models"]
        return {each["model_id"] for each in models if sum(each["bytes"].values())}

    def wait_ready(self) -> None:
        wait_until(lambda: self.admin.get("/readyz").status == 200, 60, "the adapter is ready")

    def end_triton(self) -> None:
        os.kill(tritonserver(self.adapter), signal.SIGKILL)

    def count(self, series: str) -> float:
        return metric(self.adapter, series)
