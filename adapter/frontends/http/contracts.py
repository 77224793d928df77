"""Contracts of inferences: each leases models, and words answers and refusals.

SageMaker's container contract and V2 are here; endpoint/call.py has InvokeEndpoint.
"""

from typing import Protocol

from aiohttp import web

from adapter.control.door import Lease, Models, TritonState, WaitForLease
from adapter.core.calls import RawHeaders
from adapter.core.model import ModelId
from adapter.errors import AdapterError, CapacityError
from adapter.frontends.http.instrumentation import Refusal, own_refusal


class Attempt(Protocol):
    """A refused inference. `was_found`: its model is loaded. `was_sent`: Triton ran out of memory
    with the request before.
    """

    was_found: bool
    was_sent: bool

    def authorization(self) -> str:
        """Return the Authorization header of the request, or an empty string."""


class Contract(Protocol):
    """`sends_again`: the whole body is kept, to be sent once more when memory was freed for it.
    `renames`: the model has another name in Triton's answers than for its callers.
    """

    sends_again: bool
    renames: bool

    def lease(self, model_id: ModelId, is_typed: bool) -> Lease | None:
        """Lease the model; return None to have aiohttp answer, raise an error to refuse at once."""

    async def wait(self, model_id: ModelId, request: web.BaseRequest) -> Lease:
        """Lease the model for a request of aiohttp's, once it is loaded."""

    def renamed(self, headers: RawHeaders, body: bytes) -> tuple[RawHeaders, bytes]: ...
    def answer_line(self) -> bytes:
        """Return header lines that this answer alone has."""

    def refusal(self, error: AdapterError | None, model_id: ModelId, attempt: Attempt) -> Refusal:
        """Word the refusal for `error`; None stands for a bug."""

    async def frees_memory(self, error: CapacityError) -> bool: ...


class ContainerContract:
    """SageMaker's container contract, or V2: what is not loaded is refused, or waited for by
    aiohttp.
    """

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        *,
        is_v2: bool,
        on_demand: WaitForLease | None = None,  # has models loaded for calls of V2
        load_wait_seconds: float = 0,  # for a load by somebody else
    ) -> None:
        self.sends_again = self.renames = False
        self._models = models
        self._triton = triton
        self._is_v2 = is_v2
        self._loads_for_calls = on_demand is not None
        self._wait_for_lease = on_demand or models.wait_for_lease
        self._load_wait = load_wait_seconds

    def lease(self, model_id: ModelId, is_typed: bool) -> Lease | None:
        try:
            lease = self._models.lease(model_id)
        except AdapterError:
            may_wait = self._loads_for_calls or self._models.is_being_loaded(model_id)
            if self._is_v2 and may_wait:
                return None  # aiohttp waits for the model
            raise
        record = lease.record
        is_other = record.is_renamed or (is_typed and record.content_types)
        return None if is_other or self._triton.has_lost(record) else lease

    async def wait(self, model_id: ModelId, _: web.BaseRequest) -> Lease:
        return await self._wait_for_lease(model_id, self._load_wait)

    def renamed(self, headers: RawHeaders, body: bytes) -> tuple[RawHeaders, bytes]:
        return headers, body

    def answer_line(self) -> bytes:
        return b""

    def refusal(self, error: AdapterError | None, model_id: ModelId, _: Attempt) -> Refusal:
        return own_refusal(error, model_id)

    async def frees_memory(self, _: CapacityError) -> bool:
        return False


class ContainerContracts:
    """Both, before the same models."""

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        *,
        on_demand: WaitForLease | None = None,
        load_wait_seconds: float = 0,
    ) -> None:
        self.sagemaker = ContainerContract(models, triton, is_v2=False)
        self.v2 = ContainerContract(
            models,
            triton,
            is_v2=True,
            on_demand=on_demand,
            load_wait_seconds=load_wait_seconds,
        )
