"""Fills a ModelMesh with models of 150 MB beside small ones, and counts what its clients get."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import grpc
from tritonclient.grpc import service_pb2 as v2

from adapter._proto import model_runtime_pb2 as pb
from tests.fakes.mesh import SIZE_SECONDS, Mesh
from tests.fakes.mesh_cache import Churn, MeshCache, TooOld
from tests.grpc_calls import infer_request, values_of
from tests.running import COMPLETE, RunningAdapter, embedded_adapter
from tests.trees import CONFIG, write_python_model

INFER = "inference.GRPCInferenceService/ModelInfer"
MIB = 2**20
LARGE_BYTES = 150_000_000
# a python process of Triton's, numpy loaded, beside what its model allocates
PROCESS_BYTES = 25 * MIB
UNLOAD_SECONDS = 10.0


def write_models(
    root: Path, prefix: str, count: int, size_bytes: int = 0, **declared: int
) -> list[str]:
    """Models that keep `size_bytes`; `memory_bytes` is declared if given."""
    names = [f"{prefix}{number}" for number in range(count)]
    config = CONFIG
    for key, figure in declared.items():
        config += f'parameters {{ key: "{key}" value {{ string_value: "{figure}" }} }}\n'
    for name in names:
        write_python_model(
            root / name,
            imports=f"NAME = {name!r}",
            initialize=f"self.kept = b'x' * {size_bytes}",
            answer=f"values = values + {_number(name)}",
            config=config,
        )
    return names


def _number(name: str) -> int:
    return sum(name.encode())


class MeshRuntime:
    """The five calls of the contract, and an inference whose answer is checked."""

    def __init__(self, mesh: Mesh, root: Path) -> None:
        self._mesh = mesh
        self._root = root

    def _about(self, kind: Any, model_id: str) -> Any:
        path = str(self._root / model_id)
        return kind(modelId=model_id, modelPath=path, modelKey='{"model_type": "python"}')

    async def predict(self, model_id: str) -> int:
        with suppress(grpc.aio.AioRpcError):
            asked = self._about(pb.PredictModelSizeRequest, model_id)
            seconds = self._mesh.predict_seconds
            return int((await self._mesh.manage("predictModelSize", asked, seconds)).sizeInBytes)
        return int(self._mesh.status.defaultModelSizeInBytes)

    async def load(self, model_id: str) -> int:
        asked = self._about(pb.LoadModelRequest, model_id)
        return int((await self._mesh.manage("loadModel", asked)).sizeInBytes)

    async def size(self, model_id: str) -> int:
        asked = pb.ModelSizeRequest(modelId=model_id)
        return int((await self._mesh.manage("modelSize", asked, SIZE_SECONDS)).sizeInBytes)

    async def unload(self, model_id: str) -> None:
        await self._mesh.send_unload(model_id)

    async def infer(self, model_id: str) -> None:
        request = infer_request(model_id, 1.0).SerializeToString()
        answer = v2.ModelInferResponse.FromString(await self._mesh.infer(INFER, model_id, request))
        assert values_of(answer) == [1 + _number(model_id)], model_id


@dataclass
class Tally:
    """`most_over`: the bytes by which memory was above the limit, `longest_over`: the seconds."""

    answered: int = 0
    churned: int = 0
    failed: list[str] = field(default_factory=list)
    most_over: int = 0
    longest_over: float = 0.0


def shuffled(names: Sequence[str], *, seed: int) -> list[str]:
    return random.Random(seed).sample(names, len(names))


class Stage:
    """An adapter with a limit of memory, and a ModelMesh whose clients use models of `root`.

    A patient client comes again when ModelMesh refuses for churn; `refused` are the others' models.
    """

    def __init__(
        self,
        root: Path,
        *flags: str,  # of the adapter
        churn_seconds: float,  # the least age of the oldest model at which a new one is taken
        memory_limit: str = "900MiB",
        is_patient: bool = True,
    ) -> None:
        self.tally = Tally()
        self.refused: list[str] = []
        self.cache: MeshCache
        self._root = root
        self._flags = (f"--model-roots={root}", f"--memory-limit={memory_limit}", COMPLETE, *flags)
        self._churn_seconds = churn_seconds
        self._is_patient = is_patient
        self._undo = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as undo:
            adapter = undo.enter_context(embedded_adapter(*self._flags))
            mesh = Mesh(adapter.listeners["grpc"], adapter.listeners["grpc"])
            mesh.predict_seconds = 60  # a busy machine may not answer in 500 ms
            undo.push_async_callback(mesh.close)
            status = await mesh.start()
            self.cache = MeshCache(
                MeshRuntime(mesh, self._root),
                capacity_bytes=status.capacityInBytes,
                default_bytes=status.defaultModelSizeInBytes,
                load_seconds=status.modelLoadingTimeoutMs / 1000,
                load_concurrency=status.maxLoadingConcurrency,
                churn_seconds=self._churn_seconds,
            )
            undo.push_async_callback(self.cache.close)
            watch = asyncio.create_task(self._watch(adapter))
            undo.push_async_callback(asyncio.wait, {watch})
            undo.callback(watch.cancel)
            self._undo = undo.pop_all()
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            if raised[0] is None:
                await asyncio.wait_for(self.cache.quiet(), 60)
        finally:
            await self._undo.aclose()

    def write(
        self, prefix: str, count: int, *, large: bool = False, is_declared: bool = False
    ) -> list[str]:
        """Write packages, and return their names."""
        size = LARGE_BYTES if large else 0
        return write_models(self._root, prefix, count, size, is_declared=is_declared)

    async def use(self, names: Sequence[str], *, callers: int = 4) -> None:
        """Use each model once."""
        left = iter(names)

        async def call() -> None:
            for name in left:
                await self._use(name)

        await asyncio.gather(*(call() for _ in range(callers)))

    async def use_at_random(
        self, names: Sequence[str], *, calls: int, callers: int, seed: int
    ) -> None:
        """Make calls, each for any of the models."""
        await self.use(random.Random(seed).choices(names, k=calls), callers=callers)

    async def _use(self, name: str) -> None:
        while True:
            try:
                await self.cache.use(name)
            except Churn:
                self.tally.churned += 1
                if not self._is_patient:
                    self.refused.append(name)
                    return
                await asyncio.sleep(0.5)
            except (grpc.aio.AioRpcError, TimeoutError, RuntimeError, TooOld) as error:
                text = error.details() if isinstance(error, grpc.aio.AioRpcError) else repr(error)
                self.tally.failed.append(f"{name}: {text}")
                return
            else:
                self.tally.answered += 1
                return

    async def _watch(self, adapter: RunningAdapter) -> None:
        """Look at used memory several times a second."""
        tally, since = self.tally, None
        while True:
            devices = (await asyncio.to_thread(adapter.state))["memory"]["devices"]
            [device] = devices.values()
            over, now = device["used_bytes"] - device["limit_bytes"], time.monotonic()
            tally.most_over = max(tally.most_over, over)
            since = (since or now) if over > 0 else None
            if since is not None:
                tally.longest_over = max(tally.longest_over, now - since)
            await asyncio.sleep(0.1)

    def check(self, *, answers: int) -> None:
        """All were answered, and memory was never above the limit by more than one load, nor for
        longer than ModelMesh takes to unload.
        """
        self._print()
        assert self.tally.failed == []
        assert self.tally.answered == answers
        self._check_memory()

    def check_share(self, *, answers: int, failed_share: float) -> None:
        """At least so many were answered, and at most that share failed; memory as above."""
        self._print()
        assert self.tally.answered >= answers
        assert len(self.tally.failed) <= failed_share * (
            self.tally.answered + len(self.tally.failed)
        )
        self._check_memory()

    def _check_memory(self) -> None:
        assert self.tally.most_over <= LARGE_BYTES + PROCESS_BYTES
        assert self.tally.longest_over < UNLOAD_SECONDS

    def _print(self) -> None:
        causes = Counter(failure.partition(": ")[2] for failure in self.tally.failed)
        summary = replace(self.tally, failed=[])
        test = os.environ["PYTEST_CURRENT_TEST"]
        print(f"\n{test}: {summary}, {causes}, {self.cache.counts}")  # noqa: T201
