"""InvokeEndpoint: a multi-model endpoint as AWS's clients know it; docs/endpoint.md.

The call itself goes the way of /models/NAME/invoke, with a lease that waits for its model.
"""

from collections.abc import Mapping
from contextlib import ExitStack

from aiohttp import web

from adapter.control.door import StoreModels
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId
from adapter.errors import (
    AdapterError,
    ArtifactNotFound,
    CapacityError,
    InvalidCall,
    InvalidRequest,
    PayloadTooLarge,
    UnknownOperation,
)
from adapter.frontends.http.endpoint.authenticator import Caller, SigV4Authenticator
from adapter.frontends.http.endpoint.call import EndpointCall
from adapter.frontends.http.endpoint.errors import (
    CallInfo,
    call_info_of,
    new_request_id,
    refusal_of,
)
from adapter.frontends.http.endpoint.members import (
    TARGET_MODEL,
    Endpoints,
    Members,
    missing,
    read_members,
)
from adapter.frontends.http.endpoint.streams import Streams
from adapter.frontends.http.inference import AwaitedInference, SlowPath
from adapter.frontends.http.instrumentation import AWS_OPERATION, Refusal, path_segments
from adapter.frontends.http.middleware import held_body, whole_body
from adapter.frontends.routes import ASYNC_ENDPOINT, INVOKE_ENDPOINT, STREAM_ENDPOINT, find
from adapter.protocols.sigv4 import Claim
from adapter.telemetry.traffic import leave_out, waiting_for_caller

_STREAM = STREAM_ENDPOINT.operation
_OPERATIONS = (
    f"InvokeEndpoint (POST /endpoints/NAME/{INVOKE_ENDPOINT.operation}) and "
    f"InvokeEndpointWithResponseStream (POST /endpoints/NAME/{_STREAM}), and with no other "
    "operation of AWS"
)

# AWS's own limit of a body. Up to this it is read whole, so that it can be sent to Triton twice.
_WHOLE_BYTES = 6_291_456
# Bodies for streams are read by us.
_STREAM_BYTES = 64 * 2**20


class EndpointErrorFormat:
    """AWS's errors and headers (frontends/http/middleware.py)."""

    def begin(self, request: web.BaseRequest) -> None:
        request["told"] = CallInfo(
            new_request_id(), authorization=lambda: request.headers.get("Authorization", "")
        )
        request["frontend"] = "endpoint"

    def refusal(self, request: web.BaseRequest, error: AdapterError | None) -> Refusal:
        return refusal_of(error, call_info_of(request))

    def headers(self, request: web.BaseRequest) -> Mapping[str, str]:
        return call_info_of(request).headers()


async def no_endpoint(request: web.BaseRequest) -> web.StreamResponse:
    """Refuse what is meant for an endpoint, where there is none."""
    raise _unknown(request, "no endpoint: set `model_store` or `endpoints`; see docs/stores.md")


def _unknown(request: web.BaseRequest, served: str) -> UnknownOperation:
    asked = f"{request.method} {request.raw_path[:200]!r}"
    if operation := request.headers.get(AWS_OPERATION):
        asked = f"{operation[:200]!r}"
    return UnknownOperation(f"there is nothing for {asked}: this is a triton-adapter with {served}")


def _segments(request: web.BaseRequest) -> list[str]:
    try:
        return path_segments(request.raw_path)
    except InvalidRequest as error:
        raise InvalidCall(str(error)) from error


class Endpoint:
    """`callers`: None where nobody is asked who they are."""

    def __init__(
        self,
        slow_path: SlowPath,
        streams: Streams,
        models: StoreModels,
        endpoints: Endpoints,
        *,
        callers: SigV4Authenticator | None = None,
    ) -> None:
        self._models = models
        self._endpoints = endpoints
        self._max_body, self._budget = slow_path.max_body, slow_path.budget
        self._callers = callers
        self._slow_path = slow_path
        self._streams = streams

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        match = find(_segments(request))
        if match is None or request.method != "POST" or "endpoint_name" not in match.names:
            raise _unknown(request, _OPERATIONS)
        name, route = match.names["endpoint_name"], match.methods["POST"]
        call_info_of(request).endpoint = name
        if route is ASYNC_ENDPOINT:
            raise InvalidCall(f"Endpoint {name} does not support asynchronous inference.")
        request["route"], request["operation"] = route.path, route.operation
        return await self._serve(name, route.operation, request)

    async def _serve(
        self, name: str, operation: str, request: web.BaseRequest
    ) -> web.StreamResponse:
        call_info = call_info_of(request)
        # before anything is looked at, and before a byte of the body is read
        claim = None if self._callers is None else self._callers.judge(request)
        with ExitStack() as held:
            body, caller = await self._read(request, claim, held)
            members = read_members(name, request.headers, is_stream=operation == _STREAM)
            call_info.variant = members.variant
            model_id, key = self._find(members, call_info)
            request["model_id"] = call_info.model_id = model_id
            if caller is not None and not caller.may_ask_for(key.path):
                raise ArtifactNotFound(missing(key), model_id=model_id)
            request["caller"] = "" if caller is None else caller.name
            call = EndpointCall(self._models, members, model_id, key)
            return await self._invoked(call, request, body)

    def _find(self, members: Members, call_info: CallInfo) -> tuple[ModelId, ArtifactKey]:
        found = self._endpoints.find(members.endpoint, members.target or "-")
        if not members.target:
            raise InvalidCall(
                f"Request {call_info.request_id} is missing a target model header: endpoint "
                f"{members.endpoint} is a multi-model endpoint ({TARGET_MODEL})."
            )
        return found

    async def _read(
        self, request: web.BaseRequest, claim: Claim | None, held: ExitStack
    ) -> tuple[bytes | None, Caller | None]:
        """Return the body, and who signed it; None for a body that is to be passed on as it comes
        and can be sent once, and for a caller whom nobody asks who it is.
        """
        most = self._most(request, must_be_whole=claim is not None)
        if most is None:
            return None, None
        senders = [] if claim is None else [f"key {claim.access_key}"]
        if claim is not None and request.remote:  # over TCP
            senders.append(f"peer {request.remote}")
        counted = held.enter_context(held_body(request, self._budget, senders))
        with waiting_for_caller():
            body = await whole_body(request, most, counted)
        if claim is None or self._callers is None:
            return body, None
        caller = await self._callers.find(claim, request, body)
        counted.verify()
        return body, caller

    def _most(self, request: web.BaseRequest, *, must_be_whole: bool) -> int | None:
        """Return how large the body may be; None if it is not read here."""
        length, is_stream = request.content_length, request["operation"] == _STREAM
        if length is None and (must_be_whole or is_stream):
            raise InvalidCall("a body that is signed, or for a stream, needs a Content-Length")
        if length is None or (length > _WHOLE_BYTES and not (must_be_whole or is_stream)):
            return None
        most, why = min(self._max_body, _STREAM_BYTES) if is_stream else self._max_body, ""
        if must_be_whole and self._budget.share < most:
            most, why = self._budget.share, ", an eighth of max_inflight_body_bytes,"
        if length > most:
            raise PayloadTooLarge(f"the body has {length} bytes; at most {most}{why} are accepted")
        return most

    async def _invoked(
        self, call: EndpointCall, request: web.BaseRequest, body: bytes | None
    ) -> web.StreamResponse:
        is_stream = request["operation"] == _STREAM
        send = self._streams.invoke if is_stream else AwaitedInference.invoke
        try:
            return await self._slow_path.attempt(call, call.model_id, request, send, body)
        except CapacityError as error:
            if body is None or not await call.frees_memory(error):
                raise
        leave_out()
        call_info_of(request).was_sent = True
        return await self._slow_path.attempt(call, call.model_id, request, send, body)
