"""Answers InvokeEndpointWithResponseStream: answers of a model one by one, as AWS's event stream.

A V2 inference goes over Triton's gRPC stream, and each answer is a line of JSON; any other JSON
object goes to the model's generate_stream, whose server-sent events are passed on.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from adapter.codecs.base import converted
from adapter.control.door import ModelRecord
from adapter.core.calls import RpcCall, RpcDataPlane
from adapter.core.triton_errors import Faults
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    InferenceFailed,
    InvalidRequest,
    PayloadTooLarge,
    drop_tracebacks,
)
from adapter.frontends.bodies import json_object
from adapter.frontends.endpoint.errors import message_of
from adapter.frontends.endpoint.event_stream import (
    CONTENT_TYPE,
    MAX_PAYLOAD_BYTES,
    event,
    exception,
)
from adapter.frontends.endpoint.stream_messages import StreamError, as_line, as_request
from adapter.frontends.http import binary
from adapter.frontends.http.answers import Writer
from adapter.frontends.http.connection import Request
from adapter.frontends.http.handled_inference import HandledInference, iterate_generated
from adapter.frontends.http.instrumentation import forwarded

log = logging.getLogger(__name__)

_LINES = "application/jsonlines"
_EVENTS = "text/event-stream"
_INVOCATION_TIME = "ModelInvocationTimeExceeded"
_BROKEN = "StreamBroken"
# One call of C parses it, and holds the interpreter's lock for 5 ns a byte.
_MAX_JSON_BYTES = 16 * 2**20
# A tensor is an object. It takes 6 to 10 us to convert, as 1 KiB of numbers does, and far more
# memory than its text.
_MAX_OBJECTS = 1024
_OBJECT_BYTES = 2**10


class Streams:
    """Answers the calls of an endpoint that ask for a stream."""

    def __init__(
        self,
        rpc: RpcDataPlane,
        faults: Faults,
        *,
        timeout_seconds: float,  # limits the wait for each answer
    ) -> None:
        self._rpc = rpc
        self._faults = faults
        self._timeout = timeout_seconds

    async def invoke(self, inference: HandledInference) -> None:
        """Answer an inference by a stream of events."""
        lease = inference.lease
        request = inference.request
        body = request.body or b""
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
            return await self._tell(_EVENTS, self._stream_generation(inference, body), inference)
        return await self._tell(_LINES, self._stream_inference(inference, message), inference)

    # -- from Triton ------------------------------------------------------------------------

    async def _stream_inference(
        self, inference: HandledInference, message: bytes
    ) -> AsyncGenerator[bytes, None]:
        """Send a request by ModelStreamInfer; yield each answer as a line of JSON."""
        lease = inference.lease
        request = inference.request
        inference.held.enter_context(request.count_stream())
        metadata = [(n.lower(), v) for n, v in _list_forwarded_headers(request).items()]
        end = request.connection.abort  # a client that does not read gets no error
        call = RpcCall("ModelStreamInfer", metadata, None, end)
        async with self._rpc.stream(call, lease) as upstream:
            await upstream.write(message)
            await upstream.done_writing()
            async for answer in self._bound_waits(upstream.messages(), lease.record):
                line = await converted(len(answer), as_line, answer, lease.record)
                if isinstance(line, StreamError):
                    raise self._read_fault(line, lease.record)
                yield line

    async def _bound_waits(
        self, messages: AsyncIterator[bytes], record: ModelRecord
    ) -> AsyncGenerator[bytes, None]:
        """Yield messages; raise BackendTimeout if the wait for one is too long."""
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

    async def _stream_generation(
        self, inference: HandledInference, body: bytes
    ) -> AsyncGenerator[bytes, None]:
        """Send a request to generate_stream; yield its events. Raises the error that an event
        tells.
        """
        record = inference.lease.record
        headers = _list_forwarded_headers(inference.request)
        async with inference.forward("/generate_stream", headers, body) as answer:
            async for event in iterate_generated(answer, record, self._faults):
                yield event

    def _read_fault(self, said: StreamError, record: ModelRecord) -> AdapterError:
        """Return the adapter's error for an error that Triton sent in a stream."""
        code = "INTERNAL" if said.was_accepted else "NOT_FOUND"
        error = self._faults.explain_grpc_inference(
            code, said.text, name=record.name, model_id=record.id
        )
        if not said.was_accepted and type(error) is InferenceFailed:
            return InvalidRequest(str(error), model_id=record.id)
        return error

    # -- to the caller ----------------------------------------------------------------------

    async def _tell(
        self, kind: str, answers: AsyncGenerator[bytes, None], inference: HandledInference
    ) -> None:
        """A failure before the first answer is an answer of its own, as it is to InvokeEndpoint."""
        async with aclosing(answers):
            first = await anext(answers, None)
            response = inference.begin_answer(
                {"Content-Type": CONTENT_TYPE, "X-Amzn-SageMaker-Content-Type": kind}
            )
            try:
                if first is not None:
                    await _write_payload(response, first)
                async for answer in answers:
                    await _write_payload(response, answer)
            except AdapterError as error:
                await response.write(await self._failed(error, inference))
            except Exception as error:
                log.exception("request.failed", extra={"model_id": inference.lease.record.id})
                drop_tracebacks(error)
                said = json.dumps({"Message": "internal error; see the log"}).encode()
                await response.write(exception("InternalStreamFailure", said))
        response.end()

    async def _failed(self, error: AdapterError, inference: HandledInference) -> bytes:
        """Return the message that ends a stream which has begun, once its failure is logged."""
        told = inference.request.call_info
        assert told is not None  # noqa: S101 - each call of an endpoint has it
        judged = await inference.fail_stream(error, {"aws_request_id": told.request_id})
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


def _list_forwarded_headers(request: Request) -> dict[str, str]:
    """Return the headers for Triton of a request that streams. Raises InvalidRequest for a
    compressed body.
    """
    found = forwarded(request.headers)
    if found.pop("Content-Encoding", "identity").strip().lower() != "identity":
        raise InvalidRequest("a body for a stream must not be compressed")
    found.pop("Accept-Encoding", None)
    return found


async def _write_payload(response: Writer, payload: bytes) -> None:
    """Write bytes as PayloadPart events, of at most the largest size."""
    for at in range(0, len(payload), MAX_PAYLOAD_BYTES):
        await response.write(event("PayloadPart", payload[at : at + MAX_PAYLOAD_BYTES]))
