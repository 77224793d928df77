"""Values of V2's data types, and their raw bytes."""

import codecs
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

# The struct codes of V2's data types; BF16 is the upper half of an FP32.
CODES: Mapping[str, str] = {
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
_LENGTH = struct.Struct("<I")

# A call of C holds the interpreter's lock until it returns, so none is given more values.
PIECE_VALUES = 4096
PIECE_BYTES = 2**16
_MAX_LEVELS = 64  # of nested lists: each takes a copy of all values

# The bytes of a value, of the types whose values have as many.
SIZES: Mapping[str, int] = {name: struct.calcsize(f"<{code}") for name, code in CODES.items()}
_NUMBERS = frozenset(CODES) - {"BOOL"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Describes a tensor of a model.

    Whether the shape includes the batch dimension is up to the owner.
    """

    name: str
    datatype: str  # in V2's terms
    shape: tuple[int, ...]  # each dimension is positive, or -1 for any length


@dataclass(frozen=True, slots=True)
class ContentTypes:
    """Lists the content types of a model (adapter/codecs), with shapes as its config has them."""

    types: tuple[str, ...]  # media types in lower case, some with `*` for any subtype
    options: frozenset[str]  # words that follow one of the types behind a semicolon
    is_batched: bool  # a dimension for the batch stands before those of each tensor
    input: Tensor
    outputs: tuple[Tensor, ...]  # empty if only Triton knows them

    def __contains__(self, media_type: str) -> bool:
        kind = media_type.partition("/")[0]
        return media_type in self.types or f"{kind}/*" in self.types


def flatten(data: Any) -> list[Any]:
    """Return the values of nested lists in their order; ValueError for lists nested too deeply."""
    values = [data]
    for _ in range(_MAX_LEVELS):
        if not any(isinstance(each, list) for each in values):
            return values
        values = [one for each in values for one in (each if isinstance(each, list) else (each,))]
    raise ValueError(f"the values are in lists of more than {_MAX_LEVELS - 1} levels")


def unpack_values(datatype: str, raw: bytes) -> Iterator[list[Any]]:
    """Yield the values in pieces. Raise ValueError for an unknown type, and for bytes of another
    length than whole values have.
    """
    if datatype == "BYTES":
        strings = _read_strings(raw)
        while piece := list(islice(strings, PIECE_VALUES)):
            yield piece
        return
    code, size = ("H", 2) if datatype == "BF16" else (_find_code(datatype), SIZES[datatype])
    if len(raw) % size:
        raise ValueError(f"{len(raw)} bytes are not {datatype}")
    for at in range(0, len(raw), PIECE_VALUES * size):
        part = raw[at : at + PIECE_VALUES * size]
        values = struct.unpack(f"<{len(part) // size}{code}", part)
        if datatype == "BF16":
            yield [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in values]
        else:
            yield list(values)


def pack_values(datatype: str, values: Sequence[Any]) -> bytes:
    """Return the bytes of values. Raise ValueError for an unknown type, and for values that are
    none of it.
    """
    parts = range(0, len(values), PIECE_VALUES)
    return b"".join(_pack(datatype, values[at : at + PIECE_VALUES]) for at in parts)


def _pack(datatype: str, values: Sequence[Any]) -> bytes:
    try:
        if datatype == "BYTES":
            return b"".join(_LENGTH.pack(len(each)) + each for each in map(str.encode, values))
        return struct.pack(f"<{len(values)}{_find_code(datatype)}", *values)
    except (struct.error, TypeError, OverflowError) as error:
        raise ValueError(f"the values are not {datatype}: {error}") from error


def can_cast(source: str, target: str) -> bool:
    """Return whether numbers of one type may become those of another: all but floating-point
    numbers as integers, and BOOL.
    """
    if not (source in _NUMBERS and target in _NUMBERS):
        return False
    return target.startswith("FP") or not source.startswith("FP")


def _find_code(datatype: str) -> str:
    code = CODES.get(datatype)
    if code is None:
        raise ValueError(f"data type {datatype!r} is not known")
    return code


def _read_strings(raw: bytes) -> Iterator[str]:
    """Yield strings, in front of each of which stand four bytes of its length."""
    at = 0
    while at + 4 <= len(raw):
        (size,) = _LENGTH.unpack_from(raw, at)
        yield _decode(raw[at + 4 : at + 4 + size])
        at += 4 + size


def _decode(raw: bytes) -> str:
    """Decode piece by piece: each byte that is no UTF-8 takes 0.1 us."""
    if len(raw) <= PIECE_BYTES:
        return raw.decode("utf-8", "backslashreplace")
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    starts = range(0, len(raw), PIECE_BYTES)
    parts = [decoder.decode(raw[at : at + PIECE_BYTES]) for at in starts]
    return "".join([*parts, decoder.decode(b"", final=True)])
