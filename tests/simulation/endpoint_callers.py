"""Call an endpoint, whose calls load models, and leave at any moment."""

import asyncio
from typing import Any

from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId
from adapter.errors import AdapterError, CapacityError, ModelNotFound
from tests.simulation.callers import Callers
from tests.simulation.models import Call, Violated
from tests.simulation.plan import Entry

_NOTICED_SECONDS = 20.0


class EndpointCallers(Callers):
    """Call for models of the store; platforms load and unload some of them."""

    def __init__(self, world: object, control: object, endpoint: object) -> None:
        super().__init__(world, control)
        self._endpoint = endpoint
        self._residents = endpoint.oracle

    def play(self, entry: Entry) -> bool:
        match entry.verb, entry.words:
            case "ask", (key, count, leaves):
                self._begin(self._ask(key, count), leaves, key)
            case "delete", (key, leaves):
                self._begin(self._delete(key), leaves, key)
            case "bring", (key, leaves):
                self._begin(self._bring(key), leaves, key)
            case "put", (key, number, seconds):
                self._put(key, number, seconds)
            case "lose", (key, seconds):
                self._lose(key, seconds)
            case "fill", (count, seconds):
                self._fill(count, seconds)
            case _:
                return False
        return True

    # -- the store and the disk -------------------------------------------------------------

    def _put(self, key: str, number: int, seconds: float) -> None:
        """Somebody uploads a version, one file after the other."""
        store = self._endpoint.store
        self._oracle.happened("put", key)
        self._world.story.note("another version is in the store", key=key, version=number)
        store.put(key, config=number, weights=None if seconds else number)
        if seconds:
            later = asyncio.get_running_loop().call_later
            later(seconds, lambda: store.put(key, weights=number))

    def _lose(self, key: str, seconds: float) -> None:
        self._oracle.happened("lose", key)
        self._world.story.note("the store loses a model", key=key)
        self._endpoint.store.lose(key)
        asyncio.get_running_loop().call_later(seconds, self._put, key, 0, 0.0)

    def _fill(self, count: int, seconds: float) -> None:
        self._oracle.happened("fill")
        self._world.story.note("others fill the disk", bytes=count)
        self._endpoint.room.strangers += count
        asyncio.get_running_loop().call_later(seconds, self._empty, count)

    def _empty(self, count: int) -> None:
        self._oracle.happened("fill")
        self._endpoint.room.strangers -= count

    # -- calls ------------------------------------------------------------------------------

    async def _ask(self, key: str, count: int) -> None:
        for _ in range(count):
            try:
                await self.ask_once(key)
            except AdapterError:
                await asyncio.sleep(0.5)

    async def ask_once(self, key: str) -> None:
        """Infer, and once more after an eviction where memory ran out, as the endpoint does."""
        try:
            await self._asked(key)
        except CapacityError as error:
            if not await self._await_adapter(self._control.stores.make_room(error)):
                raise
            await self._asked(key)

    async def all_answer(self) -> None:
        """Nothing fails any more: each model that has room is loaded for a call."""
        for key in self._endpoint.catalog.versions:
            try:
                await self.ask_once(key)
            except AdapterError as error:
                self._residents.check_answer(key, error)

    async def _asked(self, key: str) -> None:
        call = Call("infer", key, self._world.now)
        self._world.story.counts["call"] += 1
        lease = await self._leased(call)
        record = lease.record
        self._residents.busy[record.name] += 1
        self._residents.used_at[key] = self._world.now
        expected = self._endpoint.known.get(record.source.url)
        try:
            spec = await self._computed(key, lease, self._done_with(record.name))
        except AdapterError as told:
            self._residents.failed(call, told)
            raise
        self._oracle.happened("infer done", key)
        self._residents.answered(call, spec, expected)

    def _done_with(self, name: str) -> Any:
        busy = self._residents.busy

        def done(_: object) -> None:
            busy[name] -= 1

        return done

    async def _leased(self, call: Call) -> Any:
        residents, key = self._residents, call.model_id
        waiting = residents.waiting
        waiting[key] += 1
        task = self._world.begin_call(self._begun(key))
        try:
            lease = await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().end()
            raise
        except AdapterError as error:
            residents.waited(call, call.begun)
            residents.refused(call, error)
            raise
        except Exception as error:
            raise Violated("2 documented errors", repr(error)) from error
        finally:
            waiting[key] -= 1
        residents.waited(call, call.begun)
        return lease

    async def _begun(self, key: str) -> Any:
        lease, _ = await self._control.stores.wait_for_lease(ModelId(key), ArtifactKey("", key))
        lease.begin()
        return lease

    # -- platforms --------------------------------------------------------------------------

    async def _bring(self, key: str) -> None:
        """Load a model of the store by its name, and keep it, as V2's repository does."""
        call, residents = Call("load", key, self._world.now), self._residents
        residents.waiting[key] += 1
        try:
            is_there = await self._await_adapter(self._control.stores.load(ModelId(key)))
        except AdapterError as error:
            residents.refused(call, error)
            return
        finally:
            residents.waiting[key] -= 1
        upset = ("end", "restart")
        # whoever asks before the end is noticed is told of a model that goes with it
        is_upset = any(self._oracle.since(call.begun - _NOTICED_SECONDS, each) for each in upset)
        is_upset |= self._oracle.since(call.begun, "unload asked", model_id=key)
        # the death of a process is noticed by the next request, whose load is one of calls
        is_upset |= self._oracle.since(0.0, "stub ended", model_id=key)
        residents.brought.add(key)
        if is_there and not is_upset:
            residents.kept[key] = self._world.now

    async def _delete(self, key: str) -> None:
        call = Call("unload", key, self._world.now)
        self._oracle.happened("unload asked", key)
        self._residents.kept.pop(key, None)
        self._oracle.unloading[key] += 1
        try:
            await self._await_adapter(self._control.models.unload(ModelId(key)))
        except ModelNotFound:
            pass
        except AdapterError as error:
            self._residents.refused(call, error)
        finally:
            self._oracle.unloading[key] -= 1
