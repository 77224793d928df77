"""JSON that ends or blocks Triton: too deep, of too many parameters, or with too large a shape.

200,000 levels, 200 KB of `[`, end tritonserver 2.51 (SIGSEGV), and so does a hundred bytes with a
shape of 2^33 values (SIGABRT): it makes room before it looks at the data. 60,000 parameters of a
request block its HTTP port for 19 s. Only this is looked for, with operations on whole pieces:
bodies are large, and almost all of them are numbers.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, compress

from adapter.errors import InvalidRequest
from adapter.triton.json_parameters import StreamedParametersCheck

MOST_LEVELS = 1000
# Triton looks each parameter up among all of them: 1,000 take it 5 ms. In `generate` these are the
# members of the request, too, and the first of several `parameters` is read once for each: an
# object in the request counts as many members. What is in arrays, as inputs are, does not count.
# Fewer members than `_FEW` take little time however they are arranged.
MOST_MEMBERS = 1000
_OBJECT = 100
_FEW = 200

_OTHERS = bytes(byte for byte in range(256) if byte not in b'[]{}:"')
_ITS_VALUE = rb'[ \t\r\n]*(?::[ \t\r\n]*(?:\[([^]"[{]*))?)?'
_PLAIN_KEY = b'"shape"'
_PLAIN_VALUE = re.compile(rb'[ \t\r\n]*:[ \t\r\n]*\[([^]"[{]*)')
# a key may be written with escapes; to look for those takes twice as long
_SHAPE = re.compile(
    rb'"(?:s|\\u0073)(?:h|\\u0068)(?:a|\\u0061)(?:p|\\u0070)(?:e|\\u0065)"' + _ITS_VALUE
)
_KEY_BYTES = len(_PLAIN_KEY)
_LONGEST_KEY = 31
_SHARED_MEMORY = b"shared_memory_region"
# of all shapes of one text, whose dimensions are read one by one
_SHAPES_BYTES = 2**16
_SHORT_BYTES = 64
_DIGITS = 19
_MOST_VALUES = 2**63
_BACKSLASH = ord("\\")
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1, ord(":"): 0}
_ITEM = re.compile(rb"(?<=[\[\]}])\{:*(?:\{:*\}:*)*\}")  # of an array, as inputs are
_BRACKET = re.compile(rb"[\[\]{}]")
_OBJECT_IN_REQUEST = (ord("{"), 1)
_UPPER = (3).__gt__  # the level of the request's members, or of the members of an object in it


def _values(dimensions: bytes) -> int:
    """The most that a part of such a shape has, from its first dimension on."""
    return (_short_values if len(dimensions) <= _SHORT_BYTES else _all_values)(dimensions)


def _all_values(dimensions: bytes) -> int:
    values = 1
    most = 0
    for text in dimensions.split(b","):
        digits = text.strip().removeprefix(b"-")
        if len(digits) > _DIGITS or values > _MOST_VALUES:
            return _MOST_VALUES + 1
        if digits.isdigit():
            values *= int(digits)
            most = max(most, values)
    return most


_short_values = lru_cache(1024)(_all_values)


@lru_cache(1024)
def _plain_values(text: bytes) -> int:
    """Count the values that a shape stands for, in the text between a key and the next bracket.
    Return far too many for a text that is not simply a shape.
    """
    found = _PLAIN_VALUE.fullmatch(text)
    return _MOST_VALUES + 1 if found is None else _values(found[1])


def _are_small(part: bytes, most: int) -> bool:
    """Return whether no shape has more values, without a regular expression."""
    at = part.find(_PLAIN_KEY)
    while at >= 0:
        end = part.find(b"]", at)
        text = part[at + _KEY_BYTES : end]
        if len(text) > _SHORT_BYTES or _plain_values(text) > most:
            return False
        at = part.find(_PLAIN_KEY, end)
    return True


def _check(dimensions: bytes, most: int) -> None:
    if _values(dimensions) > most:
        raise InvalidRequest(f"a shape of more values than the {most} that can come")


def _has_zero(dimensions: bytes) -> bool:
    return any(text.strip() in {b"0", b"-0"} for text in dimensions.split(b","))


class Shapes:
    """Checks one JSON text, fed piece by piece. A shape may have as many values as `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rest = b""
        self._bytes = 0
        self.has_empty = False  # whether one has had no values

    def feed(self, piece: bytes) -> None:
        """InvalidRequest for a larger one, and for more shapes than a request needs."""
        text = self._rest + piece
        rest = max(0, len(text) - _LONGEST_KEY)
        for found in _SHAPE.finditer(text):
            if found.end() == len(text):  # the shape may go on
                rest = found.start()
            elif found[1] is not None and text.startswith(b"]", found.end()):
                self._count(len(found[0]))
                _check(found[1], self._most)
                self.has_empty = self.has_empty or _has_zero(found[1])
        self._rest = text[rest:]
        if len(self._rest) > _SHAPES_BYTES:
            raise InvalidRequest("a shape in the JSON has no end")

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _SHAPES_BYTES:
            raise InvalidRequest(f"the shapes in the JSON have more than {_SHAPES_BYTES} bytes")


class Structure:
    """The levels of one JSON text, and the members of the request; it is fed piece by piece."""

    def __init__(self) -> None:
        self._levels = self._members = 0
        self._is_in_string = self._is_escaped = False

    def feed(self, piece: bytes) -> None:
        """Raise InvalidRequest as soon as it is too deep, or has too many members."""
        marks = self._without_strings(piece)
        opened = marks.count(b"[") + marks.count(b"{")
        if self._levels + opened > MOST_LEVELS and max(self._levels_in(marks)) > MOST_LEVELS:
            raise InvalidRequest(f"JSON of more than {MOST_LEVELS} levels is not accepted")
        if b":" in marks or b"{" in marks:
            self._count_members(_ITEM.sub(b"", marks.replace(b"[]", b"")))
        self._levels += opened - marks.count(b"]") - marks.count(b"}")

    def _levels_in(self, brackets: bytes) -> Iterator[int]:
        """Return the level before each bracket, and the last one."""
        return accumulate(map(_STEPS.__getitem__, brackets), initial=self._levels)

    def _count_members(self, marks: bytes) -> None:
        brackets = marks.translate(None, b":")
        levels = [*self._levels_in(brackets)]
        colons = map(len, _BRACKET.split(marks))
        objects = [*zip(brackets, levels, strict=False)].count(_OBJECT_IN_REQUEST)
        self._members += sum(compress(colons, map(_UPPER, levels))) + objects * _OBJECT
        if self._members > MOST_MEMBERS:
            why = f"more than {MOST_MEMBERS} parameters; an object counts as {_OBJECT}"
            raise InvalidRequest(f"the request has {why}")

    def _without_strings(self, piece: bytes) -> bytes:
        """Return the brackets and colons outside strings. No expression: one that finds strings
        takes quadratic time for one without an end, as each escaped quote in it may begin another.
        """
        if self._is_escaped and piece:
            piece, self._is_escaped = piece[1:], False
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._is_escaped = piece.endswith(b"\\")
        parts = piece.translate(None, _OTHERS).split(b'"')
        outside = parts[self._is_in_string :: 2]
        self._is_in_string ^= len(parts) % 2 == 0
        return b"".join(outside)


class Limits:
    """Both, of the JSON part of one body, which has `size` bytes at most; `json_bytes` of them are
    JSON, None for all. `parameters`: of an inference.
    """

    def __init__(
        self, json_bytes: int | None, size: int, parameters: StreamedParametersCheck | None = None
    ) -> None:
        self._left = json_bytes
        self._structure = Structure()
        self._shapes = Shapes(size)
        self._parameters = parameters

    def feed(self, piece: bytes) -> None:
        """Check a piece of the body. Raises InvalidRequest."""
        if self._left is not None:
            piece = piece[: self._left]
            self._left -= len(piece)
        if piece:
            self._structure.feed(piece)
            self._shapes.feed(piece)
            if self._parameters is not None:
                self._parameters.feed(piece, has_empty_input=self._shapes.has_empty)


def check_whole(max_unpacked: int, body: bytes, json_bytes: int | None) -> None:
    """Raise InvalidRequest for a body that would end or block Triton, which is not compressed. A
    body of few levels and members takes little time.
    """
    part = body if json_bytes is None else body[:json_bytes]
    size = len(part)
    marks = part.translate(None, _OTHERS) if size > _FEW else b""
    if len(marks) > _FEW:
        levels = marks.count(b"[") + marks.count(b"{")
        if levels > MOST_LEVELS or marks.count(b":") > _FEW:
            Structure().feed(part)
    if _BACKSLASH in part or not _are_small(part, size):
        Shapes(most_values(part, len(body), max_unpacked)).feed(part)


def most_values(part: bytes, size: int, max_unpacked: int) -> int:
    """Return how many values the inputs of a body may have; `size` is that of the body."""
    return max_unpacked if _SHARED_MEMORY in part else size
