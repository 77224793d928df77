"""Refuses parameters of a ModelInfer that end Triton, or that its caller may not use.

The JSON of an inference has the same rules (adapter/triton/json_parameters.py).
"""

import re

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from adapter.control.door import ModelRecord
from adapter.core.triton_input import (
    CLASSIFICATION,
    REGION,
    make_classification_refusal,
    make_region_refusal,
)
from adapter.errors import InvalidRequest

_CLASSIFICATION = CLASSIFICATION.encode()
_REGION = REGION.encode()
# the key of a map behind its length, which may be written in more bytes than it needs
_CLASSIFICATION_KEY = re.compile(rb"(?:\x0e|[\x8e\x80]\0)classification")
_REGION_KEY = re.compile(rb"(?:\x14|[\x94\x80]\0)shared_memory_region")


def check_parameters(
    message: bytes, record: ModelRecord, *, shares_memory: bool, is_whole: bool = True
) -> None:
    """Raise InvalidRequest for a ModelInferRequest that names a region of shared memory without the
    right to, or asks for the classification of an output of strings, which ends Triton. In a part
    of a message that is too long to be judged as a whole, a string of the letters of such a
    parameter counts as one.
    """
    if _CLASSIFICATION not in message and (shares_memory or _REGION not in message):
        return
    has_region = not shares_memory and _REGION_KEY.search(message) is not None
    outputs = None if record.unclassified is None else record.unclassified.strings
    may_classify = outputs != frozenset() and _CLASSIFICATION_KEY.search(message) is not None
    if not (has_region or may_classify):
        return
    try:
        request = pb.ModelInferRequest.FromString(message if is_whole else b"")
    except DecodeError as error:
        raise InvalidRequest("the message is no ModelInferRequest") from error
    tensors = (*request.inputs, *request.outputs)
    if has_region and (not is_whole or any(REGION in tensor.parameters for tensor in tensors)):
        raise make_region_refusal()
    if may_classify and not is_whole:
        raise make_classification_refusal("an output of the model")
    for output in request.outputs if may_classify else ():
        # Triton reads no name beyond a null byte
        is_refused = outputs is None or output.name.partition("\0")[0] in outputs
        if is_refused and CLASSIFICATION in output.parameters:
            raise make_classification_refusal(f"output {output.name!r}")
