"""Call V2's model repository: load and unload by name, also packages of several models."""

import asyncio
from collections import Counter

from adapter.control.door import Replaces
from adapter.core.model import ModelId, ModelSource
from adapter.errors import AdapterError, ModelNotFound
from tests.simulation.callers import Callers
from tests.simulation.control import Control
from tests.simulation.models import Call, Spec
from tests.simulation.plan import Entry


class V2Callers(Callers):
    """Load models by name: a model that serves is replaced if its files have changed."""

    def __init__(self, world: object, control: Control) -> None:
        super().__init__(world, control)
        # loaded from elsewhere, where the files are as they were
        self._adopted = {model.id for model in control.known_models()}
        self._reloads = Counter[str]()  # loads, each of which may find other files and unload

    def play(self, entry: Entry) -> bool:
        match entry.verb, entry.words:
            case "reload", (name, leaves):
                self._begin(self._reload(name), leaves, name)
            case _:
                return super().play(entry)
        return True

    async def _reload(self, name: str) -> None:
        try:
            await self._load_once(name, is_forced=True)
        except AdapterError:
            return

    async def _replace(self, name: str, *, is_forced: bool) -> None:
        ready = {model.id: model.source for model in self._world.known_models("READY")}
        source = ready.get(name, ModelSource(f"/models/{name}"))
        replaces = Replaces.ALWAYS if is_forced else Replaces.CHANGED_FILES
        await self._control.models.replace(ModelId(name), source, replaces)

    async def _unload_if_there(self, name: str) -> None:
        try:
            await self._control.models.unload(ModelId(name))
        except ModelNotFound:
            return  # Triton also accepts the unload of what it does not have

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
            await self._await_adapter(self._replace(name, is_forced=is_forced))
        except AdapterError as error:
            failure = error
        except asyncio.CancelledError:
            if may_reload:  # the replacement goes on without its caller
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
            await self._await_adapter(self._unload_if_there(name))
        except AdapterError as error:
            oracle.failed(call, error, self._world.newest[name])
        else:
            oracle.unloaded(call)
        finally:
            oracle.unloading[name] -= 1
