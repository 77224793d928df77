"""Packages without a disk: every url is a good package unless it is told otherwise. And what was
learned of their sizes, without a file.
"""

from collections.abc import Callable
from dataclasses import replace

from adapter.core.memory import Bytes
from adapter.core.model import (
    ModelId,
    ModelSource,
    Package,
    Placement,
    StagedModel,
    TritonName,
    private_name,
)
from tests.fakes.calls import Calls


class FakePackages:
    """`folders` is the repository, by entry. A package declares `declared[url]` bytes, or nothing;
    it has one model, or those of `placements[url]`, and `size_bytes` on disk.
    """

    def __init__(self, calls: Calls) -> None:
        self.folders: dict[TritonName, StagedModel] = {}
        self.declared: dict[str, int] = {}
        self.size_bytes = 10
        self.placements: dict[str, Placement] = {}
        self._calls = calls

    async def prepare(self, name: TritonName, model_id: ModelId, source: ModelSource) -> Package:
        # begun: an archive that is unpacked half leaves something behind
        self.folders[name] = StagedModel(name, model_id, Placement((name,)))
        await self._calls.take("prepare", source.url)
        declared = self.declared.get(source.url)
        return Package(
            source.url,
            (),
            self.size_bytes,
            declared,
            source.url,
            leaves_gpu_open=True,
        )

    async def has_changed(self, source: ModelSource, content_key: str, since: float) -> bool:
        await self._calls.take("has_changed", source.url)
        return source.url != content_key

    async def place(
        self,
        name: TritonName,
        model_id: ModelId,
        package: Package,
        gpu: int | None = None,
        *,
        is_taken: Callable[[TritonName], bool] = lambda _: False,
    ) -> Placement:
        placement = self.placements.get(package.root, Placement((name,)))
        load = (private_name(name, each) if is_taken(each) else each for each in placement.load)
        placement = replace(placement, load=tuple(load))
        self.folders[name] = StagedModel(name, model_id, placement, gpu=gpu)
        await self._calls.take("place", name)
        return placement

    async def confirm(
        self, name: TritonName, source: ModelSource, content_key: str, held: Bytes
    ) -> None:
        await self._calls.take("confirm", name)
        if name in self.folders:
            self.folders[name] = replace(
                self.folders[name],
                is_loaded=True,
                source=source,
                can_load_again=True,
                content_key=content_key,
                held=held,
            )

    async def remove(self, name: TritonName) -> None:
        await self._calls.take("remove", name)
        self.folders.pop(name, None)

    async def set_aside(self, name: TritonName) -> str:
        await self._calls.take("keep", name)
        return f"kept {name}"

    async def discard(self, kept: str) -> None:
        await self._calls.take("discard", kept)

    async def staged(self) -> list[StagedModel]:
        await self._calls.take("staged")
        return list(self.folders.values())


class FakeStore:
    """`saved` is all that was written, the latest last."""

    def __init__(self, calls: Calls) -> None:
        self.saved: list[object] = []
        self._calls = calls

    async def save(self, data: object) -> None:
        await self._calls.take("save")
        self.saved.append(data)
