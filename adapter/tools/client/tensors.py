"""The tensors of an answer: their values, sent as JSON or as raw bytes, and as text."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from adapter.cli.text import printable
from adapter.protocols.tensors import flat, unpacked

_MOST_ROWS = 20


@dataclass(frozen=True, slots=True)
class Tensor:
    """`raw` is None where the values came as JSON."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: list[Any]
    raw: bytes | None


def tensors_of(answer: Mapping[str, Any], binary: bytes) -> list[Tensor]:
    """Return the outputs of an answer. `binary` is what follows its JSON.

    Raises ValueError where they are not as V2 has them.
    """
    found, at = [], 0
    for output in answer.get("outputs", []):
        size = output.get("parameters", {}).get("binary_data_size")
        raw = None if size is None else binary[at : at + size]
        at += size or 0
        if raw is None:
            values = flat(output["data"])
        else:
            values = [*chain.from_iterable(unpacked(output["datatype"], raw))]
        found.append(Tensor(output["name"], output["datatype"], (*output["shape"],), values, raw))
    return found


def as_text(tensor: Tensor, width: int) -> Iterator[str]:
    """Return a line for name and shape, and one for each row, cut to the width."""
    shape = ", ".join(map(str, tensor.shape))
    yield printable(f"{tensor.name}  {tensor.datatype} [{shape}]")
    step = max(1, tensor.shape[-1] if tensor.shape else 1)
    starts = range(0, len(tensor.values), step)
    for start in starts[:_MOST_ROWS]:
        yield _row(tensor.values[start : start + step], width)
    if len(starts) > _MOST_ROWS:
        yield f"  ... {len(starts) - _MOST_ROWS} more rows"


def _row(values: list[Any], width: int) -> str:
    line = " "
    for value in values:
        text = _value(value)
        if len(line) + len(text) + 2 > width:
            return f"{line} …"
        line = f"{line} {text}"
    return line


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return printable(json.dumps(value, ensure_ascii=False))
