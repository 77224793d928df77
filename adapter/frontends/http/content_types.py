"""Which content type a request has and which one its answer is to have, where a model opted into
others than V2's own (docs/content-types.md).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from adapter.errors import AdapterError, NotAcceptable, NotJson, UnsupportedMediaType
from adapter.frontends.http import binary
from adapter.protocols.codecs import CODECS, PARAMETER, codec_of
from adapter.protocols.codecs.base import Codec
from adapter.protocols.tensors import ContentTypes

JSON = "application/json"
_QUALITY = re.compile(r"(?:0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")
_MAX_QUOTED = 200
# A browser sends 8. A head has room for 5,000, which take 20 ms to read.
_MOST_RANGES = 100


@dataclass(frozen=True, slots=True)
class _Range:
    """A media range of Accept; `order` is its place."""

    media_type: str
    quality: float
    order: int

    def matches(self, media_type: str) -> bool:
        kind = media_type.partition("/")[0]
        return self.media_type in {media_type, f"{kind}/*", "*/*"}

    @property
    def precision(self) -> int:
        return 2 - self.media_type.count("*")


def is_typed(content_type: str, accept: str) -> bool:
    """Return whether the request is another for a model that opted in than for one that did not."""
    return not _is_v2(content_type) or accept.strip().lower() not in {"", "*/*", JSON}


def _is_v2(content_type: str) -> bool:
    given = content_type.lower()
    return _media_type(given) in {"", JSON} or binary.MEDIA_TYPE in given


def _media_type(content_type: str) -> str:
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
        accepted = _accepted(types)
        what = "a compressed body of " if is_packed else ""
        text = f"{what}Content-Type {content_type[:_MAX_QUOTED]!r} is not one that the model takes"
        raise UnsupportedMediaType(f"{text}: {accepted}", accepted=accepted)
    return codec


def refuse_unlisted(codec: Codec, types: ContentTypes) -> None:
    """Raise UnsupportedMediaType where a body that may be JSON is none, and the model takes no
    other of its type.
    """
    if codec.media_type not in types:
        accepted = _accepted(types)
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
        need = f"{taken} the model needs the parameter {PARAMETER} in its config"
        return NotJson(f"{error}; {need}", model_id=error.model_id)
    accepted = _accepted(types)  # a compressed body of bytes, which may be JSON alone
    text = (
        f"a compressed body of Content-Type {content_type[:_MAX_QUOTED]!r} is taken as JSON alone"
    )
    return UnsupportedMediaType(f"{text}; uncompressed: {accepted}", accepted=accepted)


def _accepted(types: ContentTypes) -> str:
    return ", ".join([JSON, binary.MEDIA_TYPE, *types.types])


def answer_type(accept: str, types: ContentTypes, *, is_choosing: bool) -> str:
    """Return the type of the answer, or raise NotAcceptable. `is_choosing`: the request may name
    the outputs that it wants, so that only the answer has the types it can be of.
    """
    if not accept.strip():
        return JSON
    ranges = list(_ranges(accept))
    offered = _offered(types, is_choosing=is_choosing)
    best: tuple[float, int] | None = None
    chosen = None
    for media_type in offered:
        fitting = [each for each in ranges if each.matches(media_type)]
        if not fitting:
            continue
        named = max(fitting, key=lambda each: (each.precision, -each.order))
        rank = (named.quality, -named.order)
        if named.quality > 0 and (best is None or rank > best):
            best, chosen = rank, media_type
    if chosen is None:
        asked, made = accept[:_MAX_QUOTED], ", ".join(offered)
        raise NotAcceptable(f"Accept {asked!r} has none of the types that an answer can be: {made}")
    return chosen


def _offered(types: ContentTypes, *, is_choosing: bool) -> list[str]:
    """Return the types that an answer of the model can be of, the preferred ones first."""
    found, outputs = [JSON, binary.MEDIA_TYPE], types.outputs
    if is_choosing or not outputs:
        return [*found, *(codec.media_type for codec in CODECS if codec.is_answer)]
    if len(outputs) > 1:
        return found
    return found + [
        codec.media_type
        for codec in CODECS
        if codec.is_answer and codec.may_answer(outputs[0], is_batched=types.is_batched)
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
