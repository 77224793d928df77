"""Loads, unloads and tries models for the status page, by the rules of the other listeners.

A load by the page is one by a person: the model stays until somebody unloads it. A trial is an
inference like another one: it loads a model of a store for the time that calls need it.
"""

import os
import stat
from pathlib import Path

from adapter.control.door import Lease, ModelRecord, Models, StoreModels, TritonState
from adapter.core.calls import V2Answer, V2Call, V2DataPlane
from adapter.core.model import ModelId, parse_model_id
from adapter.errors import BackendError, CapacityError, InvalidRequest, ModelNotFound
from adapter.frontends.http.binary import put_name_back
from adapter.frontends.repository import Repository
from adapter.runtime.threads import LOOKUPS

MAX_BODY_BYTES = 2**20  # limits the request of a trial and its answer, which a page shows whole
SAMPLE = "sample.json"
# a trial waits so long for a load of the model by somebody else
_LOAD_WAIT_SECONDS = 5.0


class ModelActions:
    """Loads, unloads and tries one model at a time."""

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        repository: Repository,
        dataplane: V2DataPlane,
        stores: StoreModels | None,  # None without a store
    ) -> None:
        self._models = models
        self._triton = triton
        self._repository = repository
        self._dataplane = dataplane
        self._stores = stores

    async def load(self, name: str) -> None:
        """Load the model from a store, or else from a model root; it stays until its unload."""
        model_id = parse_model_id(name)
        if self._stores is None or not await self._stores.load(model_id):
            await self._repository.load(model_id, {})

    async def unload(self, name: str) -> None:
        """Unload the model. Raises ModelNotFound."""
        await self._models.unload(parse_model_id(name))

    async def infer(self, name: str, body: bytes) -> bytes:
        """Return the answer to an inference of V2; without a body, to sample.json of the package.

        Raises as a call of V2 does, and InvalidRequest if the package has no such file.
        """
        self._triton.refuse_unless_open()
        lease = await self._wait_for_lease(parse_model_id(name))
        try:
            with lease as record:
                request = body or await LOOKUPS.run(_read_sample, record)
                headers = {
                    "Content-Type": "application/json",
                    "Content-Length": str(len(request)),
                }
                call = V2Call("POST", f"/models/{record.name}/infer", headers, request)
                async with self._dataplane.forward(call, lease) as answer:
                    text = await _read_limited(answer)
        except (BackendError, CapacityError) as error:
            raise await lease.judge(error) from error
        if record.is_renamed:
            text, _ = put_name_back(text, None, record.name, record.asked_for)
        return text

    async def _wait_for_lease(self, model_id: ModelId) -> Lease:
        if self._stores is not None:
            return await self._stores.wait_for_named(model_id, _LOAD_WAIT_SECONDS)
        return await self._models.wait_for_lease(model_id, _LOAD_WAIT_SECONDS)


def _read_sample(record: ModelRecord) -> bytes:
    """Return sample.json of the package. Raises InvalidRequest if it has none, or too large a one.

    A link is not followed: whoever made the package is not to choose which file is read.
    """
    if record.package is None:  # the model was loaded by an earlier run of the adapter
        raise ModelNotFound(f"the files of {record.id!r} are not known; load it again")
    path = Path(record.package.root) / SAMPLE
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        text = f"the package of {record.id!r} has no {SAMPLE}; write a request of your own"
        raise InvalidRequest(text) from error
    with os.fdopen(file, "rb") as sample:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= MAX_BODY_BYTES:
            raise InvalidRequest(
                f"{SAMPLE} of {record.id!r} must be a file of 1 to {MAX_BODY_BYTES} bytes"
            )
        return sample.read(MAX_BODY_BYTES)


async def _read_limited(answer: V2Answer) -> bytes:
    """Return the whole answer. Raises InvalidRequest if it is larger than a page can show."""
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.chunks():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise InvalidRequest(
                f"the answer has more than {MAX_BODY_BYTES} bytes, more than this page shows; "
                "call the model at the listener http"
            )
    return b"".join(pieces)
