"""Converts V2's JSON to messages of Triton's gRPC stream, and its answers to lines of JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from adapter.control.door import ModelRecord
from adapter.core.tensors import PIECE_BYTES, flatten, pack_values, unpack_values
from adapter.errors import InvalidRequest
from adapter.frontends.grpc.parameters import check_parameters

# That there are more answers, or not: of the gRPC stream, whose end the caller sees anyway.
_FINAL = "triton_final_response"
_BINARY = frozenset({"binary_data", "binary_data_size"})


def as_request(call: Mapping[str, Any], raw: bytes, record: ModelRecord) -> bytes:
    """Return the ModelInferRequest of a V2 inference; `raw` is what follows its JSON."""
    try:
        message = bytes(_build_request(call, raw, record.name).SerializeToString())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"member {error} is missing" if isinstance(error, KeyError) else str(error)
        raise InvalidRequest(
            f"the body is not a V2 inference: {reason}", model_id=record.id
        ) from error
    check_parameters(message, record, shares_memory=False)
    return message


def _build_request(call: Mapping[str, Any], raw: bytes, name: str) -> Any:
    """Build a ModelInferRequest from V2's JSON and the binary tensors behind it. Raises ValueError
    if they do not fit.
    """
    if not isinstance(call.get("id", ""), str):
        raise ValueError("id is not a string")  # noqa: TRY004 - caught with all that is wrong
    request = pb.ModelInferRequest(model_name=name, id=call.get("id", ""))
    _add_parameters(request.parameters, call.get("parameters", {}))
    at = 0
    for given in call["inputs"]:
        size = given.get("parameters", {}).get("binary_data_size")
        into = request.inputs.add(
            name=given["name"], datatype=given["datatype"], shape=given["shape"]
        )
        _add_parameters(into.parameters, given.get("parameters", {}))
        if size is None:
            request.raw_input_contents.append(
                pack_values(given["datatype"], flatten(given["data"]))
            )
        elif 0 <= size <= len(raw) - at:
            request.raw_input_contents.append(raw[at : at + size])
            at += size
        else:
            raise ValueError(f"{size} bytes of {given['name']!r} are not all there")
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes follow the last tensor")
    for given in call.get("outputs", []):
        _add_parameters(
            request.outputs.add(name=given["name"]).parameters, given.get("parameters", {})
        )
    return request


def _add_parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    """Add the parameters of a request, an input or an output to those of a message, but for those
    that say how tensors lie in a body. Raises ValueError for one that Triton's stream cannot take.
    """
    for name, value in parameters.items():
        if name.startswith("shared_memory"):
            raise ValueError("shared memory is not taken by a stream")
        if name in _BINARY or name == "binary_data_output":
            continue
        match value:
            case bool():
                target[name].bool_param = value
            case int():
                target[name].int64_param = value
            case float():
                target[name].double_param = value
            case str():
                target[name].string_param = value
            case _:
                raise ValueError(f"parameter {name!r} is not a string, number or boolean")


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error that Triton sends in the place of an answer."""

    text: str
    was_accepted: bool  # the model has seen the request; else Triton names no model


def as_line(message: bytes, record: ModelRecord) -> bytes | StreamError:
    """Return a ModelStreamInferResponse as a line of JSON."""
    response = pb.ModelStreamInferResponse()
    try:
        response.ParseFromString(message)
    except DecodeError as error:
        return StreamError(f"Triton's answer cannot be read: {error}", was_accepted=True)
    answer = response.infer_response
    if response.error_message:
        return StreamError(response.error_message, was_accepted=bool(answer.model_name))
    head: dict[str, Any] = {"model_name": record.id, "model_version": answer.model_version}
    if answer.id:
        head["id"] = answer.id
    parameters = {n: _read_parameter(one) for n, one in answer.parameters.items() if n != _FINAL}
    if parameters:
        head["parameters"] = parameters
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    outputs = b", ".join(_output(output, raw) for output, raw in pairs)
    return json.dumps(head)[:-1].encode() + b', "outputs": [' + outputs + b"]}\n"


def _output(output: Any, raw: bytes) -> bytes:
    """Return an output as JSON, its values piece by piece: `json.dumps` holds Python's lock."""
    head = {"name": output.name, "datatype": output.datatype, "shape": [*output.shape]}
    data = b", ".join(map(_json, unpack_values(output.datatype, raw)))
    return json.dumps(head)[:-1].encode() + b', "data": [' + data + b"]}"


def _json(values: list[Any]) -> bytes:
    """Return a few thousand values as JSON, long strings among them piece by piece."""
    if not isinstance(values[0], str) or sum(map(len, values)) <= PIECE_BYTES:
        return json.dumps(values)[1:-1].encode()
    return b", ".join(map(_json_string, values))


def _json_string(text: str) -> bytes:
    """Return a text as a string of JSON, encoded piece by piece, as a long one would hold the
    interpreter's lock.
    """
    pieces = (text[at : at + PIECE_BYTES] for at in range(0, len(text), PIECE_BYTES))
    return b'"%b"' % b"".join(json.dumps(piece)[1:-1].encode() for piece in pieces)


def _read_parameter(parameter: Any) -> Any:
    """Return the value of a parameter, whichever type it has."""
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))
