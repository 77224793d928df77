"""Negotiates and converts content types, for models that opted into others than V2's own
(docs/content-types.md).

The values of a large tensor are passed on as they come, behind a head of ours.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from adapter.codecs import CODECS, CONTENT_TYPES_PARAMETER, codec_of
from adapter.codecs.base import MAX_TEXT_BYTES, Codec, Source, Values, converted
from adapter.codecs.npy import cast
from adapter.core.calls import V2Answer
from adapter.core.tensors import PIECE_VALUES, SIZES, ContentTypes, pack_values
from adapter.errors import (
    AdapterError,
    InvalidRequest,
    NotAcceptable,
    NotJson,
    UnsupportedMediaType,
)
from adapter.frontends.http import binary

JSON = "application/json"
# RFC 9110 wants a digit first; the URLConnection of Java 8 sends `*/*; q=.2`.
_QUALITY = re.compile(r"(?:0?\.[0-9]{1,3}|0\.?|1(?:\.0{0,3})?)")
_OF_CURL = "application/x-www-form-urlencoded"  # its default for -d
_MAX_QUOTED = 200
# A browser sends 8. A head has room for 5,000, which take 20 ms to read.
_MOST_RANGES = 100
_WHOLE_BYTES = 2**20
# Values as Triton writes them: flat, and a quote in a string has a backslash before it.
_DATA = b'"data":['
_VALUES = re.compile(
    rb"""(?:(?:"(?:[^"\\]|\\.)*+"|[^][{}",]++),?){1,%d}""" % PIECE_VALUES, re.DOTALL
)


_ALWAYS = f"any answer can be {JSON} or {binary.MEDIA_TYPE}"


@dataclass(frozen=True, slots=True)
class _Range:
    """A media range of Accept; `order` is its place."""

    media_type: str
    quality: float
    order: int

    def matches(self, media_type: str) -> bool:
        """Return whether the range covers a media type, also by a wildcard."""
        kind = media_type.partition("/")[0]
        return self.media_type in {media_type, f"{kind}/*", "*/*"}

    @property
    def precision(self) -> int:
        """Return how specific the range is: 2 for a type, 1 for type/*, 0 for */*."""
        return 2 - self.media_type.count("*")


_NOT_NAMED = _Range("", 0.0, 0)


def is_typed(content_type: str, accept: str) -> bool:
    """Return whether Content-Type or Accept asks for anything but V2's JSON."""
    return not _is_v2(content_type) or accept.strip().lower() not in {"", "*/*", JSON}


def _is_v2(content_type: str) -> bool:
    """Return whether a Content-Type is that of V2's JSON, or of V2 with binary tensors."""
    lowered = content_type.lower()
    return _media_type(lowered) in {"", JSON} or binary.MEDIA_TYPE in lowered


def _media_type(content_type: str) -> str:
    """Return the media type of a Content-Type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def codec_for(content_type: str, types: ContentTypes, *, is_packed: bool) -> Codec | None:
    """Return what reads a body, None for V2's own, or raise UnsupportedMediaType. `is_packed`: it
    comes compressed.
    """
    if _is_v2(content_type):
        return None
    media_type = _media_type(content_type)
    codec = codec_of(media_type)
    if codec is not None and codec.may_be_json:
        return None if is_packed else codec
    if codec is None or media_type not in types or is_packed:
        accepted = _list_accepted(types)
        shown_type = f"Content-Type {content_type[:_MAX_QUOTED]!r}"
        text = f"{shown_type} is not one that the model takes"
        if is_packed:
            text = f"a compressed body of {shown_type} is not taken; the model takes uncompressed"
        sent_by_curl = "; curl sends this type unless -H sets another"
        hint = sent_by_curl if media_type == _OF_CURL else ""
        raise UnsupportedMediaType(f"{text}: {accepted}{hint}", accepted=accepted)
    return codec


def refuse_unlisted(codec: Codec, types: ContentTypes) -> None:
    """Raise UnsupportedMediaType for a body that is not JSON if the model did not list its type."""
    if codec.media_type not in types:
        accepted = _list_accepted(types)
        text = f"Content-Type {codec.media_type!r} is for JSON alone here; the model takes"
        raise UnsupportedMediaType(f"{text} {accepted}", accepted=accepted)


def explained(
    error: AdapterError, headers: Mapping[str, str], types: ContentTypes | None
) -> AdapterError:
    """Return what is said of a body that is not the JSON for which it was taken: what its type
    would have needed.
    """
    content_type = headers.get("Content-Type", "")
    media_type = _media_type(content_type)
    if not isinstance(error, NotJson) or codec_of(media_type) is None:
        return error
    if types is None:
        taken = f"to take {media_type[:_MAX_QUOTED]!r}"
        need = f"{taken} the model needs the parameter {CONTENT_TYPES_PARAMETER} in its config"
        return NotJson(f"{error}; {need}", model_id=error.model_id)
    accepted = _list_accepted(types)  # a compressed body of bytes, which may be JSON alone
    text = (
        f"a compressed body of Content-Type {content_type[:_MAX_QUOTED]!r} is taken as JSON alone"
    )
    return UnsupportedMediaType(f"{text}; uncompressed: {accepted}", accepted=accepted)


def _list_accepted(types: ContentTypes) -> str:
    """Return the media types that a model takes, for an error."""
    return ", ".join([JSON, binary.MEDIA_TYPE, *types.types])


def answer_type(accept: str, types: ContentTypes, *, is_choosing: bool) -> str:
    """Return the type of the answer, or raise NotAcceptable. `is_choosing`: the request may name
    the outputs that it wants, so that only the answer has the types it can be of.
    """
    if not accept.strip():
        return JSON
    ranges = list(_ranges(accept))
    offered = _offered(types, is_choosing=is_choosing)

    def rank(media_type: str) -> tuple[float, int]:
        fitting = [each for each in ranges if each.matches(media_type)]
        named = max(fitting, key=lambda each: (each.precision, -each.order), default=_NOT_NAMED)
        return named.quality, -named.order

    chosen = max(offered, key=rank)
    if rank(chosen)[0] == 0:
        asked = accept[:_MAX_QUOTED]
        made = ", ".join(offered)
        allows = f"Accept {asked!r} allows, by a q above 0 and up to 1, none of the types"
        raise NotAcceptable(f"{allows} that an answer can be: {made}")
    return chosen


def _offered(types: ContentTypes, *, is_choosing: bool) -> list[str]:
    """Return the types that an answer of the model can be of, the preferred ones first."""
    offered = [JSON, binary.MEDIA_TYPE]
    outputs = types.outputs
    if is_choosing or not outputs:
        return [*offered, *(codec.media_type for codec in CODECS if codec.is_answer)]
    if len(outputs) > 1:
        return offered
    return offered + [
        codec.media_type
        for codec in CODECS
        if codec.is_answer and codec.can_answer(outputs[0], is_batched=types.is_batched)
    ]


def _ranges(accept: str) -> Iterator[_Range]:
    """Yield the media ranges that can be read, of the first `_MOST_RANGES`."""
    for order, part in enumerate(accept.lower().split(",", _MOST_RANGES)[:_MOST_RANGES]):
        media_type, *parameters = (each.strip() for each in part.split(";"))
        quality = 1.0
        for name, _, value in (each.partition("=") for each in parameters):
            if name.strip() == "q":
                given = value.strip()
                quality = float(given) if _QUALITY.fullmatch(given) else 0.0
        if "/" in media_type:
            yield _Range(media_type, quality, order)


@dataclass(frozen=True, slots=True)
class Converted:
    """Holds a converted body."""

    headers: dict[str, str]  # with the length of the body
    body: bytes | AsyncIterator[bytes]


# -- bodies as requests of V2 -------------------------------------------------------------------


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
    pieces = _check_length(values.source.pieces(values.skip), values.size)
    if given != wanted:
        pieces = _cast_pieces(pieces, given, wanted, codec.media_type)
    body = _prepend(head + values.front, pieces)
    is_whole = values.source.is_whole
    return Converted(headers, b"".join([each async for each in body]) if is_whole else body)


async def _prepend(front: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the front, then the pieces; nothing empty."""
    if front:
        yield front
    async for piece in pieces:
        if piece:
            yield piece


async def _check_length(pieces: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """Yield the pieces of a body; raise InvalidRequest unless they have exactly `size` bytes in
    all.
    """
    remaining_bytes = size
    async for piece in pieces:
        remaining_bytes -= len(piece)
        if remaining_bytes < 0:
            raise InvalidRequest(f"the body has more than the {size} bytes that its values take")
        yield piece
    if remaining_bytes:
        raise InvalidRequest(
            f"the body has {size - remaining_bytes} of the {size} bytes that its values take"
        )


async def _cast_pieces(
    pieces: AsyncIterator[bytes], given: str, wanted: str, media_type: str
) -> AsyncIterator[bytes]:
    """Yield the values in the pieces, cast from one datatype to another. Raises InvalidRequest for
    a value that does not fit.
    """
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


async def as_answer(answer: V2Answer, answer_type: str) -> Converted:
    """Return the only tensor of the answer as that type; NotAcceptable for what cannot be that."""
    codec = next(each for each in CODECS if each.is_answer and each.media_type == answer_type)
    output, values = await _tensor(answer)
    try:
        values = await codec.encode(output["datatype"], tuple(output["shape"]), values)
    except ValueError as error:
        name = str(output["name"])[:100]
        text = f"output {name!r} cannot be {answer_type}: {error}"
        raise NotAcceptable(f"{text}; {_ALWAYS}") from error
    source = values.source
    front = values.front
    skip = values.skip
    headers = {
        "Content-Type": answer_type + codec.parameters,
        "Content-Length": str(len(front) + values.size),
    }
    if source.is_whole:
        return Converted(headers, front + source.rest(skip))
    await source.start(skip)
    return Converted(headers, _prepend(front, source.pieces(skip)))


async def _tensor(answer: V2Answer) -> tuple[dict[str, Any], Values]:
    """Return the output's description, and its values."""
    head_size = answer.json_header_bytes
    length = answer.content_length
    if head_size is None and (length is None or length > MAX_TEXT_BYTES):
        why = f"an answer in JSON of more than {MAX_TEXT_BYTES} bytes is not converted"
        raise NotAcceptable(f"{why}; ask for it as binary data")
    is_short = length is not None and length <= _WHOLE_BYTES
    source = Source(await answer.read() if head_size is None or is_short else answer.chunks())
    text = (await source.start(head_size or 0))[:head_size]
    try:
        rest, data = (
            (text, None) if head_size else await converted(len(text), _split_last_values, text)
        )
        _refuse_but_one(text.count(_DATA) or 1)
        outputs = (await converted(len(rest), json.loads, rest)).get("outputs", [])
        _refuse_but_one(len(outputs))
        output: dict[str, Any] = outputs[0]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None and (head_size is not None or not size):
            return output, Values(source, len(text), size)  # Triton marks no head before 0 bytes
        raw = await converted(len(text), _pack_values, output, data)
    except (ValueError, AttributeError) as error:
        why = "ask for it as binary data"
        raise NotAcceptable(f"the answer in JSON cannot be converted; {why}: {error}") from error
    return output, Values(Source(raw), 0, len(raw))


def _refuse_but_one(outputs: int) -> None:
    """Raise NotAcceptable for an answer with several outputs, or none."""
    if outputs != 1:
        text = f"the answer has {outputs} outputs, and only one can be converted"
        raise NotAcceptable(f"{text}; {_ALWAYS}")


def _split_last_values(text: bytes) -> tuple[bytes, list[bytes] | None]:
    """Split an answer in JSON into the text without the values of its last output, and those
    values, as lists in JSON of a few thousand values each: a parser that is given more holds the
    interpreter's lock. The lists are None if there are no such values.
    """
    front, mark, more = text.rpartition(_DATA)
    if not mark:
        return text, None
    at = 0
    pieces = []
    while (match := _VALUES.match(more, at)) is not None:
        at = match.end()
        pieces.append(b"[" + match[0].removesuffix(b",") + b"]")
    return front + mark + more[at:], pieces


def _pack_values(output: dict[str, Any], data: list[bytes] | None) -> bytes:
    """Return the values of an output as binary tensors have them. Raises ValueError if they are not
    in the answer.
    """
    if "data" not in output or data is None:
        raise ValueError("its values are elsewhere, in shared memory perhaps")
    return b"".join(pack_values(output["datatype"], json.loads(piece)) for piece in data)
