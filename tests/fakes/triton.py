"""Triton's control plane in this process."""

from adapter.core.model import ModelId, TritonName
from tests.fakes.steps import Steps


class FakeControlTriton:
    """`models` is what it has in memory. The unload of a name in `stuck` never ends, as with a
    python process that died, until the same name is loaded again.
    """

    def __init__(self, steps: Steps) -> None:
        self.models: set[str] = set()
        self.stuck: set[str] = set()
        self.waited: list[float] = []
        self._steps = steps

    async def load(self, name: TritonName, model_id: ModelId) -> None:
        await self._steps.take("load", name)
        self.models.add(name)
        self.stuck.discard(name)

    async def unload(self, name: TritonName, model_id: ModelId) -> None:
        await self._steps.take("unload", name)
        if name not in self.stuck:
            self.models.discard(name)

    async def wait_gone(self, name: TritonName, seconds: float) -> bool:
        await self._steps.take("wait_gone", name)
        self.waited.append(seconds)
        return name not in self.models

    async def ready(self) -> set[str]:
        found = set(self.models)  # an answer may be old by the time it arrives
        await self._steps.take("ready")
        return found


class FakeProcesses:
    """Knows of no process unless told: `live["m"] = False`."""

    def __init__(self) -> None:
        self.live: dict[str, bool] = {}

    def has_live_stub(self, name: TritonName) -> bool | None:
        return self.live.get(name)
