"""InvokeEndpoint: a multi-model endpoint as AWS's clients know it; docs/endpoint.md.

The call itself goes the way of /models/NAME/invoke, with a lease that waits for its model.
"""

from contextlib import ExitStack

from adapter.control.door import StoreModels
from adapter.core.artifacts import ArtifactKey
from adapter.core.model import ModelId
from adapter.errors import (
    ArtifactNotFound,
    CapacityError,
    InvalidCall,
    PayloadTooLarge,
    UnknownOperation,
)
from adapter.frontends.endpoint.contract import EndpointContract
from adapter.frontends.endpoint.errors import CallInfo
from adapter.frontends.endpoint.members import (
    TARGET_MODEL,
    Endpoints,
    Members,
    missing,
    read_members,
)
from adapter.frontends.endpoint.signatures import Caller, SigV4Authenticator
from adapter.frontends.endpoint.sigv4 import Claim
from adapter.frontends.endpoint.streams import Streams
from adapter.frontends.http.answers import Answer
from adapter.frontends.http.connection import Request
from adapter.frontends.http.handled_inference import HandledInference, Inferences
from adapter.frontends.http.inference import SENT_AGAIN_BYTES
from adapter.frontends.http.instrumentation import AWS_OPERATION
from adapter.frontends.routes import ASYNC_ENDPOINT, INVOKE_ENDPOINT, STREAM_ENDPOINT
from adapter.runtime.byte_budget import ByteBudget
from adapter.telemetry.traffic import leave_out, waiting_for_caller

_STREAM = STREAM_ENDPOINT.operation
_OPERATIONS = (
    f"InvokeEndpoint (POST /endpoints/NAME/{INVOKE_ENDPOINT.operation}) and "
    f"InvokeEndpointWithResponseStream (POST /endpoints/NAME/{_STREAM}), and with no other "
    "operation of AWS"
)

# Bodies for streams are read by us.
_STREAM_BYTES = 64 * 2**20


async def refuse_endpoint(request: Request) -> Answer | None:
    """Refuse what is meant for an endpoint, where there is none."""
    raise _make_unknown_operation(
        request, "no endpoint: set `model_store` or `endpoints`; see docs/stores.md"
    )


def _make_unknown_operation(request: Request, served: str) -> UnknownOperation:
    """Return the error of a request for which no endpoint has an operation."""
    asked = f"{request.method} {request.raw_path[:200]!r}"
    if operation := request.headers.get(AWS_OPERATION):
        asked = f"{operation[:200]!r}"
    return UnknownOperation(f"there is nothing for {asked}: this is a triton-adapter with {served}")


class Endpoint:
    """Answers the calls of an endpoint that the head alone does not decide."""

    def __init__(
        self,
        inferences: Inferences,
        streams: Streams,
        models: StoreModels,
        endpoints: Endpoints,
        budget: ByteBudget,  # of callers' bytes
        *,
        callers: SigV4Authenticator | None = None,  # None where nobody is asked who they are
    ) -> None:
        self._models = models
        self._endpoints = endpoints
        self._max_body = inferences.max_body_bytes
        self._budget = budget
        self._callers = callers
        self._inferences = inferences
        self._streams = streams

    async def handle(self, request: Request) -> Answer | None:
        """Answer a call of the endpoint, or refuse what is none."""
        if request.head.path_error:
            raise InvalidCall(request.head.path_error)
        match = request.head.match
        if match is None or request.method != "POST" or "endpoint_name" not in match.names:
            raise _make_unknown_operation(request, _OPERATIONS)
        name = match.names["endpoint_name"]
        route = match.methods["POST"]
        _get_call_info(request).endpoint = name
        if route is ASYNC_ENDPOINT:
            raise InvalidCall(f"Endpoint {name} does not support asynchronous inference.")
        request.path_template = route.path
        request.operation = route.operation
        return await self._serve(name, route.operation, request)

    async def _serve(self, name: str, operation: str, request: Request) -> Answer | None:
        """Answer an invocation: check its signature and members, find its model, and send the
        request.
        """
        call_info = _get_call_info(request)
        # before anything is looked at, and before a byte of the body is read
        claim = None if self._callers is None else self._callers.judge(request)
        with ExitStack() as held:
            body, caller = await self._read(request, claim, held)
            members = read_members(name, request.headers, is_stream=operation == _STREAM)
            call_info.variant = members.variant
            model_id, key = self._find_model(members, call_info)
            request.model_id = model_id
            call_info.model_id = model_id
            if caller is not None and not caller.is_allowed(key.path):
                raise ArtifactNotFound(missing(key), model_id=model_id)
            request.caller = "" if caller is None else caller.name
            request.body = body
            call = EndpointContract(self._models, members, model_id, key)
            return await self._invoke(call, request)

    def _find_model(self, members: Members, call_info: CallInfo) -> tuple[ModelId, ArtifactKey]:
        """Return the model that a call names, and its place in the store. Raises InvalidCall for a
        call that names none.
        """
        model = self._endpoints.find(members.endpoint, members.target or "-")
        if not members.target:
            raise InvalidCall(
                f"Request {call_info.request_id} is missing a target model header: endpoint "
                f"{members.endpoint} is a multi-model endpoint ({TARGET_MODEL})."
            )
        return model

    async def _read(
        self, request: Request, claim: Claim | None, held: ExitStack
    ) -> tuple[bytes | None, Caller | None]:
        """Read the body if it has to be whole; return it, and who signed it. Return None for a body
        that is passed on as it comes, and for a caller whose signature is not asked for.
        """
        limit = self._find_body_limit(request, must_be_whole=claim is not None)
        if limit is None:
            return None, None
        senders = [] if claim is None else [f"key {claim.access_key}"]
        if claim is not None and request.remote:  # over TCP
            senders.append(f"peer {request.remote}")
        held.enter_context(request.hold_body(senders))
        with waiting_for_caller():
            body = await request.read_body(limit)
        if claim is None or self._callers is None:
            return body, None
        caller = await self._callers.find(claim, request, body)
        request.connection.verify_sender()
        return body, caller

    def _find_body_limit(self, request: Request, *, must_be_whole: bool) -> int | None:
        """Return how large the body may be; None if it is passed on as it comes. Raises InvalidCall
        for a body without a length that has to be read whole, and PayloadTooLarge.
        """
        length = request.content_length
        is_stream = request.operation == _STREAM
        is_read_whole = must_be_whole or is_stream
        if length is None and is_read_whole:
            raise InvalidCall("a body that is signed, or for a stream, needs a Content-Length")
        if length is None or (length > SENT_AGAIN_BYTES and not is_read_whole):
            return None
        limit = min(self._max_body, _STREAM_BYTES) if is_stream else self._max_body
        reason = ""
        if must_be_whole and self._budget.share < limit:
            limit = self._budget.share
            reason = ", an eighth of max_inflight_body_bytes,"
        if length > limit:
            text = f"the body has {length} bytes; at most {limit}{reason} are accepted"
            raise PayloadTooLarge(text)
        return limit

    async def _invoke(self, call: EndpointContract, request: Request) -> Answer | None:
        """Send the inference; if it runs out of memory and some is freed, send it once more."""
        is_stream = request.operation == _STREAM
        send = self._streams.invoke if is_stream else HandledInference.invoke
        try:
            return await self._inferences.attempt(call, call.model_id, request, send)
        except CapacityError as error:
            if request.body is None or not await call.free_memory(error):
                raise
        leave_out()
        _get_call_info(request).was_sent = True
        return await self._inferences.attempt(call, call.model_id, request, send)


def _get_call_info(request: Request) -> CallInfo:
    """Return the CallInfo, which each request to an endpoint has."""
    assert request.call_info is not None  # noqa: S101 - each call of an endpoint has it
    return request.call_info
