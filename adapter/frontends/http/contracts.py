"""Says what differs by contract in an inference: its lease, its own headers, its refusals.

SageMaker's container contract and V2 are here; endpoint/contract.py has InvokeEndpoint.
"""

from typing import Protocol

from adapter.control.door import Lease, Models, TritonState, WaitForLease
from adapter.core.model import ModelId
from adapter.errors import AdapterError, CapacityError
from adapter.frontends.endpoint.errors import CallInfo
from adapter.frontends.http.instrumentation import Refusal, own_refusal


class CallFacts(Protocol):
    """Says what a contract needs to know of a request, and keeps what it tells of the call."""

    model_id: ModelId | None
    call_info: CallInfo | None  # of a call of an endpoint, for its answer
    caller: str  # access key of a signed call
    has_lease: bool
    was_sent: bool  # Triton ran out of memory with it before
    was_waited_for: bool  # its model was not loaded when it came

    @property
    def echoed_lines(self) -> bytes:
        """Return the header lines of its head that the answer repeats."""

    def read_authorization(self) -> str:
        """Return its Authorization header, or an empty string."""


class Contract(Protocol):
    """Decides how an inference of one protocol is leased, answered and refused."""

    sends_again: bool  # the whole body is kept, to be sent once more when memory was freed for it

    def find_lease(self, model_id: ModelId) -> Lease | None:
        """Return a lease of a loaded model; None if `wait_for_lease` is to wait for the model.

        Raises the error of a request that is refused at once.
        """

    async def wait_for_lease(self, model_id: ModelId, request: CallFacts) -> Lease:
        """Return a lease of the model once it is loaded."""

    def answer_lines(self, request: CallFacts) -> bytes:
        """Return the header lines that any answer of this contract has."""

    def refuse(self, error: AdapterError | None, request: CallFacts) -> Refusal:
        """Word the refusal for `error`; None stands for a bug."""

    async def free_memory(self, error: CapacityError) -> bool:
        """Free memory for a request that ran out of it; return whether any was freed."""


class ContainerContract:
    """SageMaker's container contract, or V2."""

    sends_again = False

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        *,
        is_v2: bool,
        on_demand: WaitForLease | None = None,  # has models loaded for calls of V2
        load_wait_seconds: float = 0,  # how long a call of V2 waits for a load by somebody else
    ) -> None:
        self._models = models
        self._triton = triton
        self._is_v2 = is_v2
        self._loads_for_calls = on_demand is not None
        self._wait_for_lease = on_demand or models.wait_for_lease
        self._load_wait = load_wait_seconds

    def find_lease(self, model_id: ModelId) -> Lease | None:
        """Return a lease; None if the model is being loaded and the contract waits for that."""
        try:
            lease = self._models.lease(model_id)
        except AdapterError:
            if self._is_v2 and self._is_to_be_loaded(model_id):
                return None
            raise
        return None if self._triton.has_lost(lease.record) else lease

    def _is_to_be_loaded(self, model_id: ModelId) -> bool:
        """Return whether an inference may wait for the model: it is loaded for calls, or is being
        loaded.
        """
        return self._loads_for_calls or self._models.is_being_loaded(model_id)

    async def wait_for_lease(self, model_id: ModelId, _: CallFacts) -> Lease:
        """Return a lease of the model once it is loaded."""
        return await self._wait_for_lease(model_id, self._load_wait)

    def answer_lines(self, request: CallFacts) -> bytes:
        """Return the header lines of the request that the answer repeats."""
        return request.echoed_lines

    def refuse(self, error: AdapterError | None, request: CallFacts) -> Refusal:
        """Word the refusal with the model that the path names, for errors that name none."""
        return own_refusal(error, request.model_id)

    async def free_memory(self, _: CapacityError) -> bool:
        """Free no memory: the contract sends no request again."""
        return False


class ContainerContracts:
    """Holds SageMaker's container contract and V2 before the same models."""

    def __init__(
        self,
        models: Models,
        triton: TritonState,
        *,
        on_demand: WaitForLease | None = None,  # has models loaded for calls of V2
        load_wait_seconds: float = 0,  # how long a call of V2 waits for a load by somebody else
    ) -> None:
        self.sagemaker = ContainerContract(models, triton, is_v2=False)
        self.v2 = ContainerContract(
            models,
            triton,
            is_v2=True,
            on_demand=on_demand,
            load_wait_seconds=load_wait_seconds,
        )
