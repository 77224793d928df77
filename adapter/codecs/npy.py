"""NumPy's .npy files, versions 1 to 3. The head says which values follow, and in what shape.

It is read by a pattern, not as the Python that it is: whoever sends one says nothing but three
fields.
"""

import math
import re
import struct
from dataclasses import dataclass

import numpy as np

from adapter.codecs.base import Codec, Source, Values
from adapter.core.tensors import SIZES, ContentTypes, Tensor, can_cast

MAGIC = b"\x93NUMPY"
# Of a head, as in NumPy itself.
MAX_HEAD_BYTES = 10_000
_MAX_BYTES = 2**63 - 1
_MAX_DIMS = 64  # NumPy 2's own limit
_CAST = "cast"
_ALIGN = 64  # where the values begin, as NumPy writes it

_CODES = {
    "BOOL": "b1",
    **{f"INT{8 * size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": f"u{size}" for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"f{size}" for size in (2, 4, 8)},
}
_DATATYPES = {code: datatype for datatype, code in _CODES.items()}
# Python's blanks, which are fewer than those of a pattern's \s.
_BLANKS = " \t\r\n\f"
_BLANK = r"[ \t\r\n\f]*"
_FIELD = re.compile(
    rf"""{_BLANK}(?P<quote>['"])(?P<name>descr|fortran_order|shape)(?P=quote){_BLANK}:{_BLANK}"""
    r"""(?:'(?P<text>[^'\\]*)'|"(?P<other>[^"\\]*)"|(?P<bool>True|False)"""
    rf"""|\((?P<sizes>[0-9L, \t\r\n\f]*)\)){_BLANK}(?:,|(?=}}))"""
)
_SIZE = re.compile(r"(?:0|[1-9][0-9]{0,18})L?")


class Npy(Codec):
    """An array. With `cast` its numbers become those of the input."""

    media_type = "application/x-npy"
    listed = (media_type,)
    options = (_CAST,)

    def check(self, media_type: str, types: ContentTypes) -> None:
        """Raise ValueError for a model whose input NumPy lacks, or that cannot be cast to."""
        super().check(media_type, types)
        datatype = types.input.datatype
        if _CAST in types.options and not can_cast(datatype, datatype):
            raise ValueError(f"{media_type};{_CAST} needs an input of numbers; it is {datatype}")

    def needed(self, types: ContentTypes) -> str | None:
        """Return what the model's input would have to be for an array; None if it fits."""
        return None if types.input.datatype in SIZES else "a type that NumPy has"

    async def decode(self, source: Source, _: int | None, types: ContentTypes) -> Values:
        """Return the values of an array. Raise ValueError if the input is of another type."""
        start = await source.start(bytes_needed(b""))
        head = read_head(await source.start(bytes_needed(start)))
        given = head.datatype
        wanted = types.input.datatype
        if given != wanted and not (_CAST in types.options and can_cast(given, wanted)):
            text = f"the array is {given}, input {types.input.name!r} is {wanted}"
            raise ValueError(text + _explain_cast(given, wanted))
        return Values(source, head.offset, head.size, shape=head.shape, datatype=given)

    def can_answer(self, output: Tensor, *, is_batched: bool) -> bool:  # noqa: ARG002
        """Return whether NumPy has the type of an output."""
        return output.datatype in SIZES

    async def encode(self, datatype: str, shape: tuple[int, ...], values: Values) -> Values:
        """Return a tensor's values behind the head of a file."""
        return Values(values.source, values.skip, values.size, write_head(datatype, shape))


def cast(raw: bytes, source: str, target: str) -> bytes:
    """Return the values as those of another type: rounded, and infinite where they are too large
    for a floating type. Raises ValueError for an integer out of the target's range.
    """
    values = np.frombuffer(raw, f"<{_CODES[source]}")
    kind = np.dtype(f"<{_CODES[target]}")
    if np.can_cast(values.dtype, kind):
        return values.astype(kind).tobytes()
    if values.size and kind.kind != "f":
        bounds = np.iinfo(kind)
        for value in (int(values.min()), int(values.max())):
            if not bounds.min <= value <= bounds.max:
                raise ValueError(f"{value} is out of the range of {target}")
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(kind).tobytes()


def _explain_cast(given: str, wanted: str) -> str:
    if can_cast(given, wanted):
        listed = f"{Npy.media_type};{_CAST}"
        return f"; with {listed} in the model's adapter_content_types it would become that"
    if given.startswith("FP") and can_cast(wanted, wanted):
        return "; floating-point numbers do not become integers"
    return ""


@dataclass(frozen=True, slots=True)
class NpyHead:
    """Describes the array of a file."""

    datatype: str
    shape: tuple[int, ...]
    offset: int  # where the values begin, in C order and little-endian

    @property
    def size(self) -> int:
        """Return the bytes of the values."""
        return math.prod(self.shape) * SIZES[self.datatype]


def bytes_needed(start: bytes) -> int:
    """Return how much of a file must be there to read its head, by what is there of it.

    Raises ValueError for what is no .npy file.
    """
    if start[:6] != MAGIC[: len(start)]:
        raise ValueError("it does not begin as a .npy file does")
    if len(start) < 12:  # noqa: PLR2004 - in which the length of the head is
        return 12
    if start[6] not in {1, 2, 3} or start[7]:
        raise ValueError(f"version {start[6]}.{start[7]} of .npy is not known")
    size: int
    (size,) = struct.unpack_from("<H" if start[6] == 1 else "<I", start, 8)
    if size > MAX_HEAD_BYTES:
        raise ValueError(f"its head has {size} bytes; at most {MAX_HEAD_BYTES} are accepted")
    return size + (10 if start[6] == 1 else 12)


def read_head(start: bytes) -> NpyHead:
    """Return the head of a file. Raise ValueError, with the reason, for what is no head, or one of
    what cannot be a tensor.
    """
    needed = bytes_needed(start)
    if len(start) < needed:
        raise ValueError(f"it ends after {len(start)} bytes, within its head")
    text = start[10 if start[6] == 1 else 12 : needed].decode("latin-1")
    fields = _parse_fields(text)
    datatype = _read_datatype(fields["descr"])
    if fields["fortran_order"]["bool"] is None:
        raise ValueError("fortran_order is neither True nor False")
    if fields["fortran_order"]["bool"] == "True":
        raise ValueError("the array is in Fortran order; numpy.ascontiguousarray() changes that")
    return NpyHead(datatype, _read_shape(fields["shape"], datatype), needed)


def write_head(datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return the head of version 1. Raises ValueError for a type that NumPy lacks."""
    code = _CODES.get(datatype)
    if code is None:
        raise ValueError(f"NumPy has no type {datatype}")
    descr = f"{'|' if code.endswith('1') else '<'}{code}"
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    text += b" " * (-(10 + len(text) + 1) % _ALIGN) + b"\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text


def _parse_fields(text: str) -> dict[str, re.Match[str]]:
    inner = text.strip(_BLANKS)
    found: dict[str, re.Match[str]] = {}
    at = 1
    if inner[:1] == "{" and inner[-1:] == "}":
        while field := _FIELD.match(inner, at):
            if field["name"] in found:
                break
            found[field["name"]] = field
            at = field.end()
    if len(found) < 3 or inner[at:].strip(_BLANKS) != "}":  # noqa: PLR2004 - the names in the pattern
        raise ValueError(f"its head is not that of a plain array: {text[:100]!r}")
    return found


def _read_datatype(field: re.Match[str]) -> str:
    descr = field["text"] or field["other"] or ""
    order = descr[:1]
    code = descr[1:]
    if code.startswith("O"):
        raise ValueError("it has pickled objects, which are not accepted")
    datatype = _DATATYPES.get(code)
    if datatype is None or order not in {"<", ">", "|"}:
        raise ValueError(f"type {descr[:50]!r} is not accepted; b1, i, u and f are")
    if order != "<" and SIZES[datatype] > 1:
        raise ValueError(f"type {descr!r} is not little-endian")
    return datatype


def _read_shape(field: re.Match[str], datatype: str) -> tuple[int, ...]:
    text = field["sizes"]
    if text is None:
        raise ValueError("its shape is not a tuple of numbers")
    parts = [part.strip(_BLANKS) for part in text.split(",")]
    if parts[-1] == "":
        parts.pop()
    if len(parts) > _MAX_DIMS or not all(_SIZE.fullmatch(part) for part in parts):
        raise ValueError(f"its shape ({text[:100]}) is none")
    if len(parts) == 1 and "," not in text:
        raise ValueError(f"its shape ({text[:100]}) is a number and no tuple")
    shape = tuple(int(part.removesuffix("L")) for part in parts)
    if math.prod(size for size in shape if size) * SIZES[datatype] > _MAX_BYTES:
        raise ValueError(f"its shape ({text[:100]}) is larger than any memory")
    return shape
