"""Triton's repository on a disk that may refuse, with the notes for later runs."""

from collections.abc import Callable
from dataclasses import replace

from adapter.core.model import ModelSource, Package, Placement, StagedModel
from adapter.errors import AdapterError, BackendError, InvalidModel, SourceMissing
from tests.simulation.loop import Draws, turns
from tests.simulation.models import Spec, steps_of

_SAID = {
    "disk": lambda: BackendError("the disk refuses"),
    "invalid": lambda: InvalidModel("no config"),
    "missing": lambda: SourceMissing("there is nothing"),
}


class SimDisk:
    """The Packages and the SizeStore of adapter/control/ports.py. `specs` has the files at each
    url; `fault` as for SimTriton.
    """

    def __init__(
        self, specs: dict[str, Spec], draws: Draws, fault: Callable[[str, str], str | None]
    ) -> None:
        self.specs = specs
        self.folders: dict[str, StagedModel] = {}
        self.sizes: object = None
        # where the files are of a model in Triton, and which part of their package it is
        self._placed: dict[str, tuple[str, int]] = {}
        self._gpus: dict[str, int | None] = {}
        self._draws = draws
        self._fault = fault
        # what the files of the disk cache are at a place; None if there are none any more
        self.cached: Callable[[str], Spec | None] = lambda _: None
        self.read: Callable[[str, str], Spec | None] = lambda _, __: None  # by Triton
        self.admitted: Callable[[Spec, int], None] = lambda _, __: None

    def spec_at(self, name: str) -> Spec | None:
        if name not in self._placed:
            return None
        place, part = self._placed[name]
        spec = self.specs[place] if place in self.specs else self.read(name, place)
        return None if spec is None else spec.parts()[part]

    def gpu_at(self, name: str) -> int:
        return self._gpus.get(name) or 0

    async def _act(self, verb: str, name: str, model_id: str) -> None:
        await turns(self._draws.of("disk", verb, name))
        if (fault := self._fault(verb, model_id)) is not None:
            raise self._error(fault)

    def _error(self, fault: str) -> AdapterError:
        return _SAID[fault]()

    async def prepare(self, name: str, model_id: str, source: ModelSource) -> Package:
        await self._act("prepare", name, model_id)
        spec = self.cached(source.url) if source.is_cached else self.specs[source.url]
        if spec is None:
            raise SourceMissing("the files of the cache are gone")
        root = source.url if source.is_cached else spec.url
        on_disk = spec.takes // 4 * 3 if spec.version % 2 else 0
        backends = frozenset({"python" if spec.is_python else "onnxruntime"})
        about = (on_disk, spec.declared, spec.url, backends)
        return Package(root, (), *about, leaves_gpu_open=True)

    async def has_changed(self, source: ModelSource, content_key: str, since: float) -> bool:
        spec = self.cached(source.url) if source.is_cached else self.specs[source.url]
        return spec is None or spec.url != content_key

    async def place(
        self, name: str, model_id: str, package: Package, gpu: int | None = None, **_: object
    ) -> Placement:
        spec = self.specs[package.content_key]
        await turns(self._draws.of("disk", "place", name))
        self.admitted(spec, gpu or 0)
        if (fault := self._fault("place", spec.model_id)) is not None:
            raise self._error(fault)
        helpers = [f"{name}.h{number}" for number in range(spec.helpers)]
        steps = steps_of(name, spec)
        placement = Placement((*helpers, name), tuple(steps))
        self.folders[name] = StagedModel(name, model_id, placement, gpu=gpu)
        for number, each in enumerate((*helpers, *steps, name)):
            self._placed[each], self._gpus[each] = (package.root, number), gpu
        await turns(self._draws.of("disk", "placed", name))
        return placement

    async def confirm(self, name: str, source: ModelSource, content_key: str, held: object) -> None:
        folder = self.folders.get(name)
        await self._act("confirm", name, folder.model_id if folder else "")
        if name in self.folders:
            self.folders[name] = replace(
                self.folders[name],
                is_loaded=True,
                source=source,
                can_load_again=not source.files,
                content_key=content_key,
                held=dict(held),
            )

    async def remove(self, name: str) -> None:
        folder = self.folders.get(name)
        await self._act("remove", name, folder.model_id if folder else "")
        if (gone := self.folders.pop(name, None)) is not None:
            for each in gone.placement.names:
                self._placed.pop(each, None)

    async def set_aside(self, name: str) -> str:
        """Keep nothing: all files are the callers' own, or of the disk cache."""
        await turns(self._draws.of("disk", "keep", name))
        return ""

    async def discard(self, kept: str) -> None:
        await turns(self._draws.of("disk", "discard"))

    async def staged(self) -> list[StagedModel]:
        await turns(self._draws.of("disk", "staged"))
        return list(self.folders.values())

    async def save(self, data: object) -> None:
        await self._act("save", "", "")
        self.sizes = data
