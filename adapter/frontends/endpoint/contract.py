"""The contract of InvokeEndpoint: a lease that waits for its model, and AWS's words for errors."""

from multidict import CIMultiDict

from adapter.control.door import Lease, StoreModels
from adapter.core.artifacts import ArtifactKey, CacheUse
from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    CapacityError,
    InvalidCall,
    InvalidRequest,
)
from adapter.frontends.endpoint.errors import (
    CACHE,
    VARIANT_HEADER,
    CallInfo,
    new_request_id,
    new_request_id_line,
    refusal_of,
)
from adapter.frontends.endpoint.members import Endpoints, Members, missing, read_members
from adapter.frontends.http.contracts import CallFacts
from adapter.frontends.http.instrumentation import Refusal


class EndpointContract:
    """The contract of all calls that name the same endpoint, model and variant."""

    sends_again = True

    def __init__(
        self, models: StoreModels, members: Members, model_id: ModelId, key: ArtifactKey
    ) -> None:
        self.model_id = model_id
        self._models = models
        self._members = members
        self._key = key
        variant_line = f"{VARIANT_HEADER}: {members.variant}\r\n"
        self._lines = f"{variant_line}{CACHE}: {CacheUse.HIT.value}\r\n".encode()

    def find_lease(self, model_id: ModelId) -> Lease | None:
        """Return a lease of a loaded model; None if it has to be fetched or loaded."""
        return self._models.lease(model_id, self._key)

    async def wait_for_lease(self, model_id: ModelId, request: CallFacts) -> Lease:
        """Return a lease of the model once it is loaded."""
        call_info = self.describe(request)
        caller = request.caller
        try:
            lease, call_info.cache = await self._models.wait_for_lease(model_id, self._key, caller)
        except ArtifactNotFound as error:
            if not caller:
                raise
            # the same answer as for a model that the caller may not invoke
            raise ArtifactNotFound(missing(self._key), model_id=model_id) from error
        except InvalidRequest as error:
            raise InvalidCall(str(error), model_id=model_id) from error
        return lease

    def describe(self, request: CallFacts) -> CallInfo:
        """Return what is known of the call for its answer."""
        call_info = request.call_info
        if call_info is None:
            call_info = request.call_info = CallInfo(
                new_request_id(),
                self._members.endpoint,
                self._members.variant,
                model_id=self.model_id,
                authorization=request.read_authorization,
            )
        return call_info

    def answer_lines(self, request: CallFacts) -> bytes:
        """Return the variant, the cache's part, and the request id as header lines."""
        call_info = request.call_info
        if call_info is None:
            return self._lines + new_request_id_line()
        pairs = call_info.headers().items()
        return "".join([f"{name}: {value}\r\n" for name, value in pairs]).encode()

    def refuse(self, error: AdapterError | None, request: CallFacts) -> Refusal:
        """Word the refusal as AWS does."""
        call_info = self.describe(request)
        if request.has_lease and call_info.cache is CacheUse.MISS and not request.was_waited_for:
            call_info.cache = CacheUse.HIT
        call_info.was_sent = call_info.was_sent or request.was_sent
        return refusal_of(error, call_info)

    async def free_memory(self, error: CapacityError) -> bool:
        """Free memory for a call that ran out of it; return whether any was freed."""
        return await self._models.make_room(error)


class EndpointCalls:
    """Reads which model a call of an endpoint names."""

    def __init__(self, endpoints: Endpoints, models: StoreModels) -> None:
        self._endpoints = endpoints
        self._models = models

    def read(self, endpoint: str, headers: CIMultiDict[str]) -> EndpointContract:
        """Return the contract of a call. Raises AdapterError for one that names no model."""
        members = read_members(endpoint, headers, is_stream=False)
        model_id, key = self._endpoints.find(members.endpoint, members.target)
        return EndpointContract(self._models, members, model_id, key)
