"""Reads ModelMesh's schema: a JSON file with a model's inputs and outputs in V2's terms.

With it a model needs no config.pbtxt; where there is one, the schema's tensors replace its own, as
in ModelMesh's own adapter (docs/modelmesh.md, Layouts).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapter.core.tensors import CODES, Tensor
from adapter.packages.config_text import quoted
from adapter.packages.messages import cut, invalid_model

_DATATYPES = {name: f"TYPE_{name}" for name in (*CODES, "BF16", "STRING")}
_DATATYPES["BYTES"] = "TYPE_STRING"


@dataclass(frozen=True, slots=True)
class Schema:
    """Inputs and outputs; empty means that the schema is silent, not that the model has none."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def parse_schema(raw: bytes, where: str) -> Schema:
    """Return the schema in a file's bytes. Raise InvalidModel if they are none; its text begins
    with `where`, the file's name.

    Other fields are ignored. `merge` checks whether the shapes fit the model.
    """
    try:
        fields = _parse_object(raw, where)
        return Schema(
            _read_tensors(fields, "inputs", where), _read_tensors(fields, "outputs", where)
        )
    except RecursionError as error:
        raise invalid_model(where, "it is nested too deeply") from error


def merge(schema: Schema, max_batch_size: int, where: str) -> Schema:
    """Return the schema for a config with this max_batch_size, without the batch dimension.

    To be called with 0 for a model without batching or config: Triton refuses a tensor without
    dimensions. InvalidModel begins with `where`, the config's or schema's name.
    """

    def fit(tensor: Tensor) -> Tensor:
        """Return a tensor without its batch dimension. Raise InvalidModel if it has none."""
        name = cut(tensor.name)
        has = f"conflicting model configuration: tensor {name!r} has shape {_show(tensor.shape)}"
        shape = tensor.shape
        if max_batch_size > 0:
            if shape[:1] != (-1,):
                batched = f"with max_batch_size {max_batch_size} the first dimension must be -1"
                raise invalid_model(where, f"{has}, but {batched}")
            shape = shape[1:]
        if not shape:
            raise invalid_model(where, f"{has}; Triton needs a dimension besides the batch's")
        return replace(tensor, shape=shape)

    return Schema(tuple(map(fit, schema.inputs)), tuple(map(fit, schema.outputs)))


def tensors_text(tensors: Sequence[Tensor]) -> str:
    """Return tensors as the list that follows `input` or `output` in config.pbtxt; empty without
    tensors.
    """
    if not tensors:
        return ""
    items = ",\n".join(
        f"  {{ name: {quoted(tensor.name)}, data_type: {_DATATYPES[tensor.datatype]},"
        f" dims: {list(tensor.shape)} }}"
        for tensor in tensors
    )
    return f"[\n{items}\n]"


def _parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a file's bytes. Raise InvalidModel, which names `where`, for no JSON object."""
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise invalid_model(where, f"it is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid_model(where, "it is not a JSON object")
    return value


def _read_tensors(fields: dict[str, Any], field: str, where: str) -> tuple[Tensor, ...]:
    """Return the tensors in a field of the schema, `inputs` or `outputs`. Raise InvalidModel if it
    is no list of them, or a name comes twice.
    """
    items = fields.get(field)
    if items is None:
        return ()
    if not isinstance(items, list):
        raise invalid_model(where, f"{field} is not a list")
    tensors: dict[str, Tensor] = {}
    for index, item in enumerate(items):
        tensor = _read_tensor(item, f"{where}: {field}[{index}]")
        if tensor.name in tensors:
            place = f"{where}: {field}[{index}]"
            raise invalid_model(place, f"there is another {cut(tensor.name)!r}")
        tensors[tensor.name] = tensor
    return tuple(tensors.values())


def _read_tensor(item: object, where: str) -> Tensor:
    """Return a tensor from its JSON. Raise InvalidModel, which names `where`, if it is none."""
    if not isinstance(item, dict):
        raise invalid_model(where, "it is not a JSON object")
    name = item.get("name")
    datatype = item.get("datatype")
    shape = item.get("shape")
    if not isinstance(name, str) or not name:
        raise invalid_model(where, "it has no name")
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise invalid_model(where, "its name is not valid Unicode")
    if not isinstance(datatype, str) or datatype not in _DATATYPES:
        known = ", ".join(_DATATYPES)
        raise invalid_model(where, f"datatype {_show(datatype)} is none of {known}")
    if not isinstance(shape, list) or not all(map(_is_dimension, shape)):
        fault = f"shape {_show(shape)} is not a list of positive whole numbers or -1"
        raise invalid_model(where, fault)
    return Tensor(name, datatype, tuple(shape))


def _is_dimension(value: object) -> bool:
    """Return whether the value is a JSON integer (True is not) that is positive or -1."""
    return type(value) is int and (value == -1 or 0 < value < 2**63)


def _show(value: object) -> str:
    """Return a value as JSON, at a length that fits a message."""
    return cut(json.dumps(value))
