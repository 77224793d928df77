"""Packages without a disk: every url is a good package unless it is told otherwise."""

from dataclasses import dataclass

from adapter.core.model import ModelId, ModelSource, Package, Placement, TritonName
from tests.fakes.steps import Steps


@dataclass(frozen=True)
class FakeStagedModel:
    name: TritonName
    model_id: ModelId
    placement: Placement


class FakePackages:
    """`folders` is the repository, by entry. A package declares `declared[url]` bytes, or nothing;
    it has one model, or those of `placements[url]`.
    """

    def __init__(self, steps: Steps) -> None:
        self.folders: dict[TritonName, FakeStagedModel] = {}
        self.declared: dict[str, int] = {}
        self.placements: dict[str, Placement] = {}
        self.warnings: tuple[str, ...] = ()
        self._steps = steps

    async def prepare(self, name: TritonName, model_id: ModelId, source: ModelSource) -> Package:
        # begun: an archive that is unpacked half leaves something behind
        self.folders[name] = FakeStagedModel(name, model_id, Placement((name,)))
        await self._steps.take("prepare", source.url)
        declared = self.declared.get(source.url)
        return Package(source.url, (), 10, declared, source.url, warnings=self.warnings)

    async def place(self, name: TritonName, model_id: ModelId, package: Package) -> Placement:
        placement = self.placements.get(package.root, Placement((name,)))
        self.folders[name] = FakeStagedModel(name, model_id, placement)
        await self._steps.take("place", name)
        return placement

    async def remove(self, name: TritonName) -> None:
        await self._steps.take("remove", name)
        self.folders.pop(name, None)

    async def staged(self) -> list[FakeStagedModel]:
        await self._steps.take("staged")
        return list(self.folders.values())
