"""Tables of numbers as comma-separated text, from and to the bytes of a tensor."""

import math
import re
from itertools import chain

from adapter.codecs.base import MAX_TEXT_BYTES, Codec, Source, Values, converted
from adapter.core.tensors import SIZES, ContentTypes, Tensor, can_cast, pack_values, unpack_values

# Digits from which a value of that type can be read again; of the other types, as Python does.
_FORMATS = {"FP16": ".5g", "FP32": ".9g"}
_MAX_QUOTED = 50
_PIECE_CHARACTERS = 2**14  # which one call of C is given; also the most that a value may have
_ODD = re.compile(r'[_"]')  # Python takes the first for a separator of digits
# Dimensions that can be written: a line for each value, or for each row.
TABLE_RANKS = frozenset({1, 2})
_TABLE = 2
_MARK = b"\xef\xbb\xbf"  # which spreadsheets write in front of UTF-8


class Csv(Codec):
    """A table of numbers."""

    media_type = "text/csv"
    listed = (media_type,)
    holds_whole_body = True

    def needed(self, types: ContentTypes) -> str | None:
        """Return what the model's input would have to be for a table; None if it fits."""
        datatype = types.input.datatype
        rank = len(types.input.shape) + types.is_batched
        if not can_cast(datatype, datatype):
            return "a type of INT8 to INT64, UINT8 to UINT64 or FP16 to FP64"
        return None if rank == _TABLE else "two dimensions, rows and columns, the batch included"

    async def decode(self, source: Source, _: int | None, types: ContentTypes) -> Values:
        """Return the values of a table, as the type of the input."""
        text = await source.whole(MAX_TEXT_BYTES)
        shape, raw = await converted(len(text), read_table, text, types.input.datatype)
        return Values(Source(raw), 0, len(raw), shape=shape)

    def can_answer(self, output: Tensor, *, is_batched: bool) -> bool:
        """Return whether an output is of numbers, with one or two dimensions."""
        return output.datatype in SIZES and len(output.shape) + is_batched in TABLE_RANKS

    async def encode(self, datatype: str, shape: tuple[int, ...], values: Values) -> Values:
        """Return a tensor's values as a table."""
        size = values.size
        skip = values.skip
        if size > MAX_TEXT_BYTES:
            raise ValueError(
                f"it has {size} bytes of values, and at most {MAX_TEXT_BYTES} become text"
            )
        raw = (await values.source.whole(skip + size))[skip:]
        text = await converted(size, write_table, raw, datatype, shape)
        return Values(Source(text), 0, len(text))


def read_table(raw: bytes, datatype: str) -> tuple[tuple[int, int], bytes]:
    """Return rows and columns, and the values as a tensor's bytes.

    Lines end in LF, CR LF or CR. Raises ValueError, with the row, for what is no table of that
    type's numbers.
    """
    text = _decode(raw).rstrip()
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text:
        raise ValueError("it has no values")
    table = _Table(datatype)
    packs = []
    at = 0
    while at <= len(text):
        end = _find_piece_end(text, at, table.rows + 1)
        packs.append(table.read(text[at:end], is_cut=text[end : end + 1] == ","))
        at = end + 1
    return (table.rows, table.columns), b"".join(packs)


def _find_piece_end(text: str, at: int, row: int) -> int:
    """Return where a separator or the end of the text is, a few thousand values on at most."""
    if len(text) - at <= _PIECE_CHARACTERS:
        return len(text)
    last = at + _PIECE_CHARACTERS
    end = max(text.rfind(",", at, last), text.rfind("\n", at, last))
    if end < 0:
        raise ValueError(f"row {row}: a value has more than {_PIECE_CHARACTERS} characters")
    return end


class _Table:
    """A table that is read piece by piece. `_width`: the values of a row that goes on."""

    def __init__(self, datatype: str) -> None:
        self.rows = self.columns = 0
        self._width = 0
        self._datatype = datatype
        self._number: type[float | int] = float if datatype.startswith("FP") else int

    def read(self, piece: str, *, is_cut: bool) -> bytes:
        """Return the values of the piece as bytes. `is_cut`: its last row goes on."""
        lines = piece.split("\n")
        widths = [line.count(",") + 1 for line in lines]
        widths[0] += self._width
        self._width = widths.pop() if is_cut else 0
        self.columns = self.columns or (widths[0] if widths else 0)
        is_right = set(widths) <= {self.columns} and "" not in lines and not _ODD.search(piece)
        raw = self._pack(piece.replace("\n", ",").split(",")) if is_right else None
        if raw is None:
            raw = self._pack_by_row(lines, widths)
        self.rows += len(widths)
        return raw

    def _pack(self, texts: list[str]) -> bytes | None:
        """Return None where a value needs a closer look."""
        try:
            values = [*map(self._number, texts)]
            if any(map(math.isinf, values)) and not all(map(_holds_inf, texts, values)):
                return None
            return pack_values(self._datatype, values)
        except (ValueError, OverflowError):  # of an integer that no float can hold
            return None

    def _pack_by_row(self, lines: list[str], widths: list[int]) -> bytes:
        packs = []
        for row, line in enumerate(lines, self.rows + 1):
            place = row - self.rows - 1
            if not line and (place or widths[:1] == [1]):
                raise ValueError(f"row {row} is empty")
            if place < len(widths) and widths[place] != self.columns:
                raise ValueError(f"row {row} has {widths[place]} values; row 1 has {self.columns}")
            packs.append(_pack([*map(_unquote, line.split(","))], self._datatype, row))
        return b"".join(packs)


def _holds_inf(text: str, value: float) -> bool:
    return not math.isinf(value) or "inf" in text.lower()


def _unquote(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return text[1:-1] if is_quoted else text


def _decode(raw: bytes) -> str:
    start = len(_MARK) if raw.startswith(_MARK) else 0
    try:
        return raw[start:].decode("ascii")
    except UnicodeDecodeError as error:
        at = start + error.start
        raise ValueError(f"byte {at} is 0x{raw[at]:02x}: no number") from error


def _pack(row: list[str], datatype: str, count: int) -> bytes:
    number = float if datatype.startswith("FP") else int
    values = []
    for text in row:
        try:
            values.append(number(text.replace("_", "?")))  # Python takes it for a separator
        except ValueError:
            hint = "; a table has no heading" if count == 1 and text[:1].isalpha() else ""
            raise ValueError(
                f"row {count}: {_quote(text)} is not a valid {datatype}{hint}"
            ) from None
    try:
        raw = pack_values(datatype, values)
    except ValueError:
        raw = None
    if raw is None or any(map(math.isinf, values)):
        for text, value in zip(row, values, strict=True):
            if not _holds(datatype, text, value):
                raise ValueError(f"row {count}: {_quote(text)} is out of the range of {datatype}")
    return raw or b""


def _holds(datatype: str, text: str, value: float) -> bool:
    if value in {math.inf, -math.inf}:
        return "inf" in text.lower()  # a float of Python is infinite for too large numbers, too
    try:
        pack_values(datatype, [value])
    except ValueError:
        return False
    return True


def _quote(text: str) -> str:
    return repr(text[:_MAX_QUOTED])


def write_table(raw: bytes, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return a line for each value, or for each row where there are two dimensions.

    Raises ValueError for another type than numbers, and another shape.
    """
    if datatype == "BYTES" or len(shape) not in TABLE_RANKS:
        raise ValueError(f"{datatype} {list(shape)} is not a table of numbers")
    digits = _FORMATS.get(datatype)
    columns = math.prod(shape[1:])
    if not columns:
        raise ValueError(f"{datatype} {list(shape)} has no values")
    parts = []
    at = 0
    for values in unpack_values(datatype, raw):
        ends = [","] * len(values)
        last = slice((columns - 1 - at) % columns, None, columns)
        ends[last] = ["\n"] * len(ends[last])
        if digits is None:
            texts = [str(int(v) if v is True or v is False else v) for v in values]
        else:
            texts = [format(value, digits) for value in values]
        parts.append("".join(chain.from_iterable(zip(texts, ends, strict=True))).encode())
        at += len(values)
    return b"".join(parts)
