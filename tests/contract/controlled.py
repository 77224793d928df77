"""TritonControl on a real Triton, with packages written straight into its repository."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from adapter.core.model import ModelId, TritonName
from adapter.core.oom import Classifier
from adapter.core.triton_errors import Faults
from adapter.triton.client import TritonControl
from tests.running import Client, Reply
from tests.trees import infer_body, write_python_model

FAULTS = Faults(Classifier())
PATIENCE = 30


ENSEMBLE = """\
platform: "ensemble"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step {
  model_name: "%s"
  model_version: -1
  input_map { key: "IN" value: "IN" }
  output_map { key: "OUT" value: "OUT" }
} }
"""


class ControlledTriton:
    """A TritonControl on a real Triton, and packages written straight into its repository."""

    def __init__(self, control: TritonControl, repository: Path, http: str) -> None:
        self.control = control
        self._repository = repository
        self._http = http
        self._names: set[str] = set()

    def put(self, name: str, **bodies: str) -> None:
        self._names.add(name)
        write_python_model(self._repository / name, **bodies)

    def put_ensemble(self, name: str, step: str) -> None:
        self._names.add(name)
        (self._repository / name / "1").mkdir(parents=True)
        (self._repository / name / "config.pbtxt").write_text(ENSEMBLE % step)

    async def load(self, name: str) -> None:
        await self.control.load(TritonName(name), ModelId(name))

    async def unload(self, name: str) -> None:
        await self.control.unload(TritonName(name), ModelId(name))

    async def wait_gone(self, name: str, seconds: float = PATIENCE) -> bool:
        return not await self.control.wait_gone({name}, seconds)

    async def infer(self, name: str, *values: float, body: object = None) -> Reply:
        def ask() -> Reply:
            client = Client(self._http)
            try:
                return client.post(f"/v2/models/{name}/infer", body or infer_body(*values))
            finally:
                client.close()

        return await asyncio.to_thread(ask)

    async def fault(self, name: str, *values: float, body: object = None) -> Exception:
        """What we make of the answer to an inference that fails."""
        reply = await self.infer(name, *values, body=body)
        assert reply.status >= 400
        kind = reply.headers["Content-Type"]
        text = json.loads(reply.body)["error"]
        return FAULTS.explain_inference(
            reply.status, kind, text, name=TritonName(name), model_id=ModelId(name)
        )

    async def clear(self) -> None:
        for name in self._names:
            await self.unload(name)
            if not await self.wait_gone(name):
                # seen once, on a busy machine: Triton waits for ever for a process that it takes
                # for dead; as for one that is, a load and another unload end that
                await self.load(name)
                await self.unload(name)
                assert await self.wait_gone(name)
            shutil.rmtree(self._repository / name)
            await self.unload(name)


async def until(met: Callable[[], bool]) -> None:
    """Bounded poll, for what no event tells."""
    for _ in range(PATIENCE * 50):
        if met():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {PATIENCE} s")


def made(
    address: str, on_retry: Callable[[str], None] = lambda _: None, *, load_seconds: float = 60
) -> TritonControl:
    control = TritonControl(
        FAULTS, load_timeout_seconds=load_seconds, call_timeout_seconds=10, on_retry=on_retry
    )
    control.connect(address)
    return control
