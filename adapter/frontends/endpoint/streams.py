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
        objects = text.count(b"{")
        if objects > _MAX_OBJECTS:
            raise PayloadTooLarge(
                f"the JSON has {objects} of the character {{; at most {_MAX_OBJECTS} are accepted "
                "by a stream: send fewer tensors"
            )
        raw = None if size is None else body[size:]
        cost = len(text) + objects * _OBJECT_BYTES
        message = await converted(cost, _make_message, text, raw, lease.record)
        if message is None:
            events = self._stream_generation(inference, body)
            await self._write_events(_EVENTS, events, inference)
            return
        lines = self._stream_inference(inference, message)
        await self._write_events(_LINES, lines, inference)

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
                    raise self._explain_error(line, lease.record)
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
        reports.
        """
        record = inference.lease.record
        headers = _list_forwarded_headers(inference.request)
        async with inference.forward("/generate_stream", headers, body) as answer:
            async for event in iterate_generated(answer, record, self._faults):
                yield event

    def _explain_error(self, reported: StreamError, record: ModelRecord) -> AdapterError:
        """Return the adapter's error for an error that Triton sent in a stream."""
        code = "INTERNAL" if reported.was_accepted else "NOT_FOUND"
        error = self._faults.explain_grpc_inference(
            code, reported.text, name=record.name, model_id=record.id
        )
        if not reported.was_accepted and type(error) is InferenceFailed:
            return InvalidRequest(str(error), model_id=record.id)
        return error

    # -- to the caller ----------------------------------------------------------------------

    async def _write_events(
        self, kind: str, answers: AsyncGenerator[bytes, None], inference: HandledInference
    ) -> None:
        """Write each answer as events of the stream. A failure behind the first answer becomes the
        last message of the stream. One before it is raised, and answered as InvokeEndpoint
        answers it.
        """
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
                await response.write(await self._word_failure(error, inference))
            except Exception as error:
                log.exception("request.failed", extra={"model_id": inference.lease.record.id})
                drop_tracebacks(error)
                body = json.dumps({"Message": "internal error; see the log"}).encode()
                await response.write(exception("InternalStreamFailure", body))
        response.end()

    async def _word_failure(self, error: AdapterError, inference: HandledInference) -> bytes:
        """Log the failure of a stream that has begun; return the message that ends the stream."""
        call_info = inference.request.call_info
        assert call_info is not None  # noqa: S101 - each call of an endpoint has it
        judged = await inference.fail_stream(error, {"aws_request_id": call_info.request_id})
        code = _INVOCATION_TIME if isinstance(error, BackendTimeout) else _BROKEN
        body = {"Message": message_of(judged, call_info), "ErrorCode": code}
        return exception("ModelStreamError", json.dumps(body).encode())


def _make_message(text: bytes, raw: bytes | None, record: ModelRecord) -> bytes | None:
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
    headers = forwarded(request.headers)
    if headers.pop("Content-Encoding", "identity").strip().lower() != "identity":
        raise InvalidRequest("a body for a stream must not be compressed")
    headers.pop("Accept-Encoding", None)
    return headers


async def _write_payload(response: Writer, payload: bytes) -> None:
    """Write bytes as PayloadPart events, of at most the largest size."""
    for at in range(0, len(payload), MAX_PAYLOAD_BYTES):
        await response.write(event("PayloadPart", payload[at : at + MAX_PAYLOAD_BYTES]))
