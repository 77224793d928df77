"""Makes V2 inference requests of a model's metadata, or reads one from a file."""

import json
import math
import random
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tritonclient.grpc import service_pb2

from adapter.tools.bench.errors import BenchError

# The struct codes of V2's data types; BF16 is the upper half of an FP32.
_CODES = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_FLOATS = {"FP16", "BF16", "FP32", "FP64"}
_BLOCK = 1024  # values before they repeat


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of payloads: the leading dynamic dimension, and whole shapes by input name."""

    batch: int
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Payload:
    """The tensors of a request. `given` is a file's JSON, sent unchanged in the JSON protocols."""

    tensors: tuple[Tensor, ...]
    given: bytes | None = None

    def as_json(self) -> bytes:
        if self.given is not None:
            return self.given
        inputs = [_head(tensor) | {"data": list(tensor.values)} for tensor in self.tensors]
        return json.dumps({"inputs": inputs}, separators=(",", ":")).encode()

    def as_binary(self) -> tuple[bytes, int]:
        """Return the body and the length of its JSON; it asks for a binary response."""
        raws = [raw(tensor) for tensor in self.tensors]
        inputs = [
            _head(tensor) | {"parameters": {"binary_data_size": len(data)}}
            for tensor, data in zip(self.tensors, raws, strict=True)
        ]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        return b"".join([head, *raws]), len(head)

    def as_message(self, model: str) -> bytes:
        message = service_pb2.ModelInferRequest(
            model_name=model,
            inputs=[
                service_pb2.ModelInferRequest.InferInputTensor(**_head(tensor))
                for tensor in self.tensors
            ],
            raw_input_contents=[raw(tensor) for tensor in self.tensors],
        )
        return bytes(message.SerializeToString())


def _head(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def raw(tensor: Tensor) -> bytes:
    """Encode little-endian, in row order, strings with a length of four bytes."""
    if tensor.datatype == "BYTES":
        texts = [str(value).encode() for value in tensor.values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if tensor.datatype == "BF16":  # the upper half of an FP32
        whole = struct.pack(f"<{len(tensor.values)}f", *tensor.values)
        return b"".join(whole[at + 2 : at + 4] for at in range(0, len(whole), 4))
    return struct.pack(f"<{len(tensor.values)}{_CODES[tensor.datatype]}", *tensor.values)


def from_metadata(metadata: Mapping[str, Any], shape: Shape, seed: int) -> Payload:
    """Make a payload; raise BenchError for an input whose type V2 does not have."""
    known = {str(each["name"]) for each in metadata["inputs"]}
    if unknown := sorted(set(shape.shapes) - known):
        raise BenchError(
            f"model {metadata['name']!r} has no input {unknown[0]!r}; it has {sorted(known)}"
        )
    return Payload(tuple(_made_up(each, shape, seed) for each in metadata["inputs"]))


def _made_up(given: Mapping[str, Any], shape: Shape, seed: int) -> Tensor:
    name, datatype = str(given["name"]), str(given["datatype"])
    dims = shape.shapes.get(name) or tuple(_dims(given["shape"], shape.batch))
    if datatype not in {*_CODES, "BF16", "BYTES"}:
        raise BenchError(f"input {name!r} is of type {datatype!r}, which V2 does not have")
    count = math.prod(dims)
    block = list(_values(datatype, random.Random(seed)))  # noqa: S311 - test data
    values = (block * (count // _BLOCK + 1))[:count]
    return Tensor(name, datatype, dims, array("d", values) if datatype in _FLOATS else values)


def _dims(shape: Sequence[Any], batch: int) -> Iterator[int]:
    """Yield the sizes: a dynamic first dimension is the batch, other dynamic ones are 1."""
    for place, size in enumerate(int(each) for each in shape):
        yield size if size >= 0 else batch if place == 0 else 1


def _values(datatype: str, source: random.Random) -> Iterator[Any]:
    """Every float type represents eighths exactly; 0 and 1 are valid indices nearly everywhere."""
    for _ in range(_BLOCK):
        number = source.randrange(8)
        if datatype in _FLOATS:
            yield number / 8
        elif datatype == "BOOL":
            yield number % 2 == 1
        else:
            yield f"text {number}" if datatype == "BYTES" else number % 2


def from_file(text: bytes) -> Payload:
    """Parse a V2 inference request in JSON, or raise BenchError."""
    try:
        inputs = json.loads(text)["inputs"]
        tensors = tuple(_read(each) for each in inputs)
        for tensor in tensors:
            raw(tensor)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise BenchError(f"no V2 inference request in JSON: {error!r}") from error
    return Payload(tensors, text)


def _read(given: Mapping[str, Any]) -> Tensor:
    shape = tuple(int(size) for size in given["shape"])
    tensor = Tensor(str(given["name"]), str(given["datatype"]), shape, list(_flat(given["data"])))
    if len(tensor.values) != math.prod(shape):
        raise ValueError(f"{tensor.name}: {len(tensor.values)} values for the shape {shape}")
    if tensor.datatype == "BOOL":
        return replace(tensor, values=[bool(value) for value in tensor.values])
    return tensor


def _flat(data: Any) -> Iterator[Any]:
    for each in data:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each
