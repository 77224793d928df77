"""InvokeEndpointWithResponseStream: answers of a model one by one, as AWS's event stream.

A V2 inference goes over Triton's gRPC stream, and each answer is a line of JSON; any other JSON
object goes to the model's generate_stream, whose server-sent events are passed on.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from aiohttp import HttpVersion11, web

from adapter.control.lease import Lease
from adapter.control.models import ModelControl
from adapter.core.calls import RpcCall, RpcDataPlane, V2Call, V2DataPlane
from adapter.core.faults import Faults
from adapter.core.registry import ModelRecord
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    InferenceFailed,
    InvalidRequest,
    PayloadTooLarge,
    let_go,
)
from adapter.frontends.callers_json import json_object
from adapter.frontends.http import binary
from adapter.frontends.http.application import application_of
from adapter.frontends.http.conversion import converted
from adapter.frontends.http.endpoint.errors import message_of, told_of
from adapter.frontends.http.endpoint.tensors import StreamError, as_line, as_request
from adapter.frontends.http.middleware import asked_by, dialect_of
from adapter.frontends.http.observer import FORWARDED, Observer
from adapter.protocols.eventstream import CONTENT_TYPE, MAX_PAYLOAD_BYTES, event, exception

log = logging.getLogger(__name__)

_LINES, _EVENTS = "application/jsonlines", "text/event-stream"
_EVENT_END, _ERROR = b"\n\n", b'data: {"error":'
_INVOCATION_TIME = "ModelInvocationTimeExceeded"
_BROKEN = "StreamBroken"
# One call of C parses it, and holds the interpreter's lock for 5 ns a byte.
_MAX_JSON_BYTES = 16 * 2**20
# A tensor is an object. It takes 6 to 10 us to convert, as 1 KiB of numbers does, and far more
# memory than its text.
_MAX_OBJECTS, _OBJECT_BYTES = 1024, 2**10


class Streams:
    """`timeout_seconds`: how long each answer may take."""

    def __init__(
        self,
        control: ModelControl,
        http: V2DataPlane,
        rpc: RpcDataPlane,
        faults: Faults,
        observer: Observer,
        *,
        timeout_seconds: float,
    ) -> None:
        self._control = control
        self._http = http
        self._rpc = rpc
        self._faults = faults
        self._observer = observer
        self._timeout = timeout_seconds

    async def invoke(
        self, lease: Lease, request: web.BaseRequest, body: bytes
    ) -> web.StreamResponse:
        kind = request.headers.get("Content-Type", "")
        size = binary.json_header_bytes(kind, len(body))
        text = body[:size]
        if len(text) > _MAX_JSON_BYTES:
            raise PayloadTooLarge(
                f"the JSON has {len(text)} bytes; at most {_MAX_JSON_BYTES} are accepted by a "
                "stream: send raw tensors"
            )
        if (objects := text.count(b"{")) > _MAX_OBJECTS:
            raise PayloadTooLarge(
                f"the JSON has {objects} of the character {{; at most {_MAX_OBJECTS} are accepted "
                "by a stream: send fewer tensors"
            )
        raw = None if size is None else body[size:]
        cost = len(text) + objects * _OBJECT_BYTES
        message = await converted(cost, _message, text, raw, lease.record)
        if message is None:
            return await self._tell(_EVENTS, self._generated(lease, request, body), lease, request)
        return await self._tell(_LINES, self._inferred(lease, request, message), lease, request)

    # -- from Triton ------------------------------------------------------------------------

    async def _inferred(
        self, lease: Lease, request: web.BaseRequest, message: bytes
    ) -> AsyncGenerator[bytes, None]:
        metadata = [(n.lower(), v) for n, v in _forwarded(request).items()]
        call = RpcCall("ModelStreamInfer", metadata, None, _end_of(request))
        async with self._rpc.stream(call, lease) as upstream:
            await upstream.write(message)
            await upstream.done_writing()
            async for answer in self._in_time(upstream.messages(), lease.record):
                line = await converted(len(answer), as_line, answer, lease.record)
                if isinstance(line, StreamError):
                    raise self._fault(line, lease.record)
                yield line

    async def _in_time(
        self, messages: AsyncIterator[bytes], record: ModelRecord
    ) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                async with asyncio.timeout(self._timeout):
                    message = await anext(messages, None)
                if message is None:
                    return
                yield message
        except TimeoutError as error:
            raise BackendTimeout(
                f"no answer from Triton within {self._timeout:g} s", model_id=record.id
            ) from error

    async def _generated(
        self, lease: Lease, request: web.BaseRequest, body: bytes
    ) -> AsyncGenerator[bytes, None]:
        record, rest = lease.record, b""
        path = f"/models/{record.name}/generate_stream"
        call = V2Call(
            *("POST", path, _forwarded(request), body), is_stream=True, on_cut=_end_of(request)
        )
        async with self._http.forward(call, lease) as found:
            try:
                async for chunk in found.chunks():
                    *events, rest = (rest + chunk).split(_EVENT_END)
                    for each in events:
                        yield self._generated_event(each, record)
            except ConnectionResetError as error:  # Triton's, and why is its cause
                if isinstance(error.__cause__, AdapterError):
                    raise error.__cause__ from error
                raise
        if rest:
            yield rest

    def _generated_event(self, text: bytes, record: ModelRecord) -> bytes:
        if text.startswith(_ERROR):
            said = json.loads(text.removeprefix(b"data: "))["error"]
            raise self._fault(StreamError(str(said), was_accepted=True), record)
        if record.is_renamed:
            text = binary.put_name_back(text, None, record.name, record.id)[0]
        return text + _EVENT_END

    def _fault(self, said: StreamError, record: ModelRecord) -> AdapterError:
        code = "INTERNAL" if said.was_accepted else "NOT_FOUND"
        error = self._faults.of_grpc_inference(
            code, said.text, name=record.name, model_id=record.id
        )
        if not said.was_accepted and type(error) is InferenceFailed:
            return InvalidRequest(str(error), model_id=record.id)
        return error

    # -- to the caller ----------------------------------------------------------------------

    async def _tell(
        self,
        kind: str,
        answers: AsyncGenerator[bytes, None],
        lease: Lease,
        request: web.BaseRequest,
    ) -> web.StreamResponse:
        """A failure before the first answer is an answer of its own, as it is to InvokeEndpoint."""
        async with aclosing(answers):
            first = await anext(answers, None)
            response = await _begun(request, kind)
            try:
                if first is not None:
                    await _write(response, first)
                async for answer in answers:
                    await _write(response, answer)
            except AdapterError as error:
                await response.write(await self._failed(error, lease, request))
            except (ConnectionResetError, asyncio.CancelledError):
                raise  # the caller has gone
            except Exception as error:
                log.exception("request.failed", extra={"model_id": lease.record.id})
                let_go(error)
                said = json.dumps({"Message": "internal error; see the log"}).encode()
                await response.write(exception("InternalStreamFailure", said))
        return response

    async def _failed(self, error: AdapterError, lease: Lease, request: web.BaseRequest) -> bytes:
        """Return the message that ends a stream which has begun."""
        ended = lease.end(error)
        model_id = lease.record.id
        judged = await self._control.judged(
            ended if isinstance(ended, AdapterError) else error, model_id
        )
        told = told_of(request)
        more = {"status": web.HTTPOk.status_code, "aws_request_id": told.request_id}
        operation = request["operation"]
        self._observer.refused(judged, asked_by(request), operation, model_id, more=more)
        code = _INVOCATION_TIME if isinstance(error, BackendTimeout) else _BROKEN
        body = {"Message": message_of(judged, told), "ErrorCode": code}
        return exception("ModelStreamError", json.dumps(body).encode())


def _message(text: bytes, raw: bytes | None, record: ModelRecord) -> bytes | None:
    """Return the message for Triton's stream; None for what goes to generate_stream. The objects of
    the JSON, which take far more memory than the text, are gone when this returns: of many bodies
    at once there are as many as threads.
    """
    call = json_object(text, "the body")
    if raw is None and not isinstance(call.get("inputs"), list):
        return None
    return as_request(call, raw or b"", record)


def _end_of(request: web.BaseRequest) -> Callable[[], None]:
    """Return what ends a stream whose caller does not read: no more can be said to that one."""
    return application_of(request).front.abort


def _forwarded(request: web.BaseRequest) -> dict[str, str]:
    given = request.headers
    found = {name: value for name in FORWARDED if (value := given.get(name)) is not None}
    if found.pop("Content-Encoding", "identity").strip().lower() != "identity":
        raise InvalidRequest("a body for a stream must not be compressed")
    found.pop("Accept-Encoding", None)
    return found


async def _begun(request: web.BaseRequest, kind: str) -> web.StreamResponse:
    headers = {"Content-Type": CONTENT_TYPE, "X-Amzn-SageMaker-Content-Type": kind}
    response = web.StreamResponse(headers=headers)
    response.headers.update(dialect_of(request).headers(request))
    if request.version != HttpVersion11 or not application_of(request).may_be_kept(request):
        response.force_close()
    await response.prepare(request)
    return response


async def _write(response: web.StreamResponse, payload: bytes) -> None:
    for at in range(0, len(payload), MAX_PAYLOAD_BYTES):
        await response.write(event("PayloadPart", payload[at : at + MAX_PAYLOAD_BYTES]))
