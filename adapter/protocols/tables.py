"""Tables of numbers as comma-separated text, from and to the bytes of a tensor."""

import csv
import io
import math
from itertools import islice

from adapter.protocols.tensors import packed, unpacked

# Digits from which a value of that type can be read again; of the other types, as Python does.
_FORMATS = {"FP16": ".5g", "FP32": ".9g"}
_MAX_QUOTED = 50
# Dimensions that can be written: a line for each value, or for each row.
TABLE_RANKS = frozenset({1, 2})
_MARK = b"\xef\xbb\xbf"  # which spreadsheets write in front of UTF-8


def read_table(raw: bytes, datatype: str) -> tuple[tuple[int, int], bytes]:
    """Return rows and columns, and the values as a tensor's bytes.

    Lines end in LF, CR LF or CR. Raises ValueError, with the row, for what is no table of that
    type's numbers.
    """
    text = _text(raw)
    number = float if datatype.startswith("FP") else int
    packs: list[bytes] = []
    columns = 0
    lines = io.StringIO(text.rstrip(), newline=None)
    try:
        for count, row in enumerate(csv.reader(lines, strict=True), 1):
            if not row:
                raise ValueError(f"row {count} is empty")
            columns = columns or len(row)
            if len(row) != columns:
                raise ValueError(f"row {count} has {len(row)} values; row 1 has {columns}")
            packs.append(_packed(row, datatype, number, count))
    except csv.Error as error:
        raise ValueError(f"row {len(packs) + 1}: {error}") from error
    if not columns:
        raise ValueError("it has no values")
    return (len(packs), columns), b"".join(packs)


def _text(raw: bytes) -> str:
    start = len(_MARK) if raw.startswith(_MARK) else 0
    try:
        return raw[start:].decode("ascii")
    except UnicodeDecodeError as error:
        at = start + error.start
        raise ValueError(f"byte {at} is 0x{raw[at]:02x}: no number") from error


def _packed(row: list[str], datatype: str, number: type[float] | type[int], count: int) -> bytes:
    values = []
    for text in row:
        try:
            values.append(number(text.replace("_", "?")))  # Python takes it for a separator
        except ValueError:
            hint = "; a table has no heading" if count == 1 and text[:1].isalpha() else ""
            raise ValueError(f"row {count}: {_quoted(text)} is no {datatype}{hint}") from None
    try:
        raw = packed(datatype, values)
    except ValueError:
        raw = None
    if raw is None or any(map(math.isinf, values)):
        for text, value in zip(row, values, strict=True):
            if not _holds(datatype, text, value):
                raise ValueError(f"row {count}: {_quoted(text)} is out of the range of {datatype}")
    return raw or b""


def _holds(datatype: str, text: str, value: float) -> bool:
    if value in {math.inf, -math.inf}:
        return "inf" in text.lower()  # else it is a number that Python cannot hold
    try:
        packed(datatype, [value])
    except ValueError:
        return False
    return True


def _quoted(text: str) -> str:
    return repr(text[:_MAX_QUOTED])


def write_table(raw: bytes, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return a line for each value, or for each row where there are two dimensions.

    Raises ValueError for another type than numbers, and another shape.
    """
    if datatype == "BYTES" or len(shape) not in TABLE_RANKS:
        raise ValueError(f"{datatype} {list(shape)} is no table of numbers")
    digits = _FORMATS.get(datatype)
    values = unpacked(datatype, raw)
    if digits is None:
        texts = iter([str(int(v) if v is True or v is False else v) for v in values])
    else:
        texts = iter([format(value, digits) for value in values])
    columns = math.prod(shape[1:])
    rows = (",".join(islice(texts, columns)) for _ in range(shape[0]))
    return "".join(f"{row}\n" for row in rows).encode()
