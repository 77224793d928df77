"""Packages without a disk: every url is a good package unless it is told otherwise."""

from dataclasses import dataclass

from adapter.core.model import ModelId, ModelSource, Package, TritonName
from tests.fakes.steps import Steps


@dataclass(frozen=True)
class FakeStagedModel:
    name: TritonName
    model_id: ModelId


class FakePackages:
    """`folders` is the repository. A package declares `declared[url]` bytes, or nothing."""

    def __init__(self, steps: Steps) -> None:
        self.folders: dict[TritonName, ModelId] = {}
        self.declared: dict[str, int] = {}
        self._steps = steps

    async def inspect(self, source: ModelSource) -> Package:
        await self._steps.take("inspect", source.url)
        return Package(source.url, "", 10, self.declared.get(source.url), source.url)

    async def place(
        self, name: TritonName, model_id: ModelId, source: ModelSource, package: Package
    ) -> None:
        self.folders[name] = model_id  # begun: a failure leaves something behind
        await self._steps.take("place", name)

    async def remove(self, name: TritonName) -> None:
        await self._steps.take("remove", name)
        self.folders.pop(name, None)

    async def staged(self) -> list[FakeStagedModel]:
        await self._steps.take("staged")
        return [FakeStagedModel(name, model_id) for name, model_id in self.folders.items()]
