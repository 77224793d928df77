"""Bodies of other content types as requests of V2, and V2's answers as other content types.

The values of a large tensor are passed on as they come, behind a head of ours.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from adapter.core.calls import V2Answer
from adapter.errors import InvalidRequest, NotAcceptable
from adapter.frontends.http import binary
from adapter.frontends.http.content_types import JSON
from adapter.protocols.codecs import CODECS
from adapter.protocols.codecs.base import MAX_TEXT_BYTES, Codec, Source, Values, converted
from adapter.protocols.tensors import PIECE_VALUES, SIZES, ContentTypes, cast, packed

_WHOLE_BYTES = 2**20
# Values as Triton writes them: flat, and a quote in a string has a backslash before it.
_DATA = b'"data":['
_VALUES = re.compile(
    rb"""(?:(?:"(?:[^"\\]|\\.)*+"|[^][{}",]++),?){1,%d}""" % PIECE_VALUES, re.DOTALL
)


_ALWAYS = f"any answer can be {JSON} or {binary.MEDIA_TYPE}"


@dataclass(frozen=True, slots=True)
class Converted:
    """`headers` say how long the body is."""

    headers: dict[str, str]
    body: bytes | AsyncIterator[bytes]


async def as_request(
    codec: Codec, source: Source, length: int | None, types: ContentTypes, answer_type: str
) -> Converted:
    """Return a request of V2 with the body as its only tensor; InvalidRequest for what is none.

    `length`: of the body, None where nobody knows.
    """
    try:
        values = await codec.decode(source, length, types)
    except ValueError as error:
        raise InvalidRequest(f"{codec.media_type}: {error}") from error
    wanted = types.input.datatype
    given = values.datatype or wanted
    sent = len(values.front) + values.size
    if given != wanted:
        sent = values.size // SIZES[given] * SIZES[wanted]
    tensor = {
        "name": types.input.name,
        "datatype": wanted,
        "shape": values.shape,
        "parameters": {"binary_data_size": sent},
    }
    asked: dict[str, object] = {"inputs": [tensor]}
    if answer_type != JSON:
        asked["parameters"] = {"binary_data_output": True}
    head = json.dumps(asked, separators=(",", ":")).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(head)),
        "Content-Length": str(len(head) + sent),
    }
    pieces = _exactly(values.source.pieces(values.skip), values.size)
    if given != wanted:
        pieces = _cast(pieces, given, wanted, codec.media_type)
    body = _behind(head + values.front, pieces)
    is_whole = values.source.is_whole
    return Converted(headers, b"".join([each async for each in body]) if is_whole else body)


async def _behind(front: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if front:
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


async def _cast(
    pieces: AsyncIterator[bytes], given: str, wanted: str, media_type: str
) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        rest += piece
        end = len(rest) - len(rest) % SIZES[given]
        try:
            yield await converted(end, cast, rest[:end], given, wanted)
        except ValueError as error:
            raise InvalidRequest(f"{media_type}: {error}") from error
        rest = rest[end:]


# -- answers -----------------------------------------------------------------------------------


async def as_answer(found: V2Answer, answer_type: str) -> Converted:
    """Return the only tensor of the answer as that type; NotAcceptable for what cannot be that."""
    codec = next(each for each in CODECS if each.is_answer and each.media_type == answer_type)
    output, values = await _tensor(found)
    try:
        values = await codec.encode(output["datatype"], tuple(output["shape"]), values)
    except ValueError as error:
        name = str(output["name"])[:100]
        why = f"output {name!r} cannot be {answer_type}: {error}"
        raise NotAcceptable(f"{why}; {_ALWAYS}") from error
    source, front, skip = values.source, values.front, values.skip
    headers = {
        "Content-Type": answer_type + codec.parameters,
        "Content-Length": str(len(front) + values.size),
    }
    if source.is_whole:
        return Converted(headers, front + source.rest(skip))
    await source.start(skip)
    return Converted(headers, _behind(front, source.pieces(skip)))


async def _tensor(found: V2Answer) -> tuple[dict[str, Any], Values]:
    """Return the output's description, and its values."""
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
            return output, Values(source, len(text), size)  # Triton marks no head before 0 bytes
        raw = await converted(len(text), _packed, output, data)
    except (ValueError, AttributeError) as error:
        why = "ask for it as binary data"
        raise NotAcceptable(f"the answer in JSON cannot be converted; {why}: {error}") from error
    return output, Values(Source(raw), 0, len(raw))


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
