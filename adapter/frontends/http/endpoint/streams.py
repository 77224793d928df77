"""InvokeEndpointWithResponseStream: answers of a model one by one, as AWS's event stream.

A V2 inference goes over Triton's gRPC stream, and each answer is a line of JSON; any other JSON
object goes to the model's generate_stream, whose server-sent events are passed on.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from adapter.control.door import ModelRecord
from adapter.core.calls import RpcCall, RpcDataPlane
from adapter.core.faults import Faults
from adapter.errors import (
    AdapterError,
    BackendTimeout,
    InferenceFailed,
    InvalidRequest,
    PayloadTooLarge,
    drop_tracebacks,
)
from adapter.frontends.bodies import json_object
from adapter.frontends.grpc.parameters import check_parameters
from adapter.frontends.http import binary
from adapter.frontends.http.application import application_of
from adapter.frontends.http.endpoint.errors import call_info_of, message_of
from adapter.frontends.http.inference import AwaitedInference, events_of
from adapter.frontends.http.instrumentation import FORWARDED, Instrumentation
from adapter.frontends.http.middleware import asked_by
from adapter.protocols.codecs.base import converted
from adapter.protocols.eventstream import CONTENT_TYPE, MAX_PAYLOAD_BYTES, event, exception
from adapter.protocols.tensors import PIECE_BYTES, flat, packed, unpacked

log = logging.getLogger(__name__)

_LINES, _EVENTS = "application/jsonlines", "text/event-stream"
_ERROR = b'data: {"error":'
_INVOCATION_TIME = "ModelInvocationTimeExceeded"
_BROKEN = "StreamBroken"
# One call of C parses it, and holds the interpreter's lock for 5 ns a byte.
_MAX_JSON_BYTES = 16 * 2**20
# A tensor is an object. It takes 6 to 10 us to convert, as 1 KiB of numbers does, and far more
# memory than its text.
_MAX_OBJECTS, _OBJECT_BYTES = 1024, 2**10
# That there are more answers, or not: of the gRPC stream, whose end the caller sees anyway.
_FINAL = "triton_final_response"
_BINARY = frozenset({"binary_data", "binary_data_size"})


def as_request(call: Mapping[str, Any], raw: bytes, record: ModelRecord) -> bytes:
    """Return the ModelInferRequest of a V2 inference; `raw` is what follows its JSON."""
    try:
        message = bytes(_request(call, raw, record.name).SerializeToString())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"member {error} is missing" if isinstance(error, KeyError) else str(error)
        raise InvalidRequest(
            f"the body is not a V2 inference: {why}", model_id=record.id
        ) from error
    check_parameters(message, record, shares_memory=False)
    return message


def _request(call: Mapping[str, Any], raw: bytes, name: str) -> Any:
    if not isinstance(call.get("id", ""), str):
        raise ValueError("id is not a string")  # noqa: TRY004 - caught with all that is wrong
    request = pb.ModelInferRequest(model_name=name, id=call.get("id", ""))
    _put(request.parameters, call.get("parameters", {}))
    at = 0
    for given in call["inputs"]:
        size = given.get("parameters", {}).get("binary_data_size")
        into = request.inputs.add(
            name=given["name"], datatype=given["datatype"], shape=given["shape"]
        )
        _put(into.parameters, given.get("parameters", {}))
        if size is None:
            request.raw_input_contents.append(packed(given["datatype"], flat(given["data"])))
        elif 0 <= size <= len(raw) - at:
            request.raw_input_contents.append(raw[at : at + size])
            at += size
        else:
            raise ValueError(f"{size} bytes of {given['name']!r} are not all there")
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes follow the last tensor")
    for given in call.get("outputs", []):
        _put(request.outputs.add(name=given["name"]).parameters, given.get("parameters", {}))
    return request


def _put(into: Any, given: Mapping[str, Any]) -> None:
    """Parameters, but those that say how tensors lie in a body."""
    for name, value in given.items():
        if name.startswith("shared_memory"):
            raise ValueError("shared memory is not taken by a stream")
        if name in _BINARY or name == "binary_data_output":
            continue
        match value:
            case bool():
                into[name].bool_param = value
            case int():
                into[name].int64_param = value
            case float():
                into[name].double_param = value
            case str():
                into[name].string_param = value
            case _:
                raise ValueError(f"parameter {name!r} is not a string, number or boolean")


@dataclass(frozen=True, slots=True)
class StreamError:
    """`was_accepted`: the model has seen the request; else Triton names none with its error."""

    text: str
    was_accepted: bool


def as_line(message: bytes, record: ModelRecord) -> bytes | StreamError:
    """Return a ModelStreamInferResponse as a line of JSON."""
    found = pb.ModelStreamInferResponse()
    try:
        found.ParseFromString(message)
    except DecodeError as error:
        return StreamError(f"Triton's answer cannot be read: {error}", was_accepted=True)
    answer = found.infer_response
    if found.error_message:
        return StreamError(found.error_message, was_accepted=bool(answer.model_name))
    told: dict[str, Any] = {"model_name": record.id, "model_version": answer.model_version}
    if answer.id:
        told["id"] = answer.id
    parameters = {n: _value(one) for n, one in answer.parameters.items() if n != _FINAL}
    if parameters:
        told["parameters"] = parameters
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    outputs = b", ".join(_output(output, raw) for output, raw in pairs)
    return json.dumps(told)[:-1].encode() + b', "outputs": [' + outputs + b"]}\n"


def _output(output: Any, raw: bytes) -> bytes:
    """Return an output as JSON, its values piece by piece: `json.dumps` holds Python's lock."""
    told = {"name": output.name, "datatype": output.datatype, "shape": [*output.shape]}
    data = b", ".join(map(_json, unpacked(output.datatype, raw)))
    return json.dumps(told)[:-1].encode() + b', "data": [' + data + b"]}"


def _json(values: list[Any]) -> bytes:
    """Return a few thousand values as JSON, long strings among them piece by piece."""
    if not isinstance(values[0], str) or sum(map(len, values)) <= PIECE_BYTES:
        return json.dumps(values)[1:-1].encode()
    return b", ".join(map(_json_string, values))


def _json_string(text: str) -> bytes:
    pieces = (text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES))
    return b'"%b"' % b"".join(json.dumps(piece)[1:-1].encode() for piece in pieces)


def _value(parameter: Any) -> Any:
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))


class Streams:
    """`timeout_seconds`: how long each answer may take."""

    def __init__(
        self,
        rpc: RpcDataPlane,
        faults: Faults,
        instrumentation: Instrumentation,
        *,
        timeout_seconds: float,
    ) -> None:
        self._rpc = rpc
        self._faults = faults
        self._instrumentation = instrumentation
        self._timeout = timeout_seconds

    async def invoke(self, inference: AwaitedInference) -> web.StreamResponse:
        lease, request, body = inference.lease, inference.request, inference.body or b""
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
            return await self._tell(_EVENTS, self._generated(inference, body), inference)
        return await self._tell(_LINES, self._inferred(inference, message), inference)

    # -- from Triton ------------------------------------------------------------------------

    async def _inferred(
        self, inference: AwaitedInference, message: bytes
    ) -> AsyncGenerator[bytes, None]:
        lease, request = inference.lease, inference.request
        inference.held.enter_context(inference.path.budget.open_stream())
        metadata = [(n.lower(), v) for n, v in _forwarded(request).items()]
        end = application_of(request).client.abort  # who does not read gets no error
        call = RpcCall("ModelStreamInfer", metadata, None, end)
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
        self, inference: AwaitedInference, body: bytes
    ) -> AsyncGenerator[bytes, None]:
        record, headers = inference.lease.record, _forwarded(inference.request)
        async with inference.forward("/generate_stream", headers, body) as found:
            try:
                async for event in events_of(found.chunks(), record):
                    if event.startswith(_ERROR):
                        said = json.loads(event.removeprefix(b"data: "))["error"]
                        raise self._fault(StreamError(str(said), was_accepted=True), record)
                    yield event
            except ConnectionResetError as error:  # Triton's, and why is its cause
                if isinstance(error.__cause__, AdapterError):
                    raise error.__cause__ from error
                raise

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
        self, kind: str, answers: AsyncGenerator[bytes, None], inference: AwaitedInference
    ) -> web.StreamResponse:
        """A failure before the first answer is an answer of its own, as it is to InvokeEndpoint."""
        async with aclosing(answers):
            first = await anext(answers, None)
            response = await inference.begin_answer(
                {"Content-Type": CONTENT_TYPE, "X-Amzn-SageMaker-Content-Type": kind}
            )
            try:
                if first is not None:
                    await _write(response, first)
                async for answer in answers:
                    await _write(response, answer)
            except AdapterError as error:
                await response.write(await self._failed(error, inference))
            except (ConnectionResetError, asyncio.CancelledError):
                raise  # the caller has gone
            except Exception as error:
                log.exception("request.failed", extra={"model_id": inference.lease.record.id})
                drop_tracebacks(error)
                said = json.dumps({"Message": "internal error; see the log"}).encode()
                await response.write(exception("InternalStreamFailure", said))
        return response

    async def _failed(self, error: AdapterError, inference: AwaitedInference) -> bytes:
        """Return the message that ends a stream which has begun."""
        lease, request = inference.lease, inference.request
        ended = lease.end(error)
        model_id = lease.record.id
        judged = await lease.judge(ended if isinstance(ended, AdapterError) else error)
        told = call_info_of(request)
        more = {"status": web.HTTPOk.status_code, "aws_request_id": told.request_id}
        operation = request["operation"]
        self._instrumentation.refused(judged, asked_by(request), operation, model_id, more=more)
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


def _forwarded(request: web.BaseRequest) -> dict[str, str]:
    given = request.headers
    found = {name: value for name in FORWARDED if (value := given.get(name)) is not None}
    if found.pop("Content-Encoding", "identity").strip().lower() != "identity":
        raise InvalidRequest("a body for a stream must not be compressed")
    found.pop("Accept-Encoding", None)
    return found


async def _write(response: web.StreamResponse, payload: bytes) -> None:
    for at in range(0, len(payload), MAX_PAYLOAD_BYTES):
        await response.write(event("PayloadPart", payload[at : at + MAX_PAYLOAD_BYTES]))
