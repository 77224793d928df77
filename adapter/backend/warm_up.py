"""Builds the inference of zeros that warms a model up (docs/packages.md, Warm-up)."""

from collections.abc import Mapping
from math import prod

from tritonclient.grpc import service_pb2 as pb

from adapter.core.sizing import format_size

# Bytes of one element; an element of BYTES is its length, 0, and nothing.
_ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
    "BYTES": 4,
}


# Of one inference, which the event loop copies; the others wait as long.
_MOST_BYTES = 64 * 2**20


def why_not(config: pb.ModelConfigResponse) -> str | None:
    """Return why a lone inference of zeros tells nothing about such a model, or cannot be made."""
    model = config.config
    if any(sample.batch_size for sample in model.model_warmup):  # Triton passes the others over
        return "Triton has run the model_warmup of its config.pbtxt"
    if model.HasField("sequence_batching"):
        return "it has sequence batching: a request belongs to a sequence"
    if model.model_transaction_policy.decoupled:
        return "it is decoupled: a request may have any number of responses, or none"
    return None


def zeros(
    name: str, metadata: pb.ModelMetadataResponse, config: pb.ModelConfigResponse
) -> pb.ModelInferRequest:
    """Return an inference of zeros, and of empty strings, for all inputs that are not optional.
    Dimensions that vary are 1. ValueError for a data type that is not known, or for inputs that
    take too many bytes.
    """
    taken = 0
    optional = {each.name for each in config.config.input if each.optional}
    request = pb.ModelInferRequest(model_name=name)
    for tensor in metadata.inputs:
        if tensor.name in optional:
            continue
        if (size := _ELEMENT_BYTES.get(tensor.datatype)) is None:
            raise ValueError(f"its input {tensor.name!r} is of the type {tensor.datatype!r}")
        shape = [1 if dimension < 0 else dimension for dimension in tensor.shape]
        taken += size * prod(shape)
        if taken > _MOST_BYTES:
            most = format_size(_MOST_BYTES)
            raise ValueError(
                f"its inputs take {format_size(taken)} at least; {most} are sent at most"
            )
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(bytes(size * prod(shape)))
    return request
