"""A ModelMesh in front of the adapter: its cache, as tests/fakes/mesh_cache.py plays it, calls the
real frontend; clients use models, and it loads and evicts by its own books.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from adapter._proto import model_runtime_pb2 as pb
from adapter.core.model import ModelId
from adapter.errors import AdapterError, BackendUnavailable, ModelNotFound
from adapter.frontends.grpc.mesh_sizes import MeshSizes
from adapter.frontends.grpc.modelmesh import ModelRuntime, Options
from adapter.telemetry.metrics import Metrics
from tests.fakes.mesh_cache import Churn, MeshCache
from tests.simulation.callers import Callers
from tests.simulation.control import Control
from tests.simulation.mesh_books import MeshOracle
from tests.simulation.models import SIZE_FACTOR, Call, Spec, Violated
from tests.simulation.plan import Entry
from tests.simulation.platforms import DEFAULT_BYTES

_POLL_SECONDS, _START_SECONDS = 2.0, 180.0
_PREDICT_SECONDS, _SIZE_SECONDS = 0.5, 30.0
_AGAIN_SECONDS, _AGAIN = 10.0, 90  # an unload that has failed is repeated
_TRIES = 8  # of an inference


def _judged(act: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the world of a violation: the cache takes it for a failure of the runtime."""

    @wraps(act)
    async def call(self: "MeshCallers", *args: object) -> object:
        try:
            return await act(self, *args)
        except Violated as found:
            self._world.violate(found)
            raise

    return call


class MeshCallers(Callers):
    """The Runtime of tests/fakes/mesh_cache.py, and those who use the models behind it."""

    def __init__(self, world: object, control: Control) -> None:
        super().__init__(world, control)
        words = world.oracle.settings.platform
        reads = world.plan.reader != "off" or world.oracle.settings.memory_limit
        state = control.state
        sizes = MeshSizes(
            control.models,
            state,
            control.mesh_books,
            default_bytes=DEFAULT_BYTES,
            size_factor=SIZE_FACTOR,
            capacity_bytes=None if reads else world.plan.device_bytes,
        )
        options = Options(
            load_seconds=world.oracle.settings.load_seconds,
            unload_seconds=world.oracle.settings.unload_seconds,
            load_concurrency=words.load_concurrency,
            model_concurrency=0,
        )
        self._runtime = ModelRuntime(
            control.models,
            state.triton,
            world.triton,
            sizes,
            options=options,
            metrics=Metrics(),
            is_ready=lambda: state.triton.is_open and state.triton.is_up,
        )
        self._words = words
        self._paths = dict(world.newest)  # of this ModelMesh, by id
        self._books = MeshOracle(world)
        self._begun: dict[str, float] = {}  # the last load of each model that went well
        self._cache: MeshCache | None = None
        self._started = asyncio.Event()
        self._returning: dict[str, asyncio.Task[int]] = {}
        self._begin(self._start(), None, "")

    @property
    def count(self) -> int:
        return len(self._tasks) + (self._cache is not None and self._cache.is_busy)

    def leave(self) -> None:
        super().leave()
        for task in self._returning.values():
            task.cancel()
        self._books.leave()
        if self._cache is not None:
            self._cache.stop()

    def play(self, entry: Entry) -> bool:
        match entry.verb, entry.words:
            case "use", (name, count, leaves):
                self._begin(self._use(name, count), leaves, name)
            case "mesh", ():
                self._world.story.note("modelmesh ends")
                self.leave()
                self._cache = None
                self._started = asyncio.Event()
                self._begin(self._start(), None, "")
            case _:
                return False
        return True

    # -- its start, and its clients -----------------------------------------------------------

    async def _start(self) -> None:
        """Ask until the adapter is ready; it may tell that no mesh would start with it."""
        end = self._world.now + _START_SECONDS
        for model_id in [*self._oracle.serving]:
            self._oracle.happened("unload asked", model_id)
        while self._world.now < end:
            with suppress(AdapterError):
                status = await self._await_adapter(self._runtime.status(pb.RuntimeStatusRequest()))
                if status.status == pb.RuntimeStatusResponse.READY:
                    self._began(status)
                    return
            await asyncio.sleep(_POLL_SECONDS)

    def _began(self, status: Any) -> None:
        self._oracle.present.clear()
        self._books.began(status.capacityInBytes)
        self._world.story.note("modelmesh starts", capacity=status.capacityInBytes)
        self._cache = MeshCache(
            self,
            capacity_bytes=status.capacityInBytes,
            default_bytes=status.defaultModelSizeInBytes,
            load_seconds=status.modelLoadingTimeoutMs / 1000,
            load_concurrency=status.maxLoadingConcurrency,
            churn_seconds=self._words.churn_seconds,
        )
        self._started.set()

    async def _use(self, name: str, count: int) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._started.wait(), _START_SECONDS)
        if self._cache is None:
            return
        for _ in range(count):
            try:
                await self._cache.use(name)
            except Churn:
                await asyncio.sleep(self._words.churn_seconds)
            except Violated:
                raise
            except Exception:  # noqa: BLE001 - judged where it was raised
                await asyncio.sleep(0.5)

    # -- the runtime, as the cache calls it ---------------------------------------------------

    def _asked(self, kind: Any, model_id: str) -> Any:
        spec = self._paths[model_id]
        disk = spec.takes // 4 * 3 if self._words.tells_disk else 0
        key = json.dumps({"disk_size_bytes": disk})
        return kind(modelId=model_id, modelPath=spec.url, modelKey=key)

    @_judged
    async def predict(self, model_id: str) -> int:
        asked, size = self._asked(pb.PredictModelSizeRequest, model_id), DEFAULT_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_PREDICT_SECONDS):
                found = await self._await_adapter(self._runtime.predict_size(asked))
                size = found.sizeInBytes
        self._books.predicted(model_id, size)
        return size

    @_judged
    async def load(self, model_id: str) -> int:
        spec, oracle = self._paths[model_id], self._oracle
        call = Call("load", model_id, self._world.now)
        oracle.happened("load asked", model_id)
        oracle.present[model_id] = spec
        oracle.loading[model_id] += 1
        self._books.begins(call, spec)
        try:
            request = self._asked(pb.LoadModelRequest, model_id)
            answer = await self._await_adapter(self._runtime.load(request))
        except asyncio.CancelledError:
            oracle.happened("caller left", model_id)
            raise
        except AdapterError as error:
            failure = error
        else:
            failure = None
        finally:
            oracle.loading[model_id] -= 1
        if failure is None:
            oracle.loaded(call, spec)
            self._books.loaded(call, spec)
            self._begun[model_id] = call.begun
            self._books.note_size(spec, answer.sizeInBytes, call.begun)
            return answer.sizeInBytes
        self._failed(call, failure, spec)
        raise failure

    def _failed(self, call: Call, error: AdapterError, spec: Spec) -> None:
        self._oracle.failed(call, error, spec)
        self._books.refused(call, error, spec)

    @_judged
    async def size(self, model_id: str) -> int:
        """Return the size; what was predicted where the adapter does not tell."""
        try:
            async with asyncio.timeout(_SIZE_SECONDS):
                asked = pb.ModelSizeRequest(modelId=model_id)
                size = (await self._await_adapter(self._runtime.size(asked))).sizeInBytes
        except (AdapterError, TimeoutError):
            return self._books.last(model_id)
        self._books.note_size(self._paths[model_id], size, self._begun[model_id])
        return size or self._books.last(model_id)

    @_judged
    async def unload(self, model_id: str) -> None:
        for _ in range(_AGAIN):
            call = Call("unload", model_id, self._world.now)
            self._oracle.happened("unload asked", model_id)
            self._oracle.unloading[model_id] += 1
            try:
                request = pb.UnloadModelRequest(modelId=model_id)
                await self._await_adapter(self._runtime.unload(request))
            except AdapterError as error:
                self._oracle.failed(call, error, self._paths[model_id])
            else:
                self._oracle.unloaded(call)
                return
            finally:
                self._oracle.unloading[model_id] -= 1
            await asyncio.sleep(_AGAIN_SECONDS)

    @_judged
    async def infer(self, model_id: str) -> Spec:
        for _ in range(_TRIES):
            try:
                self._control.state.triton.refuse_lost(ModelId(model_id))
                return await self._infer(model_id)
            except BackendUnavailable:
                continue
            except ModelNotFound:
                await self._load_again(model_id)
        return await self._infer(model_id)

    async def _load_again(self, model_id: str) -> None:
        """Load the model once for all whose requests found that it is gone."""
        task = self._returning.get(model_id)
        if task is None or task.done():
            task = self._returning[model_id] = self._world.begin(self._quietly(model_id))
        await asyncio.shield(task)

    async def _quietly(self, model_id: str) -> None:
        with suppress(AdapterError):
            await self.load(model_id)
