"""Reads from a model's config how it takes texts, as NVIDIA Dynamo's Triton backend does.

A model takes texts by its one input of TYPE_STRING, which has the dims [1] or [-1], and answers
with numbers by its one output of TYPE_FP32. Its rows are those of the batch; a model without
batches answers with one row, whatever the shape of its output.
"""

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from adapter.core.tensors import pack_values
from adapter.errors import InferenceFailed, InvalidRequest
from adapter.frontends.http.instrumentation import quoted

_MAX_TEXTS = 2048  # of one call, as at OpenAI
_INFERENCE = (
    '{"inputs":[{"name":%s,"datatype":"BYTES","shape":%s,"parameters":{"binary_data_size":%d}}],'
    '"outputs":[{"name":%s,"parameters":{%s}}]}'
)
# the parameter of an output by which Triton answers so
_AS_JSON = '"binary_data":false'
_AS_BYTES = '"binary_data":true'
_VALUES = b'"data":['  # in no string of JSON, where the quotes are escaped


@dataclass(frozen=True, slots=True)
class TextModel:
    """Says how a loaded model takes texts and answers with a row of numbers for each."""

    input: str
    output: str
    max_batch_size: int  # 0 if the shape of a tensor does not begin with the batch
    dims: Sequence[int]  # of a row


def read_text_model(config: Mapping[str, Any]) -> TextModel:
    """Read how a model takes texts. Raises InvalidRequest for one that does not, with what it
    lacks.
    """
    texts = find_tensor(config, "input", "TYPE_STRING")
    numbers = find_tensor(config, "output", "TYPE_FP32")
    if texts["dims"] not in ([1], [-1]):
        raise InvalidRequest(f"the input of texts has dims {texts['dims']}, neither [1] nor [-1]")
    return TextModel(texts["name"], numbers["name"], config["max_batch_size"], numbers["dims"])


def find_tensor(
    config: Mapping[str, Any],
    side: str,  # `input` or `output`
    data_type: str,
    preferred: str = "",  # the name that decides where there are several
) -> Any:
    """Return the one tensor of a type on one side of the model. Raises InvalidRequest."""
    tensors = [one for one in config[side] if one["data_type"] == data_type]
    named = [tensor for tensor in tensors if tensor["name"] == preferred] or tensors
    if len(named) != 1:
        raise InvalidRequest(
            f"the model has {len(named)} {side}s of {data_type}; this call needs a model with one"
        )
    return named[0]


def read_texts(value: object, field: str) -> list[str]:
    """Return the texts in a field of a call. Raises InvalidRequest."""
    texts: list[Any] = value if isinstance(value, list) else [value]
    if not 0 < len(texts) <= _MAX_TEXTS:
        raise InvalidRequest(f"{field} has {len(texts)} texts; 1 to {_MAX_TEXTS} are accepted")
    for at, text in enumerate(texts):
        if not (isinstance(text, str) and text):
            raise InvalidRequest(
                f"{field}[{at}] must be a text; empty ones and tokens are not accepted: see "
                "docs/openai.md"
            )
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} has a text that is not valid Unicode: {error}") from error
    return texts


def choose_output_parameter(model: TextModel, body: Mapping[str, Any]) -> str:
    """Return the parameter of an inference's output that a call needs: with it Triton answers with
    numbers in JSON, or with raw ones for base64. Raises InvalidRequest.
    """
    encoding = body.get("encoding_format")
    if encoding not in (None, "float", "base64"):
        raise InvalidRequest("encoding_format must be 'float' or 'base64'")
    width = body.get("dimensions")
    if width is not None and [width] != model.dims:
        raise InvalidRequest(
            f"dimensions {width!r} is not supported: vectors of the model have {model.dims}"
        )
    return _AS_BYTES if encoding == "base64" else _AS_JSON


def write_inference(model: TextModel, texts: Sequence[str], parameter: str) -> tuple[bytes, int]:
    """Return the body of an inference, which is JSON with the raw texts behind it, and the length
    of the JSON.
    """
    values = pack_values("BYTES", texts)
    shape = f"[{len(texts)},1]" if model.max_batch_size else "[1]"
    text = _INFERENCE % (quoted(model.input), shape, len(values), quoted(model.output), parameter)
    return text.encode() + values, len(text)


def read_rows(model: TextModel, count: int, body: bytes, json_bytes: int | None) -> list[bytes]:
    """Return the row of numbers of each text as JSON: raw numbers as a string in base64, others as
    Triton has written them, so that nothing is rounded.
    """
    begin = json_bytes
    end = len(body)
    if begin is None:
        values_at = body.find(_VALUES)
        # an answer without numbers is JSON to its end
        begin = end if values_at < 0 else values_at + len(_VALUES)
        end = end if values_at < 0 else body.find(b"]", begin)
    width = _read_width(body[:begin] + body[end:], count, model.max_batch_size)
    values = body[begin:end]
    if json_bytes is None:
        if b"N" in values or b"I" in values:
            raise InferenceFailed("the model has answered with NaN or infinity, which JSON lacks")
        return _split_numbers(values, width) if count > 1 else [b"[%b]" % values]
    size = len(values) // count
    return [b'"%b"' % b64encode(values[at : at + size]) for at in range(0, len(values), size)]


# the text is the same for all answers of one model and shape
@lru_cache(256)
def _read_width(head: bytes, count: int, max_batch_size: int) -> int:
    """Return how many numbers a row has, by an answer without its numbers. Raises InferenceFailed
    for an answer that has not one row for each text.
    """
    [output] = json.loads(head).get("outputs") or [{"datatype": "nothing", "shape": []}]
    datatype = output["datatype"]
    shape: list[int] = output["shape"]
    rows = shape[0] if max_batch_size and len(shape) > 1 else 1
    if datatype != "FP32" or rows != count or 0 in shape:
        raise InferenceFailed(
            f"the model has answered {count} texts with {datatype} {shape}; one row of FP32 is "
            "needed for each"
        )
    return prod(shape) // rows


def _split_numbers(values: bytes, width: int) -> list[bytes]:
    """Split numbers that JSON lists one after the other into rows, each with its brackets."""
    row = re.compile(rb"((?:[^,]+,){%d}[^,]+),?" % (width - 1))
    return [b"[%b]" % match[1] for match in row.finditer(values)]
