"""The contract of InvokeEndpoint, and which of its calls are plain."""

import json
import re

from aiohttp import web
from multidict import CIMultiDict

from adapter.control.door import Lease, StoreModels
from adapter.core.artifacts import ArtifactKey, CacheUse
from adapter.core.calls import RawHeaders
from adapter.core.model import ModelId, triton_name
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    CapacityError,
    InvalidCall,
    InvalidRequest,
)
from adapter.frontends.http import binary
from adapter.frontends.http.contracts import Attempt
from adapter.frontends.http.endpoint.errors import (
    CACHE,
    VARIANT_HEADER,
    CallInfo,
    call_info_of,
    new_request_id,
    new_request_id_line,
    refusal_of,
)
from adapter.frontends.http.endpoint.members import Endpoints, Members, missing, read_members
from adapter.frontends.http.instrumentation import Refusal
from adapter.frontends.routes import INVOKE_ENDPOINT

_HEADER_LENGTH = b"inference-header-content-length"
_TARGET = re.compile(INVOKE_ENDPOINT.path.format(endpoint_name="([A-Za-z0-9-]+)").encode())


class EndpointCall:
    """The contract of one call. `name`: the model's name in Triton, unless it was stuck under that
    name. `lines`: header lines of its answer.
    """

    sends_again = True

    def __init__(
        self, models: StoreModels, members: Members, model_id: ModelId, key: ArtifactKey
    ) -> None:
        self.model_id = model_id
        self.name = triton_name(model_id)
        self.renames = str(self.name) != str(model_id)
        variant, use = members.variant, CacheUse.HIT.value
        self.lines = f"{VARIANT_HEADER}: {variant}\r\n{CACHE}: {use}\r\n".encode()
        self._models = models
        self._members = members
        self._key = key
        self._given = f'"model_name":"{self.name}"'.encode()
        self._told = f'"model_name":{json.dumps(model_id)}'.encode()

    def lease(self, model_id: ModelId, is_typed: bool) -> Lease | None:
        lease = self._models.lease(model_id, self._key)
        if lease is None:
            return None
        is_other = lease.record.name != self.name
        return None if is_other or (is_typed and lease.record.content_types) else lease

    async def wait(self, model_id: ModelId, request: web.BaseRequest) -> Lease:
        caller: str = request["caller"]
        try:
            lease, call_info_of(request).cache = await self._models.wait_for_lease(
                model_id, self._key, caller
            )
        except ArtifactNotFound as error:
            if not caller:
                raise
            # the same answer as for a model that the caller may not invoke
            raise ArtifactNotFound(missing(self._key), model_id=model_id) from error
        except InvalidRequest as error:
            raise InvalidCall(str(error), model_id=model_id) from error
        return lease

    def renamed(self, headers: RawHeaders, body: bytes) -> tuple[RawHeaders, bytes]:
        """Return headers and body under the name that was asked for."""
        sizes = [int(value) for name, value in headers if name.lower() == _HEADER_LENGTH]
        if not sizes:
            return headers, body.replace(self._given, self._told, 1)
        body, size = binary.put_name_back(body, sizes[0], self.name, self.model_id)
        kept = [pair for pair in headers if pair[0].lower() != _HEADER_LENGTH]
        return [*kept, (b"Inference-Header-Content-Length", b"%d" % (size or 0))], body

    def answer_line(self) -> bytes:
        return new_request_id_line()

    def refusal(self, error: AdapterError | None, model_id: ModelId, attempt: Attempt) -> Refusal:
        call_info = CallInfo(
            new_request_id(),
            self._members.endpoint,
            self._members.variant,
            cache=CacheUse.HIT if attempt.was_found else CacheUse.MISS,
            was_sent=attempt.was_sent,
            model_id=model_id,
            authorization=attempt.authorization,
        )
        found = refusal_of(error, call_info)
        found.headers = {**found.headers, **call_info.headers()}
        return found

    async def frees_memory(self, error: CapacityError) -> bool:
        return await self._models.make_room(error)


class EndpointCalls:
    def __init__(self, endpoints: Endpoints, models: StoreModels) -> None:
        self._endpoints = endpoints
        self._models = models

    def read(self, target: bytes, fields: dict[bytes, bytes]) -> EndpointCall | None:
        """`fields`: the headers by their names in lower case. None where aiohttp is to answer."""
        found = _TARGET.fullmatch(target)
        if found is None:
            return None
        headers = CIMultiDict((n.decode(), v.decode("latin-1")) for n, v in fields.items())
        try:
            members = read_members(found[1].decode(), headers, is_stream=False)
            model_id, key = self._endpoints.find(members.endpoint, members.target)
        except AdapterError:
            return None
        return EndpointCall(self._models, members, model_id, key)
