"""Call the adapter as a platform like SageMaker does: load, invoke, and unload on 507."""

import asyncio
from collections.abc import Callable
from typing import Any

from adapter.control.door import Lease
from adapter.core.model import ModelId, ModelSource
from adapter.errors import AdapterError, CapacityError, ModelNotFound
from tests.simulation.control import Control
from tests.simulation.models import Call, Entry, Spec, Violated

_TRIES = 4


class Callers:
    def __init__(self, world: object, control: Control) -> None:
        self._world = world
        self._control = control
        self._oracle = world.oracle
        self._tasks: set[asyncio.Task[Any]] = set()
        self._used: dict[str, float] = {}

    @property
    def count(self) -> int:
        return len(self._tasks)

    def play(self, entry: Entry) -> bool:
        """Begin an operation; return False if the entry is none."""
        match entry.verb, entry.words:
            case "load", (name, leaves):
                self._begin(self._load(name), leaves, name)
            case "unload", (name, leaves):
                self._begin(self._unload(name), leaves, name)
            case "invoke", (name, count, leaves):
                self._begin(self._invoke(name, count), leaves, name)
            case "version", (name,):
                self._world.new_version(name)
            case _:
                return False
        return True

    def _begin(self, work: Any, leaves: float | None, name: str) -> None:
        task = self._world.begin(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if leaves is not None:
            asyncio.get_running_loop().call_later(leaves, self._leave, task, name)

    def _leave(self, task: asyncio.Task[Any], name: str) -> None:
        if task.cancel():
            self._oracle.happened("caller left", name)
            self._world.story.note("a caller leaves", model_id=name)

    def leave(self) -> None:
        """All leave: the adapter has gone."""
        for task in [*self._tasks]:
            task.cancel()

    async def _load(self, name: str) -> None:
        """Load as SageMaker does: on a 507 it unloads another model, and asks again."""
        for _ in range(_TRIES):
            try:
                await self._load_once(name)
            except CapacityError:
                if (other := self._least_used(name)) is None:
                    return
                await self._unload(other)
            except AdapterError:
                return
            else:
                return

    def _least_used(self, but: str) -> str | None:
        others = [each for each in self._oracle.serving if each != but]
        return min(others, key=lambda each: (self._used.get(each, 0.0), each), default=None)

    async def _load_once(self, name: str) -> None:
        spec = self._world.newest[name]
        call, oracle = Call("load", name, self._world.now), self._oracle
        oracle.happened("load asked", name)
        oracle.present[name] = spec
        source = ModelSource(spec.url)
        oracle.loading[name] += 1
        try:
            await self._await_adapter(self._control.models.load(ModelId(name), source))
        except AdapterError as error:
            failure = error
        else:
            failure = None
        finally:
            oracle.loading[name] -= 1
        if failure is not None:
            oracle.failed(call, failure, spec)
            raise failure
        oracle.loaded(call, spec)

    async def _unload(self, name: str) -> None:
        call = Call("unload", name, self._world.now)
        must = self._oracle.serving.get(name)
        self._oracle.happened("unload asked", name)
        self._oracle.unloading[name] += 1
        try:
            await self._await_adapter(self._control.models.unload(ModelId(name)))
        except ModelNotFound as error:
            if must and not self._oracle.since(call.begun, "end", "stub ended"):
                raise Violated(
                    "2 not found", f"{name} was loaded, its unload is {error!r}"
                ) from None
        except AdapterError as error:
            self._oracle.failed(call, error, self._world.newest[name])
        else:
            self._oracle.unloaded(call)
        finally:
            self._oracle.unloading[name] -= 1

    async def _invoke(self, name: str, count: int) -> None:
        for _ in range(count):
            try:
                await self._infer(name)
            except ModelNotFound:
                await self._load(name)
            except AdapterError:
                await asyncio.sleep(0.5)

    async def _infer(self, name: str) -> Spec:
        call, oracle = Call("infer", name, self._world.now), self._oracle
        self._world.story.counts["call"] += 1
        self._used[name] = self._world.now
        try:
            lease = self._control.models.lease(ModelId(name))
            expected = oracle.serving.get(name)
            lease.begin()
        except AdapterError as error:
            oracle.not_leased(call, error)
            raise
        oracle.leased(call)
        try:
            spec = await self._computed(name, lease)
        except AdapterError as told:
            oracle.failed(call, told, self._world.newest[name])
            raise
        oracle.happened("infer done", name)
        oracle.answered(call, spec, expected)
        return spec

    async def _computed(
        self, name: str, lease: Lease, done: Callable[[object], object] = bool
    ) -> Spec:
        """Have Triton answer a request, which goes on when its caller leaves, until `done`."""
        asked = self._world.begin_call(self._world.triton.infer(lease.record.name, name))
        asked.add_done_callback(done)
        try:
            spec = await asyncio.shield(asked)
        except asyncio.CancelledError as left:
            lease.abandon()
            asked.add_done_callback(lambda done: lease.end(done.exception()))
            lease.__exit__(type(left), left, None)  # as where a `with` block has it
            raise
        except AdapterError as error:
            judged = await self._await_adapter(lease.judge(error))
            raise lease.end(judged) from None
        lease.end()
        return spec

    async def _await_adapter(self, work: Any) -> Any:
        """Run a call of the adapter in its context. The caller may be cancelled."""
        try:
            return await self._world.begin_call(work)
        except AdapterError:
            raise
        except Exception as error:
            raise Violated("2 documented errors", repr(error)) from error
