"""Bodies of other content types as requests of V2, and V2's answers as other content types.

The values of a large tensor are passed on as they come, behind a head of ours.
"""

import json
import math
import re
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from adapter.core.calls import V2Answer
from adapter.errors import InvalidRequest, NotAcceptable, PayloadTooLarge
from adapter.frontends.http import binary
from adapter.frontends.http.content_types import JSON, Kind
from adapter.protocols import npy
from adapter.protocols.content_types import CSV, NPY, TEXT, ContentTypes
from adapter.protocols.tables import read_table, write_table
from adapter.protocols.tensors import PIECE_VALUES, SIZES, cast, may_cast, packed
from adapter.runtime.threads import CONVERSIONS

P = ParamSpec("P")
T = TypeVar("T")

# Of text that becomes a tensor or is made of one, and from which on a thread does that.
MAX_TEXT_BYTES = 8 * 2**20
_SLOW_BYTES = 64 * 2**10
# Of bytes that come without their length, which stands in front of them in V2.
_MAX_UNKNOWN_BYTES = 64 * 2**20
_WHOLE_BYTES = 2**20
# In which an object of JSON begins.
_BEGIN_BYTES = 4 * 2**10
_LENGTH = struct.Struct("<I")
# Values as Triton writes them: flat, and a quote in a string has a backslash before it.
_DATA = b'"data":['
_VALUES = re.compile(
    rb"""(?:(?:"(?:[^"\\]|\\.)*+"|[^][{}",]++),?){1,%d}""" % PIECE_VALUES, re.DOTALL
)
_BLANKS = b" \t\r\n"


_ALWAYS = f"any answer can be {JSON} or {binary.MEDIA_TYPE}"


class Source:
    """A body whose beginning may be looked at before it is passed on; to be closed, which
    closes `held` too.
    """

    def __init__(self, body: bytes | AsyncIterator[bytes], held: ExitStack | None = None) -> None:
        self._closed_with = held
        self.is_whole = isinstance(body, bytes)
        self._held = body if isinstance(body, bytes) else b""
        self._more = None if isinstance(body, bytes) else body

    async def aclose(self) -> None:
        close = getattr(self._more, "aclose", None)
        try:
            if close is not None:
                await close()
        finally:
            if self._closed_with is not None:
                self._closed_with.close()

    async def start(self, size: int) -> bytes:
        """Return at least so many bytes, or all that there are."""
        while self._more is not None and len(self._held) < size:
            piece = await anext(self._more, None)
            if piece is None:
                self._more = None
            else:
                self._held += piece
        return self._held

    async def whole(self, most: int) -> bytes:
        """Raise PayloadTooLarge for more than so many bytes."""
        held = [await self.start(1)]
        size = len(held[0])
        while size <= most and self._more is not None:
            async for piece in self._more:
                held.append(piece)
                size += len(piece)
                if size > most:
                    break
            else:
                self._more = None
        if size > most:
            raise PayloadTooLarge(f"a body of this type may have {most} bytes at most")
        self._held, self.is_whole = b"".join(held), True
        return self._held

    async def begins_with_brace(self) -> bool:
        """Return whether the first byte that is no blank is that of an object in JSON, and one of
        the first 4096.
        """
        seen = 0
        while True:
            held = await self.start(seen + 1)
            begin = held[:_BEGIN_BYTES].lstrip(_BLANKS)
            if begin or len(held) == seen or len(held) >= _BEGIN_BYTES:
                return begin.startswith(b"{")
            seen = len(held)

    async def pieces(self, skip: int) -> AsyncIterator[bytes]:
        """Yield all but the first `skip` bytes, which are there."""
        held, self._held = self._held, b""
        yield held[skip:]
        if self._more is not None:
            async for piece in self._more:
                yield piece


@dataclass(frozen=True, slots=True)
class Converted:
    """`headers` say how long the body is."""

    headers: dict[str, str]
    body: bytes | AsyncIterator[bytes]


async def as_request(
    kind: Kind, source: Source, length: int | None, types: ContentTypes, answer_type: str
) -> Converted:
    """Return a request of V2 with the body as its only tensor; InvalidRequest for what is none.

    `length`: of the body, None where nobody knows.
    """
    is_binary = answer_type != JSON
    shape: tuple[int, ...]
    if kind is Kind.NPY:
        return await _npy_request(source, types, is_binary=is_binary)
    if kind is Kind.CSV:
        text = await source.whole(MAX_TEXT_BYTES)
        datatype = types.input.datatype
        try:
            shape, raw = await converted(len(text), read_table, text, datatype)
        except ValueError as error:
            raise InvalidRequest(f"text/csv: {error}") from error
        return await _request(Source(raw), types, shape, (0, len(raw)), is_binary=is_binary)
    if length is None:
        length = len(await source.whole(_MAX_UNKNOWN_BYTES))
    if not length:
        raise InvalidRequest("a body is needed")
    if types.input.datatype != "BYTES":
        shape = _raw_shape(types, length)
        return await _request(source, types, shape, (0, length), is_binary=is_binary)
    if length >= 2**32:
        raise PayloadTooLarge(f"the body has {length} bytes; a string has less than 4 GiB")
    return await _request(
        *(source, types, (1,) * (1 + types.is_batched), (0, length)),
        front=_LENGTH.pack(length),
        is_binary=is_binary,
    )


async def _npy_request(source: Source, types: ContentTypes, *, is_binary: bool) -> Converted:
    try:
        start = await source.start(npy.bytes_needed(b""))
        head = npy.read_head(await source.start(npy.bytes_needed(start)))
    except ValueError as error:
        raise InvalidRequest(f"{NPY}: {error}") from error
    given, wanted = head.datatype, types.input.datatype
    if given != wanted and not (types.casts and may_cast(given, wanted)):
        text = f"{NPY}: the array is {given}, input {types.input.name!r} is {wanted}"
        raise InvalidRequest(text + _hint(given, wanted))
    place = (head.offset, head.size)
    return await _request(source, types, head.shape, place, given=given, is_binary=is_binary)


def _hint(given: str, wanted: str) -> str:
    if may_cast(given, wanted):
        return f"; with {NPY};cast in the model's adapter_content_types it would become that"
    if given.startswith("FP") and may_cast(wanted, wanted):
        return "; floating-point numbers do not become integers"
    return ""


def _raw_shape(types: ContentTypes, length: int) -> tuple[int, ...]:
    """Return the shape of a lone example with so many bytes, as Triton would take it."""
    dims, datatype = types.input.shape, types.input.datatype
    known = math.prod(size for size in dims if size != -1) * SIZES[datatype]
    free, rest = divmod(length, known)
    if rest or (-1 not in dims and free != 1):
        text = f"{length} bytes are no {datatype} {list(dims)} of input {types.input.name!r}"
        raise InvalidRequest(text)
    shape = tuple(free if size == -1 else size for size in dims)
    return (1, *shape) if types.is_batched else shape


async def _request(
    source: Source,
    types: ContentTypes,
    shape: tuple[int, ...],
    place: tuple[int, int],
    *,
    is_binary: bool,
    front: bytes = b"",
    given: str | None = None,
) -> Converted:
    """`place`: where the values begin, and how many bytes of them there are. `given`: the type of
    numbers that may have to become the input's.
    """
    (skip, size), wanted = place, types.input.datatype
    is_cast = given is not None and given != wanted
    sent = len(front) + (size // SIZES[given] * SIZES[wanted] if given and is_cast else size)
    tensor = {
        "name": types.input.name,
        "datatype": types.input.datatype,
        "shape": shape,
        "parameters": {"binary_data_size": sent},
    }
    asked: dict[str, object] = {"inputs": [tensor]}
    if is_binary:
        asked["parameters"] = {"binary_data_output": True}
    head = json.dumps(asked, separators=(",", ":")).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Length": str(len(head) + sent),
    }
    pieces = _exactly(source.pieces(skip), size)
    if given and is_cast:
        pieces = _cast(pieces, given, wanted)
    body = _behind(head + front, pieces)
    return Converted(headers, b"".join([p async for p in body]) if source.is_whole else body)


async def _behind(front: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield front
    async for piece in pieces:
        if piece:
            yield piece


async def _exactly(pieces: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    left = size
    async for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise InvalidRequest(f"the body has more than the {size} bytes that its values take")
        yield piece
    if left:
        raise InvalidRequest(f"the body has {size - left} of the {size} bytes that its values take")


async def _cast(pieces: AsyncIterator[bytes], given: str, wanted: str) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        rest += piece
        end = len(rest) - len(rest) % SIZES[given]
        try:
            yield await converted(end, cast, rest[:end], given, wanted)
        except ValueError as error:
            raise InvalidRequest(f"{NPY}: {error}") from error
        rest = rest[end:]


# -- answers -----------------------------------------------------------------------------------


async def as_answer(found: V2Answer, answer_type: str) -> Converted:
    """Return the only tensor of the answer as that type; NotAcceptable for what cannot be that."""
    output, source, place = await _tensor(found)
    try:
        if answer_type == CSV:
            return await _table(output, source, place)
        front, (skip, size) = _framed(output, place, answer_type)
    except ValueError as error:
        name = str(output["name"])[:100]
        why = f"output {name!r} cannot be {answer_type}: {error}"
        raise NotAcceptable(f"{why}; {_ALWAYS}") from error
    await source.start(skip)
    kind = f"{TEXT}; charset=utf-8" if answer_type == TEXT else answer_type
    headers = {"Content-Type": kind, "Content-Length": str(len(front) + size)}
    body = _behind(front, source.pieces(skip))
    return Converted(headers, b"".join([p async for p in body]) if source.is_whole else body)


def _framed(
    output: dict[str, Any], place: tuple[int, int], answer_type: str
) -> tuple[bytes, tuple[int, int]]:
    """Return what stands before the values, and where they are."""
    skip, size = place
    datatype, shape = output["datatype"], tuple(output["shape"])
    if answer_type == NPY:
        return npy.write_head(datatype, shape), place
    if datatype != "BYTES":
        if answer_type == TEXT:
            raise ValueError(f"it is {datatype} and no string")
        return b"", place
    if math.prod(shape) != 1:
        raise ValueError(f"it has {math.prod(shape)} strings, and one can be told")
    return b"", (skip + _LENGTH.size, size - _LENGTH.size)


async def _table(output: dict[str, Any], source: Source, place: tuple[int, int]) -> Converted:
    skip, size = place
    datatype, shape = output["datatype"], tuple(output["shape"])
    if size > MAX_TEXT_BYTES:
        raise ValueError(f"it has {size} bytes of values, and at most {MAX_TEXT_BYTES} become text")
    raw = (await source.whole(skip + size))[skip:]
    text = await converted(size, write_table, raw, datatype, shape)
    return Converted({"Content-Type": CSV, "Content-Length": str(len(text))}, text)


async def _tensor(found: V2Answer) -> tuple[dict[str, Any], Source, tuple[int, int]]:
    """Return the output's description, and where its values begin and how many bytes they have."""
    head_size, length = found.json_header_bytes, found.content_length
    if head_size is None and (length is None or length > MAX_TEXT_BYTES):
        why = f"an answer in JSON of more than {MAX_TEXT_BYTES} bytes is not converted"
        raise NotAcceptable(f"{why}; ask for it as binary data")
    is_short = length is not None and length <= _WHOLE_BYTES
    source = Source(await found.read() if head_size is None or is_short else found.chunks())
    text = (await source.start(head_size or 0))[:head_size]
    try:
        rest, data = (text, None) if head_size else await converted(len(text), _split, text)
        _refuse_but_one(text.count(_DATA) or 1)
        outputs = (await converted(len(rest), json.loads, rest)).get("outputs", [])
        _refuse_but_one(len(outputs))
        output: dict[str, Any] = outputs[0]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None and (head_size is not None or not size):
            return output, source, (len(text), size)  # Triton marks no head before 0 bytes
        raw = await converted(len(text), _packed, output, data)
    except (ValueError, AttributeError) as error:
        why = "ask for it as binary data"
        raise NotAcceptable(f"the answer in JSON cannot be converted; {why}: {error}") from error
    return output, Source(raw), (0, len(raw))


def _refuse_but_one(outputs: int) -> None:
    if outputs != 1:
        why = f"the answer has {outputs} outputs, and only one can be converted"
        raise NotAcceptable(f"{why}; {_ALWAYS}")


def _split(text: bytes) -> tuple[bytes, list[bytes] | None]:
    """Return an answer without the values of its last output, and those: lists in JSON of a few
    thousand values each, as a parser that is given more holds the interpreter's lock.
    """
    front, mark, more = text.rpartition(_DATA)
    if not mark:
        return text, None
    at, pieces = 0, []
    while (found := _VALUES.match(more, at)) is not None:
        at = found.end()
        pieces.append(b"[" + found[0].removesuffix(b",") + b"]")
    return front + mark + more[at:], pieces


def _packed(output: dict[str, Any], data: list[bytes] | None) -> bytes:
    if "data" not in output or data is None:
        raise ValueError("its values are elsewhere, in shared memory perhaps")
    return b"".join(packed(output["datatype"], json.loads(piece)) for piece in data)


async def converted(size: int, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return act(*args), computed by a thread where so many bytes take long."""
    if size <= _SLOW_BYTES:
        return act(*args, **kwargs)
    return await CONVERSIONS.run(act, *args, **kwargs)
