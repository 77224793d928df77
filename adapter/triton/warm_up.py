"""Makes an inference of zeros, by which a load finds out whether the model can compute."""

from math import prod

from tritonclient.grpc import service_pb2 as pb

from adapter.core.byte_sizes import format_size
from adapter.core.tensors import SIZES

# Bytes of one element; an element of BYTES is its length, 0, without any text.
_ELEMENT_BYTES = {**SIZES, "BF16": 2, "BYTES": 4}
# The limit of one inference: the event loop copies it, and other work waits as long.
_MAX_BYTES = 64 * 2**20


def explain_no_warm_up(config: pb.ModelConfigResponse) -> str | None:
    """Return why a lone inference of zeros would prove nothing about a model, or cannot be made;
    None if it proves something.
    """
    model = config.config
    # Triton ignores samples without a batch size
    if any(sample.batch_size for sample in model.model_warmup):
        return "Triton has run the model_warmup of its config.pbtxt"
    if model.HasField("sequence_batching"):
        return "it has sequence batching: a request belongs to a sequence"
    if model.model_transaction_policy.decoupled:
        return "it is decoupled: a request may have any number of responses, or none"
    return None


def make_zeros(
    name: str, metadata: pb.ModelMetadataResponse, config: pb.ModelConfigResponse
) -> pb.ModelInferRequest:
    """Return an inference of zeros, and of empty strings, for all inputs that are not optional.

    Dimensions that vary are 1. Raises ValueError for a data type that is not known, or for inputs
    that take too many bytes.
    """
    total_bytes = 0
    optional = {each.name for each in config.config.input if each.optional}
    request = pb.ModelInferRequest(model_name=name)
    for tensor in metadata.inputs:
        if tensor.name in optional:
            continue
        element_bytes = _ELEMENT_BYTES.get(tensor.datatype)
        if element_bytes is None:
            raise ValueError(f"its input {tensor.name!r} is of the type {tensor.datatype!r}")
        shape = [1 if dimension < 0 else dimension for dimension in tensor.shape]
        tensor_bytes = element_bytes * prod(shape)
        total_bytes += tensor_bytes
        if total_bytes > _MAX_BYTES:
            limit = format_size(_MAX_BYTES)
            raise ValueError(
                f"its inputs take {format_size(total_bytes)} at least; {limit} are sent at most"
            )
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(bytes(tensor_bytes))
    return request
