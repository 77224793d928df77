"""Callers of V2's model repository: load, unload and index by name, of packages of several models
as well.
"""

import asyncio
from collections import Counter
from pathlib import PurePosixPath

from adapter.control.models import ModelControl
from adapter.core.model import ModelId
from adapter.errors import AdapterError
from adapter.frontends.model_repository import Repository
from tests.simulation.callers import Callers
from tests.simulation.models import Call, Spec, Violated
from tests.simulation.plan import Entry


class Root(PurePosixPath):
    """The model root, in which each model has a folder of its name."""

    def exists(self) -> bool:
        return True


class V2Callers(Callers):
    def __init__(self, world: object, control: ModelControl) -> None:
        super().__init__(world, control)
        self._repository = Repository(control, self._versions, [Root("/models")])
        # loaded from elsewhere, where the files are as they were
        self._adopted = {str(record.id) for record in control.registry.records()}
        self._reloads = Counter[str]()  # loads, each of which may find other files and unload

    async def _versions(self) -> dict[str, list[str]]:
        return {name: ["1"] for name in await self._world.triton.ready()}

    def play(self, entry: Entry) -> bool:
        match entry.verb, entry.words:
            case "reload", (name, leaves):
                self._begin(self._reload(name), leaves, name)
            case "index", ():
                self._begin(self._index(), None, "")
            case _:
                return super().play(entry)
        return True

    async def _reload(self, name: str) -> None:
        try:
            await self._load_once(name, is_forced=True)
        except AdapterError:
            return

    async def _load_once(self, name: str, *, is_forced: bool = False) -> None:
        """Load the model, or load it again where its files have changed, or it is forced."""
        spec, oracle = self._world.newest[name], self._oracle
        # a load of others and its undo, or an unload, come first
        extra = oracle.settings.load_seconds + 2 * oracle.settings.unload_seconds
        call = Call("load", name, self._world.now, extra)
        oracle.happened("load asked", name)
        oracle.present[name] = spec
        oracle.loading[name] += 1
        may_reload = is_forced or spec.version > 1
        if may_reload:
            oracle.serving.pop(name, None)
        self._reloads[name] += 1
        failure = None
        try:
            given = {"force_reload": True} if is_forced else {}
            await self._of_adapter(self._repository.load(ModelId(name), given))
        except AdapterError as error:
            failure = error
        except asyncio.CancelledError:
            if may_reload:  # what was asked for goes on without its caller
                oracle.happened("unload asked", name)
            raise
        finally:
            oracle.loading[name] -= 1
            self._reloads[name] -= 1
        if failure is not None:
            if may_reload:  # its unload may come yet
                oracle.happened("unload failed", name)
            oracle.failed(call, failure, spec)
            raise failure
        if not self._reloads[name]:
            oracle.loaded(call, self._loaded(name, spec))

    def _loaded(self, name: str, asked: Spec) -> Spec:
        """Return the files that Triton has, if they are as new as those that were asked for."""
        held = [each.spec.package for each in self._world.held_of(name) if each.state == "READY"]
        newest = max(held, key=lambda each: each.version, default=asked)  # beside one that is stuck
        return newest if newest.version >= asked.version or name in self._adopted else asked

    async def _unload(self, name: str) -> None:
        call, oracle = Call("unload", name, self._world.now), self._oracle
        oracle.happened("unload asked", name)
        oracle.unloading[name] += 1
        try:
            await self._of_adapter(self._repository.unload(ModelId(name), {}))
        except AdapterError as error:
            oracle.failed(call, error, self._world.newest[name])
        else:
            oracle.unloaded(call)
        finally:
            oracle.unloading[name] -= 1

    async def _index(self) -> None:
        """What must answer is in the index, as READY."""
        before, begun = dict(self._oracle.serving), self._world.now
        try:
            entries = await self._of_adapter(self._repository.index(only_ready=True))
        except AdapterError as error:
            self._oracle.failed(Call("index", "", self._world.now), error, _NONE)
            return
        listed = {entry.name for entry in entries}
        for name in before.keys() & self._oracle.serving.keys():
            moves = self._oracle.since(begun, "load asked", "unload asked", model_id=name)
            if name not in listed and self._world.is_up and not moves:
                raise Violated("2 index", f"{name} is loaded, and the index has {sorted(listed)}")


_NONE = Spec("", 1, is_python=False, takes=0, declared=None, grows=0, seconds=0.0)
